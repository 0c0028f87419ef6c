"""examples/pytorch/transformer.py on one rank and two, with both backends and both sources of data."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import rank_environment

from hvdkit.cli import run

MISSING = [name for name in ("torch", "horovod", "h5py", "msgspec") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch" / "transformer.py"
SIZES = {
    "samples": 64, "width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 32,
    "target_length": 3, "dropout": 0, "scaling": "none", "epochs": 2, "num_threads": 1,
}  # fmt: skip
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
CAN_COMPILE = bool(shutil.which("g++") or shutil.which("c++"))
MISTAKES = {
    ("--heads", "3", 8): "cannot be shared by --heads 3",
    ("--dropout", "1", 8): "--dropout must be below 1",
    ("--compile", "fast", 8): "--compile fast is no backend of torch.compile; give ",
    (0,): "must be at least 1, got 0",
}
ALLREDUCE = {"horovod": "hvdkit:allreduce_wait", "ddp": "gloo:all_reduce"}


DRIVER = """
import json, os, runpy, sys
_, example, runs = sys.argv
for directory, words in json.loads(runs):
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    sys.argv = [example, *words]
    try:
        runpy.run_path(example, run_name="__main__")
    except SystemExit as end:
        print("exit", end.code, file=sys.stderr)
"""
"""Runs the example several times in one process: importing PyTorch and Horovod takes longest."""


@dataclass
class Run:
    """What one run of the example said and left behind."""

    losses: list[float]
    status: str
    directory: Path


def exits(said, n):
    """The status of each run, the same on all n ranks; a rank prints its own in order, but at any time."""
    by_rank = {}
    for rank, status in re.findall(r"^(?:\[(\d+)\] )?exit (\d+)$", said, re.MULTILINE):
        by_rank.setdefault(rank, []).append(status)
    (statuses,) = {tuple(one) for one in by_rank.values()}
    assert len(by_rank) == n, said
    return statuses


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Run the example on n ranks, once for each tuple of words, which end in the samples of a rank's batch."""

    def run_all(n, *runs):
        base = tmp_path_factory.mktemp("transformer")
        plans = [
            (str(base / str(number)), [*TINY, *words[:-1], "--batch_size", str(words[-1])])
            for number, words in enumerate(runs)
        ]
        start = ["hvdkit", "launch", "-n", str(n), "--"] if n > 1 else []
        environment = {**rank_environment(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.getbasetemp() / "compiled")
        done = subprocess.run(
            [*start, sys.executable, "-c", DRIVER, str(EXAMPLE), json.dumps(plans)],
            env=environment, capture_output=True, text=True, timeout=560,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        statuses = exits(done.stderr, n)
        assert len(statuses) == len(runs), done.stderr
        losses = [
            float(loss) for loss in re.findall(r"^(?:\[0\] )?epoch \d+/\d+ loss (\S+)$", done.stdout, re.MULTILINE)
        ]
        found = []
        for (directory, words), status in zip(plans, statuses, strict=True):
            epochs = 0 if status != "0" else int(words[words.index("--epochs") + 1])
            found.append(Run(losses[:epochs], status, Path(directory)))
            losses = losses[epochs:]
        assert done.stdout.count(f"Hvd Procs {n} Total time: ") == sum(run.status == "0" for run in found)
        return found, done.stderr

    return run_all


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """What one process does in one go: by name."""
    path = tmp_path_factory.mktemp("kept") / "data.h5"
    kept = ("--backend", "ddp", "--data", "h5", "--data_file", str(path))
    plan = {
        "plain": ("--backend", "ddp", 16),
        "workers": ("--backend", "ddp", "--data", "h5", "--workers", "2", 16),
        "first": (*kept, 16),
        "again": (*kept, 16),
        **({"inductor": ("--backend", "ddp", "--compile", 16)} if CAN_COMPILE else {}),
        # A run that fails leaves its process group behind: what follows must fail before it starts one.
        "other": (*kept, "--seed", "1", 16),
        **{sentence: words for words, sentence in MISTAKES.items()},
    }
    found, said = train(1, *plan.values())
    return dict(zip(plan, found, strict=True)), said, path


PAIR = [  # DDP first: it must not need a Horovod that has been started
    *(("ddp", data, False) for data in ("memory", "h5")),
    ("ddp", "memory", True),
    *(("horovod", data, False) for data in ("memory", "h5")),
    ("horovod", "h5", True),
]
"""Each backend with each source of data, and each of these compiled once."""
WITH_FILE = PAIR.index(("ddp", "h5", False))


@pytest.fixture(scope="module")
def pair(train):
    """Two ranks, one after the other: backend, data and whether it is compiled, to what the run left behind."""
    words = [
        ("--backend", backend, "--data", data, "--profile", "profile", *(["--compile", "aot_eager"] * compiled), 8)
        for backend, data, compiled in PAIR
    ]
    (*found, other), said = train(
        2, *words, ("--data", "h5", "--data_file", f"../{WITH_FILE}/transformer.h5", "--seed", "1", 8)
    )
    assert other.status == "2" and said.count("holds other data") == 2, "both ranks say so, and none waits forever"
    return dict(zip(PAIR, found, strict=True))


def test_ranks_that_end_in_any_order_are_told_apart():
    assert exits("[1] exit 0\n[1] exit 2\n[0] exit 0\n[0] exit 2\n", 2) == ("0", "2")
    assert exits("exit 0\nexit 2\n", 1) == ("0", "2")


def test_one_process_learns_and_leaves_no_file(alone):
    one = alone[0]["plain"]
    assert one.losses[1] < one.losses[0]
    assert list(one.directory.iterdir()) == [], "no file is written where none was asked for"


def test_workers_read_the_file_for_themselves(alone):
    one = alone[0]["workers"]
    assert one.losses == pytest.approx(alone[0]["plain"].losses, rel=1e-5)
    assert [path.name for path in one.directory.iterdir()] == ["transformer.h5"]


@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_equals_one_that_is_not(alone):
    assert alone[0]["inductor"].status == "0", alone[1]
    assert alone[0]["inductor"].losses == pytest.approx(alone[0]["plain"].losses, rel=1e-4)


@pytest.mark.parametrize(("backend", "data", "compiled"), PAIR)
def test_two_ranks_equal_one_and_the_trace_shows_data_and_allreduce(alone, pair, capsys, backend, data, compiled):
    one = pair[backend, data, compiled]
    assert one.losses == pytest.approx(alone[0]["plain"].losses, rel=1e-4)
    assert (one.directory / "transformer.h5").exists() == (data == "h5")
    names = check_traces(one.directory / "profile", ALLREDUCE[backend], capsys)
    assert any(name.startswith(("Torch-Compiled Region", "CompiledFunction")) for name in names) == compiled


def check_traces(directory, allreduce, capsys):
    capsys.readouterr()
    assert run(["trace", "summary", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert len(rank["steps"]) == 2
        assert all(step[name] > 0 for step in rank["steps"] for name in ("data_s", "computation_s"))
        assert rank["times"]["communication_s"] > 0
        assert allreduce in [one["name"] for one in rank["operators"]]
    return {one["name"] for rank in found["ranks"] for one in rank["operators"]}


def test_a_file_that_is_there_is_used_and_never_replaced(alone):
    runs, said, path = alone
    assert [runs[name].status for name in ("first", "again", "other")] == ["0", "0", "2"]
    assert runs["first"].losses == runs["again"].losses == runs["workers"].losses
    assert said.count("holds other data") == 1
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("sentence", MISTAKES.values())
def test_mistakes_are_one_sentence(alone, sentence):
    runs, said, _ = alone
    assert runs[sentence].status == "2" and sentence in said
