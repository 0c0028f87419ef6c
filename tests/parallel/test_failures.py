"""One rank raises, is killed, leaves or hangs: how the job ends, and what the user reads last.

``-rP`` prints the seconds from the failure to the end of the job, the numbers of docs/failures.md; ``-k`` chooses one,
so that none fails beside it.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import warm

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TIMEOUT_S = 180
FAIL_FAST_S = 60.0
"""Longer takes a job that waits for a time limit of Horovod, Gloo or TCP; docs/failures.md has the seconds."""
STALL_TIMEOUT_S = {"hang": 10, "before": 15}
"""Less, and a busy machine's slower rank, not the one that hangs, is what the others waited for. Before ``init`` that
is one that imports its framework."""
AT_A_TIME = 3

STATUSES = {
    "raise": 1,
    "kill": 137,
    "exit": 3,
    "leave": 1,
    "_exit": 4,
    "segfault": 139,
    "hang": 75,
    "before": 75,
    "absent": 1,
}
MATRIX = [
    *(("torch", how, launcher) for how in STATUSES for launcher in ("mpirun", "horovodrun")),
    *(
        ("keras", how, launcher)
        for how in ("raise", "kill", "exit", "leave", "hang")
        for launcher in ("mpirun", "horovodrun")
    ),
]

OF_THEIR_OWN = {"mpirun": ("raise", "kill", "segfault", "before"), "horovodrun": ("raise", "before")}
"""How ranks of PyTorch fail that are processes of the launcher."""


def on_path(program: str) -> bool:
    return shutil.which(program, path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is not None


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not on_path(program), reason=f"no {program}")


LAUNCHERS = [pytest.param(name, marks=needs(name)) for name in ("mpirun", "horovodrun")]


def launch(directory, *words, inside=()):
    """``hvdkit launch -n 2`` of a script; gives status, standard output, lines of standard error, time of the end."""
    outer = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment.update(PYTHONPATH=str(HERE.parent.parent), TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")
    argv = [*inside, sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", *words]
    done = subprocess.run(argv, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr.splitlines(), time.time()


def failing(framework, how, launcher):
    """The words for ``launch`` of one cell of the matrix.

    All but some of PyTorch's ranks are forks of a process that has imported the framework.
    """
    options, command = ["--launcher", launcher], [sys.executable, str(HERE / "programs_failures.py")]
    if how in STALL_TIMEOUT_S:
        options += ["--stall-timeout", str(STALL_TIMEOUT_S[how]), "--stall-dir", "stacks"]
    if framework == "keras" or how not in OF_THEIR_OWN[launcher]:
        command = warm(framework).stub("rank_script", command[1])
    return [*options, "--", *command, framework, how]


def lacking(framework):
    packages = ("horovod", "torch") if framework == "torch" else ("horovod", "tensorflow", "keras")
    return [package for package in packages if importlib.util.find_spec(package) is None]


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """The end of a job and its directory, by cell of the matrix; several at a time, since they mostly wait."""
    matrix = [item for item in request.session.items if item.originalname == "test_the_failure_matrix"]
    chosen = [tuple(item.callspec.params[name] for name in ("framework", "how", "launcher")) for item in matrix]
    cells = {cell: tmp_path_factory.mktemp("failure") for cell in chosen if on_path(cell[2]) and not lacking(cell[0])}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs = {cell: pool.submit(launch, directory, *failing(*cell)) for cell, directory in cells.items()}
        yield {cell: (job, cells[cell]) for cell, job in jobs.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("framework", "how", "launcher"), [pytest.param(*cell, marks=needs(cell[2])) for cell in MATRIX]
)
def test_the_failure_matrix(failures, framework, how, launcher):
    if lacking(framework):
        pytest.skip(f"no {', '.join(lacking(framework))}")
    job, directory = failures[framework, how, launcher]
    status, out, errors, end = job.result()
    status_wanted, text = STATUSES[how], "\n".join(errors)
    failed_at = re.search(r"^\[1\] failing at (\S+)$", out, re.MULTILINE)
    assert failed_at is not None, text
    seconds = end - float(failed_at[1])
    print(f"{framework} {how} {launcher}: {seconds:.1f} s")

    assert status == status_wanted, text
    assert "[0] Traceback" not in text, "the error of rank 0 is a consequence, to be folded"
    if how == "before":
        awaited = "hvdkit launch: rank 1 has not called init yet, where rank 0 waits; the job goes on."
        assert sum(line.startswith(awaited) for line in errors) == 1
    if status == 75:
        check_the_explanation(errors[-1], directory / "stacks", STALL_TIMEOUT_S[how])
        return
    assert seconds < FAIL_FAST_S
    assert re.fullmatch(r"hvdkit launch: rank 1 \(pid \d+\) (exited|was killed).*; the job was ended\.", errors[-1])
    if how == "leave":
        assert errors[-1].endswith("exited with status 0 before the others were done; the job was ended.")
    if how == "absent":
        assert errors[-1].endswith(" before it called init, where rank 0 waited for it; the job was ended.")
    if how == "raise":
        cause = "ValueError: the batch of rank 1 is bad"
        note = f"[1] hvdkit: rank 1 failed in epoch 1, batch 6 of 10: {cause}, while rank 0 went on."
        told = [f"[1] {cause}", *([note] if framework == "keras" else [])]
        assert errors[-1 - len(told) : -1] == told
        (start,) = [i for i, line in enumerate(errors) if line == "[1] Traceback (most recent call last):"]
        assert all(line.startswith("[1] ") for line in errors[start:-1])


def check_the_explanation(verdict, directory, seconds):
    waited = f"hvdkit launch: a collective waited longer than {seconds} s: "
    assert verdict.startswith(f"{waited}rank 1 did not arrive at ")
    assert str(directory) in verdict
    assert sorted(path.name for path in directory.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    late = (directory / "rank-1.txt").read_text()
    assert late.startswith("rank 1 did not arrive at")
    assert "in wait_for_a_lock" in late
    assert "programs_failures.py" in (directory / "rank-0.txt").read_text()


RANK = "import os\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('HOROVOD_RANK', '0')))\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_that_was_killed_is_named_with_its_signal(tmp_path, launcher):
    (tmp_path / "loads.py").write_text(f"""{RANK}
import multiprocessing, signal
worker = multiprocessing.Process(target=lambda: os.kill(os.getpid(), signal.SIGKILL))
if rank == 1:
    worker.start()
    print("worker", worker.pid, flush=True)
    worker.join()
    raise RuntimeError("a worker exited unexpectedly")
""")
    status, out, errors, _ = launch(tmp_path, "--launcher", launcher, "loads.py")
    worker = re.fullmatch(r"\[1\] worker (\d+)\n", out)
    assert status == 1, errors
    assert worker is not None, out
    assert re.fullmatch(
        rf"hvdkit launch: rank 1 \(pid \d+\) exited with status 1 after its worker \(pid {worker[1]}\) had been killed "
        r"by SIGKILL; the job was ended\.",
        errors[-1],
    )


@contextlib.contextmanager
def cgroup(controller, **settings):
    """A cgroup of version 1 of its own, gone at the end."""
    place = Path("/sys/fs/cgroup", controller, f"hvdkit-test-{os.getpid()}")
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroups of version 1: {error.strerror}")
    try:
        for name, value in settings.items():
            (place / name.replace("__", ".")).write_text(value)
        yield place
    finally:
        place.rmdir()


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_with_the_limit(tmp_path):
    (tmp_path / "hog.py").write_text(f"{RANK}held = bytearray(rank * 600_000_000)\n")
    with cgroup("memory", memory__limit_in_bytes="300000000") as place:
        inside = ["sh", "-c", f'echo $$ > {place}/tasks; exec "$@"', "sh"]
        status, _, errors, _ = launch(tmp_path, "hog.py", inside=inside)
    assert status == 137, errors
    assert errors[-1].endswith(
        " was killed by SIGKILL because memory ran out (the limit of its cgroup is 300 MB); the job was ended."
    )


def test_a_process_that_cannot_be_ended_is_named(tmp_path):
    with cgroup("freezer") as place:
        (tmp_path / "frozen.py").write_text(f"""{RANK}
import sys, time
from pathlib import Path
if rank == 1:
    if not (child := os.fork()):
        Path("{place}/tasks").write_text(str(os.getpid()))
        Path("{place}/freezer.state").write_text("FROZEN")
        os._exit(0)
    while Path("{place}/freezer.state").read_text() != "FROZEN\\n":
        time.sleep(0.01)
    print(child, flush=True)
    sys.exit(3)
time.sleep(300)
""")
        try:
            status, out, errors, _ = launch(tmp_path, "frozen.py")
        finally:
            (place / "freezer.state").write_text("THAWED")
            while (place / "tasks").read_text():
                time.sleep(0.01)
    assert status == 3, errors
    child = re.fullmatch(r"\[1\] (\d+)\n", out)
    assert child is not None, out
    where = f"could not be ended: pid {child[1]} (D (disk sleep)) on host {socket.gethostname()}."
    assert f"hvdkit launch: {where}" in errors


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_traceback_that_a_program_survives_is_in_the_log_while_it_goes_on(tmp_path, launcher):
    seen = tmp_path / "seen"
    script = tmp_path / "handled.py"
    script.write_text(f"""{RANK}
import sys, time, traceback
from pathlib import Path
if rank == 1:
    try:
        raise KeyError("handled")
    except KeyError:
        traceback.print_exc()
while not Path({str(seen)!r}).exists():
    time.sleep(0.05)
""")
    argv = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", "--launcher", launcher, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if line == "[1] KeyError: 'handled'\n":
            break
    seen.touch()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_users_own_sitecustomize_still_runs_beside_the_one_for_stacks(tmp_path, launcher):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = 'yes'\n")
    (tmp_path / "show.py").write_text("import faulthandler, os\nprint(customized, 'HVDKIT_STACKS' in os.environ)\n")
    options = ["--launcher", launcher, "--stall-timeout", "60", "--env", f"PYTHONPATH={tmp_path}"]
    status, out, errors, _ = launch(tmp_path, *options, str(tmp_path / "show.py"))
    assert status == 0, errors
    assert sorted(out.splitlines()) == ["[0] yes True", "[1] yes True"]


@pytest.mark.parametrize(
    ("adapter", "launcher"),
    [
        pytest.param(adapter, launcher, marks=needs(launcher))
        for adapter, launcher in (("torch", "mpirun"), ("torch", "horovodrun"), ("arrays", "mpirun"))
    ],
)
def test_a_spawned_worker_that_imports_the_script_again_is_no_second_rank(tmp_path, adapter, launcher):
    """It has the rank's environment: MPI took it for the rank, and the rank died by SIGSEGV."""
    program = f"""
import multiprocessing
import hvdkit.{adapter} as hk
world = hk.init()
def begin(target):
    worker = multiprocessing.get_context("spawn").Process(target=target)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""
    bare, guarded = tmp_path / "bare.py", tmp_path / "guarded.py"
    bare.write_text(f"{program}begin(print)\n")
    below = program.replace("world = hk.init()\n", "")
    guarded.write_text(f'{below}if __name__ == "__main__":\n    world = hk.init()\n    begin(print)\n')
    status, out, errors, _ = launch(tmp_path, "--launcher", launcher, str(bare))
    assert status == 0, errors
    assert sorted(out.splitlines()) == ["[0] 1", "[1] 1"]
    assert sum("LauncherError: init() ran in a worker (process" in line for line in errors) == 2
    status, out, errors, _ = launch(tmp_path, "--launcher", launcher, str(guarded))
    assert (status, sorted(line for line in out.splitlines() if len(line) > 4)) == (0, ["[0] 0", "[1] 0"]), errors


SHORT = [
    *(
        ("torch", how, after)
        for how, after in (("skip", "check"), ("micro", "metrics"), ("break", "exit"), ("break", "thread"))
    ),
    *(("tensorflow", how, after) for how, after in (("skip", "plain"), ("graph", "check"), ("graph", "exit"))),
    ("keras", "skip", "check"),
]


@pytest.mark.parametrize(("framework", "how", "after"), SHORT)
def test_a_rank_that_is_one_allreduce_short_is_named_on_every_rank(tmp_path, framework, how, after):
    if lacking("torch" if framework == "torch" else "keras"):
        pytest.skip("no framework")
    command = warm(framework).stub("rank_script", str(HERE / "programs_short.py"))
    status, out, errors, _ = launch(tmp_path, "--", *command, framework, how, after)
    assert status == 1, errors
    said = "rank 1 made one allreduce of gradients fewer than rank 0, 5 and not 6: rank 1 "
    if after == "exit":
        assert "[1] ended" in out
        assert any(line.startswith(f"[0] lost its peers: {said}has ended, while rank 0 waits") for line in errors), (
            errors
        )
        return
    where = "threading, its program has ended" if after == "thread" else "programs_short.py, line "
    told = [line for line in errors if f"AgreementError: {said}waits in {where}" in line]
    assert [line[:4] for line in sorted(told)] == (["[0] "] if after == "thread" else ["[0] ", "[1] "]), errors


def test_ranks_that_wait_in_different_calls_are_named_with_their_lines(tmp_path):
    command = warm("torch").stub("rank_script", str(HERE / "programs_short.py"))
    status, _, errors, _ = launch(tmp_path, "--", *command, "torch", "alone", "check")
    said = re.compile(
        r"\[[01]\] hvdkit\.errors\.AgreementError: the ranks wait for one another in different calls: "
        r"rank 0 waits in programs_short\.py, line (\d+), rank 1 waits in programs_short\.py, line (\d+); "
    )
    found = [match.groups() for line in errors if (match := said.match(line))]
    assert status == 1 and len(found) == 2 and found[0][0] != found[0][1], errors


def test_a_rank_that_is_only_slow_is_not_called_short(tmp_path):
    command = warm("torch").stub("rank_script", str(HERE / "programs_short.py"))
    status, out, errors, _ = launch(tmp_path, "--", *command, "torch", "skip", "slow")
    assert (status, sorted(out.splitlines())) == (0, ["[0] ended", "[1] ended"]), errors
