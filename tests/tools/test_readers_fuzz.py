"""Every reader of a user's file, given damaged real files: what it holds, or one sentence on what is wrong with it.

For long: ``HVDKIT_FUZZ=20000 pytest tests/tools/test_readers_fuzz.py``, that many files for each reader. Data sets have
such tests beside those of their readers.
"""

import contextlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import emulate_results
import mpi_profile_files
import pytest
import timeline_files
import trace_files
from bench_machine import Machine, run_bench, use
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import HvdkitError
from hvdkit.jobs.job import site
from hvdkit.jobs.launch import hosts, tuned
from hvdkit.jobs.launch.tuned import Tuned, TunedFile
from hvdkit.observe import step_files
from hvdkit.read.explain.sources import JobLaunch
from hvdkit.steps.checkpoint import CheckpointDirectory

FILES = os.environ.get("HVDKIT_FUZZ")
DATA = Path(__file__).parents[1] / "data"
ODD = (
    b"", b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"105.816.017", b"9" * 400, b"18446744073709551616", b"\xd9\xa3",
    b"null", b"true", b'""', b'"a"', b'"\\ud800"', b"\xff\xfe", b"[]", b"{}", b"\0", b"\r\n", b",", b"../../x", b"=",
)  # fmt: skip
NESTED = (b"[" * 20_000, b'{"a":' * 20_000)
TOKEN = re.compile(rb'"[^"\n]*"|-?\d[\d.e+-]*|\w+|[^\w\s]')


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some of its words exchanged for odd ones or each other, bytes changed, or cut off."""
    nested = NESTED if content[:1] in b"{[" else ODD
    for _ in range(draw(st.integers(1, 5))):
        tokens = [match.span() for match in TOKEN.finditer(content[:20_000])] or [(0, 0)]
        how = draw(st.integers(0, 9))
        first, last = draw(st.sampled_from(tokens))
        if how < 4:
            new = draw(st.sampled_from(ODD if how else nested))
        elif how < 7:
            other = draw(st.sampled_from(tokens))
            new = content[slice(*other)]
        else:
            first = draw(st.integers(0, len(content)))
            last = len(content) if how == 9 else first + draw(st.integers(0, 40))
            new = draw(st.binary(max_size=20))
        content = content[:first] + new + content[last:]
    return content


def command(*words: str) -> Callable[[Path], int]:
    """Give the file to a command; what it calls an error is one sentence."""

    def run(path: Path) -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            status = cli.run([str(path) if word == "FILE" else word for word in words])
        assert status in (0, 1, 2)
        assert sum(line.startswith("hvdkit: ") for line in errors.getvalue().splitlines()) <= status
        return status

    return run


def checkpoints(path: Path) -> None:
    directory = CheckpointDirectory(path.parents[1], keep=2, keep_best=1)
    for look in (directory.latest, directory.best, lambda: shutil.rmtree(directory.save(9, bytes).path)):
        with contextlib.suppress(HvdkitError):
            look()
    assert path.exists(), "the only checkpoint was removed"


READERS: dict[str, Callable[[Path], object]] = {
    "timeline.json": command("timeline", "summary", "FILE"),
    "trace.json": command("trace", "summary", "FILE"),
    "mpi_profile.2500161.0": command("mpi-profile", "show", "FILE"),
    "mpi_profile.0.json": command("mpi-profile", "show", "FILE"),
    "bench.json": command("bench", "show", "FILE"),
    "emulate.json": command("emulate", "show", "FILE"),
    "fit.json": command("plan", "scale", "--fit", "FILE", "--alpha-us", "10", "--bandwidth-gbit", "10", "--at", "4,64"),
    "plan.json": command("emulate", "sizes", "--plan", "FILE"),
    "metrics.jsonl": command("watch", "FILE", "--once"),
    "script.py": command("check", "FILE"),
    "tuned.json": tuned.read,
    "autotune.csv": tuned.read,
    "site.toml": site.read,
    "hosts": hosts.read,
    "steps/rank-0.jsonl": lambda path: step_files.read(path.parent),
    "explain/rank-0.jsonl": command("explain", "FILE"),
    "launch.json": command("explain", "FILE"),
    "run/step-0000000001/manifest.json": checkpoints,
}
"""By the name that the file has."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readers")


@pytest.fixture(scope="module")
def real(place: Path) -> Callable[[str], bytes]:
    """What each file holds while nothing is wrong with it, by name."""
    events = [trace_files.step(5, 0, 100), trace_files.data(0, 10), trace_files.event("aten::mm", 10, 50)]
    events += [trace_files.gloo(50, 30), trace_files.kernel("k", 60, 9)]
    with pytest.MonkeyPatch.context() as patch:
        machine = use(place, patch, Machine(lambda n: 0.01 / n))
        machine.marks = True
        assert run_bench("--repeats", "2", ranks="1,2") == 0
    made = emulate_results.made({1024: 1e-4, 1 << 20: 1e-3}, trials=3)
    json_files.write(place / "emulate.json", made)
    json_files.write(place / "plan.json", made.plan)
    json_files.write(place / "tuned.json", TunedFile(Tuned("mpirun", 2, 0.0015, 1 << 20, 512, True)))
    CheckpointDirectory(place / "run").save(1, lambda folder: None, {"epoch": 2, "data": {"position": 8}}, score=0.5)
    steps = b'{"hvdkit": "step times", "version": 1, "rank": 0, "host": 7}\n'
    steps += b"".join(b"[%d.0, %d.1, %d.5, %d.9]\n" % (at, at, at, at) for at in range(20))
    steps += b'{"steps": 15, "ran": 1.5, "queued": 0.5, "of_all": 2.0}\n'
    contents = {
        "timeline.json": timeline_files.REAL[1].read_bytes()[:20_000],
        "trace.json": trace_files.text(*events, rank=0).encode(),
        "mpi_profile.2500161.0": mpi_profile_files.MPITRACE[0].read_bytes(),
        "mpi_profile.0.json": json.dumps(mpi_profile_files.record(0, 1)).encode(),
        "bench.json": (place / "results.json").read_bytes(),
        "fit.json": (place / "emulate.json").read_bytes(),
        "metrics.jsonl": (DATA / "watch" / "metrics.jsonl").read_bytes()[:3000],
        "script.py": (DATA / "check" / "correct" / "horovod_torch.py").read_bytes(),
        "autotune.csv": next((DATA / "autotune").glob("*.csv")).read_bytes(),
        "site.toml": (site.SITES / "polaris.toml").read_bytes(),
        "hosts": b"node1:4\nnode2 slots=2  # the rest\nnode3\nnode3\n",
        "steps/rank-0.jsonl": b'{"hvdkit": "step times", "version": 1, "rank": 0}\n[0.5, 0.6, null, 0.7]\n',
        "explain/rank-0.jsonl": steps,
        "launch.json": json_files.encode(JobLaunch(2, "mpirun", 4, 2, 1, {"HOROVOD_CYCLE_TIME": "1"})).encode(),
    }
    written = {name: (place / name).read_bytes() for name in READERS if name not in contents}
    for name in contents:
        (place / name).parent.mkdir(exist_ok=True)
    contents |= written
    return lambda name: contents[name]


@pytest.mark.parametrize("name", READERS)
def test_the_real_files_are_read(place: Path, real: Callable[[str], bytes], name: str) -> None:
    (place / name).write_bytes(real(name))
    assert READERS[name](place / name) not in (1, 2)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=int(FILES or 25), suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_none(
    place: Path, real: Callable[[str], bytes], name: str, data: st.DataObject
) -> None:
    (place / name).write_bytes(data.draw(damaged(real(name)) | st.binary(max_size=300)))
    with warnings.catch_warnings(), contextlib.suppress(HvdkitError):
        warnings.simplefilter("ignore")
        READERS[name](place / name)
