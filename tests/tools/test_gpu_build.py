"""`make gpu-build`, and what continuous integration calls: one sentence says what is missing, and the status is 0."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPENDS_ON = (".ci/gpu-build", "constraints.txt", "hvdkit/prepare/install/patches/01-cxx20.patch")


@pytest.fixture
def toolkit(tmp_path):
    """What is taken for CUDA 13."""
    nvcc, header = tmp_path / "cuda/bin/nvcc", tmp_path / "cuda/include/cuda_runtime.h"
    for file, text in ((nvcc, "#!/bin/sh\necho 'release 13.0, V13.0.88'\n"), (header, "")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path / "cuda"


@pytest.fixture
def skipped(tmp_path, toolkit):
    """Runs it, and gives the sentence with which it skipped."""

    def run(*words, root=ROOT, start=(), **environ):
        environ = {
            "GPU_PYTHON": sys.executable,
            "GPU_VENV": str(tmp_path / "venv"),
            "CUDA_HOME": str(toolkit),
            **environ,
        }
        done = subprocess.run(
            [*start, root / ".ci/gpu-build", *words],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert line.startswith("gpu-build skipped: ")
        return line.removeprefix("gpu-build skipped: ")

    return run


def with_mounts(script, directory):
    """What to start it with, for mounts of its own; root alone can."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mounts something, which root alone can do")
    return ["unshare", "--mount", "sh", "-c", f'{script} && shift && exec "$@"', "sh", directory]


def test_without_python(skipped):
    assert skipped(GPU_PYTHON="python3.99") == "no python3.99 that can make environments; GPU_PYTHON names another"


@pytest.mark.root
@pytest.mark.skipif(not Path("/usr/local/cuda").exists(), reason="there is nothing to hide")
def test_without_nvcc(skipped, tmp_path):
    start = with_mounts('mount -t tmpfs none "$(realpath /usr/local/cuda)"', tmp_path)
    expected = "no nvcc with its headers (looked at CUDA_HOME, PATH and /usr/local/cuda)"
    assert skipped(CUDA_HOME="", start=start) == expected


@pytest.mark.root
def test_without_room(skipped, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    start = with_mounts('mount -t tmpfs -o size=1m none "$1"', small)
    expected = f"{small} has 1 GB free, and it takes 8; GPU_VENV and TMPDIR name other places"
    assert skipped(start=start, GPU_VENV=str(small / "venv")) == expected


@pytest.mark.slow
def test_without_network(skipped):
    # Nobody listens there.
    sentence = skipped(PIP_INDEX_URL="http://127.0.0.1:1/simple", GPU_FRAMEWORKS="torch==2.11.0")
    assert sentence == "the package index does not give torch==2.11.0: [Errno 111] Connection refused"


@pytest.mark.slow
def test_with_builds_of_pytorch_for_another_cuda(skipped, tmp_path):
    with zipfile.ZipFile(tmp_path / "torch-2.11.0-py3-none-any.whl", "w") as wheel:
        head = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\nRequires-Dist: nvidia-nccl-cu12\n"
        wheel.writestr("torch-2.11.0.dist-info/METADATA", head)
        wheel.writestr("torch-2.11.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-2.11.0.dist-info/RECORD", "")
    sentence = skipped(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), GPU_FRAMEWORKS="torch==2.11.0")
    assert sentence.startswith("torch==2.11.0 of the package index brings no NCCL for CUDA 13, which nvcc is of")


def test_it_is_built_again_only_where_what_it_depends_on_has_changed(skipped, tmp_path):
    tree, digest = tmp_path / "tree", hashlib.sha256()
    for name in (*DEPENDS_ON, ".ci/find-python"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
        if name in DEPENDS_ON:
            digest.update(f"{hashlib.sha256((tree / name).read_bytes()).hexdigest()}  {name}\n".encode())
    for words in ("init --quiet", "add ."):
        subprocess.run(["git", *words.split()], cwd=tree, check=True)
    (tree / ".ci/gpu-built").write_text(f"{digest.hexdigest()}  -\n")
    unchanged = "nothing that it depends on has changed since it last passed"
    assert skipped("--if-changed", root=tree) == unchanged
    assert skipped(root=tree, GPU_PYTHON="python3.99") != unchanged
    (tree / DEPENDS_ON[-1]).write_text("another patch")
    assert skipped("--if-changed", root=tree, GPU_PYTHON="python3.99").startswith("no python3.99")
