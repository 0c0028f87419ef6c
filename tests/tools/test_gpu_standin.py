"""What ``tests/gpu/run.py`` says of what its ranks print, and where it cannot build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

GPU = Path(__file__).parents[1] / "gpu"


@pytest.fixture(scope="module")
def run() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GPU))
        import run

        yield run
    for name in ("run", "build", "faults"):  # others may have modules of these names
        del sys.modules[name]


@pytest.mark.parametrize(
    ("printed", "code", "right"),
    [
        ("allreduce\t0\t5\t\nend\t0\t0\t\n", 0, True),
        ("allreduce\t1\t5\telement 0 is 1, not 2\nend\t0\t0\t\n", 0, False),
        ("allreduce\t-1\t0\tan error\nend\t0\t0\t\n", 0, False),
        ("allreduce\t0\t5\t\n", 0, False),
        ("allreduce\t0\t5\t\nend\t0\t0\t\n", 3, False),
        ("", -11, False),
        ("fails\t-1\t0\tan error\nend\t0\t0\t\n", 0, True),
        ("fails\t0\t5\t\nend\t0\t0\t\n", 0, False),
        ("fails\t2\t5\telement 0 is 1, not 2\nend\t0\t0\t\n", 0, False),
        ("fails\t-1\t0\thung: 1 requests are open\nend\t0\t0\t\n", 0, False),
    ],
)
def test_a_rank_is_right_only_if_all_its_cases_are(run: ModuleType, printed: str, code: int, right: bool) -> None:
    outcome = run.Outcome()
    run._judge(run.Job("two", (2,)), 0, code, printed, outcome)
    assert (not outcome.wrong) == right


def test_mpirun_speaks_for_all_ranks(run: ModuleType) -> None:
    for ends, wrong in [(2, []), (1, ["ended with exit code 0"])]:
        outcome = run.Outcome()
        run._judge(run.Job("two", (2,), mpi=True), 0, 0, "end\t0\t0\t\n" * ends, outcome)
        assert outcome.wrong == wrong


def test_every_fault_names_a_job(run: ModuleType) -> None:
    assert {fault.job for fault in run.FAULTS} <= set(run.JOBS)
    assert len({fault.name for fault in run.FAULTS}) == len(run.FAULTS)


def test_what_it_takes_from_the_install_is_there(run: ModuleType) -> None:
    """It compiles for minutes, and only where CUDA is."""
    text = (GPU / "build.py").read_text()
    taken = set(re.findall(r"\b(adjust|build|here)\.(\w+)\(", text))
    assert len(taken) > 5
    assert not [name for module, name in taken if not callable(getattr(getattr(run.build, module), name, None))]


def test_without_cuda_it_says_what_is_missing(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(GPU)!r}); import build, run\n"
        "build.here.find_cuda = lambda *_: None\n"
        "sys.exit(run.main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        ended.stdout
        == "Skipped: There is no CUDA toolkit here: set CUDA_HOME, or install nvcc and the headers of CUDA.\n"
    )
