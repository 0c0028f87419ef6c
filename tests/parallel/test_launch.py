"""``hvdkit launch`` with real ranks, over MPI and over Gloo."""

import contextlib
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ranks import missing

pytestmark = pytest.mark.parallel

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HAS_MPI = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is not None
HAS_HOROVODRUN = shutil.which("horovodrun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is not None
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="no mpirun")
needs_horovod = pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod")
needs_horovodrun = pytest.mark.skipif(not HAS_HOROVODRUN, reason="no horovodrun (`hvdkit install`)")
LAUNCHERS = [
    pytest.param("mpirun", marks=needs_mpi),
    pytest.param("horovodrun", marks=needs_horovodrun),
]
HERE_ARE = [name for name, is_here in (("mpirun", HAS_MPI), ("horovodrun", HAS_HOROVODRUN)) if is_here]

TIMEOUT_S = 120
RANK = """
import os, signal, sys, time
names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
"""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(60)
    os._exit(0)
os.wait()
"""
"""Starts what no longer belongs to the rank: a process in a session of its own, whose parent has ended."""
WAIT_FOR_EVER = "\nwhile True: time.sleep(60)\n"


def outer_environment() -> dict[str, str]:
    """This environment as a user's shell has it: no job around it, no settings that the launcher makes itself."""
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**environment, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "2"}


def hears_signals() -> None:
    """In the child: a suite in the background of a shell has inherited SIGINT ignored, and under nohup SIGHUP."""
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


class Launch:
    """Runs ``hvdkit launch`` in a directory of its own, on scripts written there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"mark-{uuid.uuid4()}"
        self.environment = outer_environment()
        self.started: subprocess.Popen[bytes] | None = None

    def script(self, text: str) -> str:
        (self.directory / "ranks.py").write_text(RANK + text)
        return "ranks.py"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "hvdkit.cli", "launch", *words, self.mark]

    def run(self, *words: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            self.argv(*words), cwd=self.directory, env=self.environment, capture_output=True, timeout=TIMEOUT_S
        )

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start it and wait until both ranks have said that they are ready."""
        process = subprocess.Popen(
            self.argv(*words),
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=hears_signals,
        )
        self.started = process
        assert process.stdout is not None
        missing = {b"[0] ready\n", b"[1] ready\n"}
        while missing:
            line = process.stdout.readline()
            assert line, "the job ended before its ranks were ready"
            missing.discard(line)
        return process

    def processes(self) -> list[str]:
        """Command lines of every living process of this job: launcher, ranks and their children."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                command_line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended
            if self.mark in command_line:
                found.append(command_line)
        return found

    def close(self) -> None:
        """End it where a test has not, and look for what it left behind."""
        if self.started is not None and self.started.poll() is None:
            self.started.terminate()
            self.started.communicate(timeout=TIMEOUT_S)
        assert self.processes() == [], "processes were left behind"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launcher = Launch(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Iterable[Any]], dict[Any, Launch]]]:
    """A launch for each name, for jobs that end at the same time: they mostly wait until a limit is over."""
    made: list[Launch] = []

    def make(names: Iterable[Any]) -> dict[Any, Launch]:
        found = {name: Launch(tmp_path_factory.mktemp("several")) for name in names}
        made.extend(found.values())
        return found

    yield make
    for launcher in made:
        launcher.close()


# --- programs that hvdkit is not in

STEPS = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
KERAS = """
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)
"""
STRATEGY = """
import keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == 2
with strategy.scope():
    variable, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1)
    optimizer.build([variable])

@tf.function
def step():
    strategy.run(lambda: optimizer.apply([tf.ones(1)], [variable]))

step()
"""
OTHERS = {
    "apart": (f"import torch\n{STEPS}", []),
    "keras apart": (KERAS, []),
    "one trains": (f"import torch\nif rank == 0:\n{STEPS.replace(chr(10), chr(10) + '    ')}", []),
    "ddp": (f"import torch\ntorch.distributed.init_process_group('gloo')\n{STEPS}", []),
    "horovod": (f"import torch, horovod.torch as hvd\nhvd.init()\n{STEPS}", []),
    "mpi": (f"import torch, mpi4py.MPI\n{STEPS}", []),
    "tensorflow": (STRATEGY, ["--tf-config"]),
}


@pytest.mark.skipif(bool(missing("torch") + missing("tensorflow")), reason="needs PyTorch, TensorFlow and Horovod")
@needs_mpi
@pytest.mark.parametrize("name", OTHERS)
def test_processes_that_train_apart_are_named_and_no_others(launch, name):
    program, options = OTHERS[name]
    done = launch.run("--nproc_per_node", "2", *options, "-m", Path(launch.script(program)).stem)
    assert done.returncode == 0, done.stderr.decode()
    assert (b"2 processes trained apart" in done.stderr) == ("apart" in name), done.stderr.decode()


# --- output


START_UP = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795331756.861774   17865 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795331763.031561    3790 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate flags.
"""
KEPT = """\
W0000 00:00:1795331763.031561    3790 gpu_device.cc:2342] Cannot dlopen some GPU libraries
I1122 06:30:00.031561    3790 mine.cc:1] a log of the user's own
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_tensorflow_s_start_up_lines_are_left_out_and_warnings_stay(launch, verbose):
    script = launch.script(f"import sys\nsys.stderr.write({START_UP + KEPT!r})\nprint({START_UP!r}, end='')")
    done = launch.run("-n", "1", "--no-tag", *["--verbose"] * verbose, script)
    assert done.returncode == 0
    assert done.stdout.decode() == START_UP  # what is printed is the program's own
    assert done.stderr.decode() == (START_UP + KEPT if verbose else KEPT)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lines_are_tagged_whole_and_on_the_stream_they_were_written_to(launch, launcher):
    script = launch.script("""
for i in range(100):
    os.write(1, str(rank).encode() * 3000)
    os.write(1, b"." * 3000 + b"\\n")
    os.write(2, b"error %d\\n" % i)
os.write(1, b"\\xff\\xfe\\n")
os.write(1, b"50%\\r100%\\n")
os.write(1, b"no line end")
""")
    done = launch.run("-n", "2", "--launcher", launcher, script)
    assert (done.returncode, launch.directory.joinpath("ranks.py").exists()) == (0, True), done.stderr.decode()
    for rank in (b"0", b"1"):
        tag = b"[" + rank + b"] "
        lines = [line for line in re.split(rb"(?<=[\n\r])", done.stdout) if line.startswith(tag)]
        assert lines[:100] == [tag + rank * 3000 + b"." * 3000 + b"\n"] * 100
        assert lines[100] == tag + b"\xff\xfe\n"
        assert tag + b"100%\n" in lines[101:]
        assert lines[-1] == tag + b"no line end\n"
        assert [line for line in done.stderr.splitlines() if line.startswith(tag)] == [
            tag + b"error %d" % i for i in range(100)
        ]
    assert all(line[:4] in (b"[0] ", b"[1] ") for line in done.stdout.splitlines() if line)


@needs_mpi
def test_no_tag_leaves_lines_as_they_are_and_a_line_shows_before_the_rank_ends(launch):
    process = subprocess.Popen(
        launch.argv("-n", "1", "--launcher", "mpirun", "--no-tag", launch.script("print('now')" + WAIT_FOR_EVER)),
        cwd=launch.directory, env=launch.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)


@needs_mpi
def test_a_reader_that_leaves_ends_the_job(launch):
    process = launch.start("-n", "2", "--launcher", "mpirun", launch.script("""
print("ready")
while True:
    print("more")
    time.sleep(0.01)
"""))  # fmt: skip
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    process.stderr.close()


@needs_mpi
def test_ctrl_c_ends_the_job_while_nobody_reads_its_output(launch):
    process = launch.start("-n", "2", "--launcher", "mpirun", launch.script("""
print("ready")
while True:
    print("more " * 1000)
"""))  # fmt: skip
    readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    assert readable
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    process.stdout.close()
    process.stderr.close()


# --- what the ranks get


WORDS = [
    *("--epochs", "3", "--num", "--log", "--n", "-n", "7", "-x", "FOO", "--map-by", "--bind-to", "-np", "--version"),
    *("--", ":", "a b", "", "$HOME", "`id`", "it's", '"', "\\", "a\nb", "*", "日本"),
]
"""What some launcher, or a shell in between, would take for its own."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_environment_and_arguments_reach_every_rank(launch, launcher):
    launch.environment["HOROVOD_CYCLE_TIME"] = "2.5"
    script = launch.script("""
names = ("OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "HOROVOD_TIMELINE", "GREETING", "PYTHONUNBUFFERED")
print([os.environ.get(name) for name in names], sys.argv[1:-1], sys.executable, sys.stdin.read() == "")
""")
    options = ("--threads", "3", "--timeline", "trace.json", "--env", "GREETING=two words; $HOME 'q'")
    done = launch.run("-n", "2", "--launcher", launcher, *options, script, *WORDS)
    assert done.returncode == 0, done.stderr.decode()
    values = ["3", "2.5", str(launch.directory / "trace.json"), "two words; $HOME 'q'", "1"]
    expected = f"{values} {WORDS} {sys.executable} True"
    assert sorted(done.stdout.decode().splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


LEFT = {
    **{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"},
    **{"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h9", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9", "HOROVOD_CONTROLLER": "gloo"},
    **{"HOROVOD_CPU_OPERATIONS": "gloo", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "PMI_RANK": "5"},
    **{"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "5", "MASTER_ADDR": "h9", "MASTER_PORT": "9", "TF_CONFIG": "{}"},
}
"""What a rank of another job has, or a shell in which a user tried something."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_another_job_left_never_places_a_rank_and_a_launcher_within_a_rank_works(launch, launcher):
    launch.environment |= LEFT
    (launch.directory / "inner.py").write_text("""
import os
from hvdkit.steps import launchers
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TF_CONFIG")
found = launchers.detect(os.environ)
print(found.launcher, found.rank, found.size, *(os.environ.get(name) for name in names), os.environ["MASTER_PORT"])
""")
    script = launch.script("""
import subprocess
exec(open("inner.py").read())
for inner in sys.argv[1:-1] if rank == 1 else ():
    words = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", "--launcher", inner, "inner.py"]
    print(subprocess.run(words, capture_output=True, text=True))
""")
    done = launch.run("-n", "2", "--launcher", launcher, script, *HERE_ARE)
    out, names = done.stdout.decode(), {"mpirun": "Open MPI", "horovodrun": "horovodrun"}
    ports = set()
    for name, place in (("", r"\[{0}\] "), *((one, r"(?:'|\\n)\[{0}\] ") for one in HERE_ARE)):
        for rank in (0, 1):
            line = f"{place.format(rank)}{names[name or launcher]} {rank} 2 {rank} 2 {rank} 2 127.0.0.1 None (\\d+)"
            found = re.findall(line, out)
            assert found, (line, out, done.stderr)
            ports.update(found)
    assert len(ports) == 1 + len(HERE_ARE) and not ports & {"9"}


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ON_REQUEST = PAGES.exists() and "[madvise]" in PAGES.read_text()
"""This kernel gives huge pages to who asks, not always or never."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("seed", "tunables", "huge"), [("0", None, True), ("7", "glibc.malloc.hugetlb=0", False)])
def test_sets_have_one_order_and_memory_comes_in_huge_pages_unless_the_user_says_otherwise(
    launch, launcher, seed, tunables, huge
):
    for name, value in (("PYTHONHASHSEED", seed), ("GLIBC_TUNABLES", tunables)):
        launch.environment.pop(name, None)
        launch.environment |= {name: value} if tunables else {}
    script = launch.script("""
block = bytearray(b"1") * (1 << 26)
lines = open("/proc/self/smaps_rollup").read().splitlines()
huge = int(next(line for line in lines if line.startswith("AnonHugePages")).split()[1]) >= len(block) // 2048
print(os.environ["PYTHONHASHSEED"], huge, list(set("a vocabulary of letters")))
""")
    done = launch.run("-n", "2", "--launcher", launcher, script)
    first, second = (line.partition("] ")[2] for line in done.stdout.decode().splitlines())
    assert first == second and first.startswith(f"{seed} "), done.stderr.decode()
    assert not ON_REQUEST or first.split()[1] == str(huge)


@needs_mpi
def test_python_is_the_one_hvdkit_runs_in_without_activation(launch):
    launch.environment["PATH"] = os.defpath
    done = launch.run("-n", "1", "--launcher", "mpirun", "--", "python", "-c", "import sys; print(sys.executable)")
    assert done.stdout.decode() == f"[0] {sys.executable}\n", done.stderr.decode()


@needs_mpi
def test_more_ranks_than_cores_run_and_say_so(launch):
    cores = len(os.sched_getaffinity(0))
    done = launch.run(
        "-n", str(cores + 1), "--launcher", "mpirun", launch.script("print(os.environ['OMP_NUM_THREADS'])")
    )
    assert sorted(done.stdout.decode().splitlines()) == [f"[{rank}] 1" for rank in range(cores + 1)]
    assert f"{cores + 1} processes share" in done.stderr.decode()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dry_run_pasted_into_a_shell_runs_the_same_job(launch, launcher):
    script = launch.script("print(rank, os.environ['WORDS'], sys.argv[2])")
    words = ("-n", "2", "--launcher", launcher, "--env", "WORDS=a 'b' \"c\" $d", "--dry-run", "--")
    line = launch.run(*words, script, "--num", "x; 'y'").stdout.decode()
    assert line.count("\n") == 1
    if importlib.util.find_spec("torch"):  # horovodrun asks the first framework there is, and TensorFlow takes seconds
        (launch.directory / "hides").mkdir()
        (launch.directory / "hides" / "tensorflow.py").write_text("raise ImportError('hidden')")
        launch.environment["PYTHONPATH"] = f"{launch.directory / 'hides'}{os.pathsep}{REPOSITORY}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=launch.directory, env=launch.environment, capture_output=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr.decode()
    assert {f"{rank} a 'b' \"c\" $d x; 'y'" in done.stdout.decode() for rank in (0, 1)} == {True}


# --- how a job ends


def verdict(done: "subprocess.CompletedProcess[bytes]") -> str:
    """The last line of standard error, with N for the process id."""
    return re.sub(r"pid \d+", "pid N", done.stderr.decode().splitlines()[-1])


FAILURES = {
    "raise ValueError('boom')": (1, "rank 1 (pid N) exited with status 1"),
    "sys.exit(3)": (3, "rank 1 (pid N) exited with status 3"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "rank 1 (pid N) was killed by SIGKILL"),
}


@pytest.fixture(scope="module")
def failed(several):
    """How a job ends in which rank 1 fails, by launcher and failure, and what it leaves running."""
    launches = several((launcher, failure) for launcher in HERE_ARE for failure in FAILURES)

    def run(cell):
        (launcher, failure), launch = cell
        script = launch.script(DAEMON + f"if rank == 1: {failure}" + WAIT_FOR_EVER)
        return launch.run("-n", "2", "--launcher", launcher, script), launch.processes()

    with ThreadPoolExecutor(len(launches)) as pool:
        return dict(zip(launches, pool.map(run, launches.items()), strict=True))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_rank_ends_the_job_with_its_status(failed, launcher, failure):
    status, sentence = FAILURES[failure]
    done, left = failed[launcher, failure]
    assert (done.returncode, verdict(done)) == (status, f"hvdkit launch: {sentence}; the job was ended.")
    assert left == []


@needs_mpi
def test_the_first_failure_counts_and_a_rank_that_ends_well_ends_nothing(launch):
    done = launch.run("-n", "3", "--launcher", "mpirun", launch.script("""
from pathlib import Path
if rank == 0:
    sys.exit(0)
if rank == 1:
    while not Path("failed").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    sys.exit(4)
Path("failed").touch()
sys.exit(7)
"""))  # fmt: skip
    assert (done.returncode, "rank 2 (pid N) exited with status 7" in verdict(done)) == (7, True)


@needs_mpi
@pytest.mark.parametrize("failure", ["raise ValueError('boom')", "sys.exit(3)"])
def test_a_failing_rank_does_not_wait_for_the_others_in_mpi_finalize(launch, failure):
    pytest.importorskip("mpi4py")
    done = launch.run("-n", "2", "--launcher", "mpirun", launch.script(f"""
from mpi4py import MPI
assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, 2)
if rank == 1: {failure}
MPI.COMM_WORLD.Barrier()
"""))  # fmt: skip
    assert done.returncode == FAILURES[failure][0], done.stderr.decode()


@needs_mpi
def test_an_abort_ends_the_job_with_its_code(launch):
    pytest.importorskip("mpi4py")
    done = launch.run("-n", "2", "--launcher", "mpirun", launch.script("""
from mpi4py import MPI
if rank == 1: MPI.COMM_WORLD.Abort(5)
MPI.COMM_WORLD.Barrier()
"""))  # fmt: skip
    assert done.returncode == 5, done.stderr.decode()


SIGNALS = {
    ("mpirun", signal.SIGINT): 130,
    ("mpirun", signal.SIGTERM): 143,
    ("mpirun", signal.SIGHUP): 129,
    ("mpirun", signal.SIGKILL): -signal.SIGKILL,
    ("horovodrun", signal.SIGINT): 130,
    ("horovodrun", signal.SIGKILL): -signal.SIGKILL,
}


@pytest.fixture(scope="module")
def signalled(several):
    """What hvdkit wrote to standard error until a signal had ended it, and its launch, by launcher and signal."""
    launches = several(cell for cell in SIGNALS if cell[0] in HERE_ARE)
    for (launcher, _), launch in launches.items():
        launch.start("-n", "2", "--launcher", launcher, launch.script(DAEMON + "print('ready')" + WAIT_FOR_EVER))
    for (_, sent), launch in launches.items():
        assert launch.processes()
        launch.started.send_signal(sent)
    return {cell: (launch.started.communicate(timeout=TIMEOUT_S)[1], launch) for cell, launch in launches.items()}


@pytest.mark.parametrize(
    ("launcher", "sent"),
    [pytest.param(*cell, marks=needs_mpi if cell[0] == "mpirun" else needs_horovodrun) for cell in SIGNALS],
)
def test_signals_end_every_process(signalled, launcher, sent):
    """Also where hvdkit itself is killed, and can say nothing more."""
    errors, launch = signalled[launcher, sent]
    assert launch.started.returncode == SIGNALS[launcher, sent]
    if sent == signal.SIGKILL:
        wait_until(lambda: launch.processes() == [], "the ranks end")
    else:
        said = f"hvdkit launch: interrupted by {sent.name}; every process was ended."
        assert errors.decode().splitlines()[-1] == said
        assert launch.processes() == []


def wrappers(launch):
    """Process ids of what is beside the ranks, once these run."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if launch.mark.encode() in words and any(word.endswith(b"/launch/rank.py") for word in words[:4]):
                found.append(int(directory.name))
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_that_reaches_the_process_beside_a_rank(launch, launcher):
    """A warning that no program handles is no harm; a rank that is told to end ends the job, which is no success."""
    process = launch.start("-n", "2", "--launcher", launcher, launch.script("print('ready')" + WAIT_FOR_EVER))
    first, *_ = wrappers(launch)
    os.kill(first, signal.SIGUSR1)
    time.sleep(1.0)  # a job that ends of it does so by now
    assert process.poll() is None
    os.kill(first, signal.SIGTERM)
    errors = process.communicate(timeout=TIMEOUT_S)[1].decode()
    assert process.returncode == 143, errors
    assert re.search(r"rank [01] \(pid \d+\) was told to end, and not by hvdkit launch; the job was ended\.\n$", errors)


@needs_horovodrun
def test_an_elastic_worker_that_fails_is_no_success(launch):
    (launch.directory / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    (launch.directory / "hosts.sh").chmod(0o755)
    words = ("-n", "2", "--min-np", "1", "--host-discovery-script", "hosts.sh", launch.script("sys.exit(3)"))
    done = launch.run(*words)
    assert done.returncode != 0 and b"Exit code: 3" in done.stderr


@needs_horovodrun
def test_an_elastic_job_ends_where_hvdkit_itself_is_killed(launch):
    (launch.directory / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    (launch.directory / "hosts.sh").chmod(0o755)
    script = launch.script(f"open(f'ready-{{rank}}', 'w').close(){WAIT_FOR_EVER}")
    words = launch.argv("-n", "2", "--host-discovery-script", "hosts.sh", script)
    job = subprocess.Popen(words, cwd=launch.directory, env=launch.environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(launch.directory.glob("ready-*"))) == 2, "the ranks run")
    job.kill()
    job.wait()
    wait_until(lambda: all(launch.processes() == [] for _ in range(5)), "the ranks end")  # one that forks may be unseen


@needs_mpi
def test_ranks_that_ignore_the_request_and_their_children_are_killed(launch):
    script = launch.script("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    while True: time.sleep(60)
print("ready")
""")
    (launch.directory / script).write_text((launch.directory / script).read_text() + WAIT_FOR_EVER)
    process = launch.start("-n", "2", "--launcher", "mpirun", "--grace", "0.5", script)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=TIMEOUT_S)[1].decode()
    assert process.returncode == 130
    assert "every process was ended, ranks 0-1 by SIGKILL (--grace allows more than 0.5 s)." in errors


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_save_when_the_batch_system_warns_and_when_it_ends_the_job(launch, launcher):
    """Rank 0 saves longer than the usual 3 s, below a shell that handles no signal; rank 1 handles none, and goes."""
    launch.script("""
if rank == 0:
    def save(number, frame):
        if number == signal.SIGTERM: time.sleep(4)
        print("saved at", signal.Signals(number).name)
        if number == signal.SIGTERM: sys.exit()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM): signal.signal(number, save)
    if os.fork() == 0: time.sleep(300)  # a worker inherits the handlers, and is not to save
print("ready")
while True: time.sleep(0.1)
""")
    job = "python ranks.py; echo the shell goes on"
    process = launch.start("-n", "2", "--launcher", launcher, "--grace", "60", "--", "bash", "-c", job)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        assert process.stdout.readline() == f"[0] saved at {number.name}\n".encode()
        assert (
            process.stderr.readline().decode().startswith(f"hvdkit launch: {number.name} was not passed on to rank 1:")
        )
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (143, b"[0] saved at SIGTERM\n"), errors
    assert errors.decode() == "hvdkit launch: interrupted by SIGTERM; every process was ended.\n"


@needs_mpi
def test_a_rank_that_ends_well_leaves_nothing_behind(launch):
    done = launch.run("-n", "1", "--launcher", "mpirun", launch.script(DAEMON + "print('done')"))
    assert (done.returncode, done.stdout) == (0, b"[0] done\n")


@needs_mpi
def test_an_mpirun_that_is_killed_leaves_no_directory_that_stops_the_next_with_its_process_id(launch):
    temporary = launch.directory / "temporary"
    temporary.mkdir()
    launch.environment["TMPDIR"] = str(temporary)
    script = launch.script("""
from pathlib import Path
def parent(pid): return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
os.kill(parent(os.getppid()), signal.SIGKILL)
time.sleep(60)
""")
    done = launch.run("-n", "1", "--launcher", "mpirun", script)
    assert b"mpirun was killed by SIGKILL" in done.stderr
    assert list(temporary.iterdir()) == []


@needs_mpi
def test_a_rank_ends_with_the_process_that_watches_it(launch):
    process = launch.start("-n", "2", "--launcher", "mpirun", launch.script(DAEMON + "print('ready')" + WAIT_FOR_EVER))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (mpirun,) = [int(child) for child in children]
    watchers = [int(child) for child in Path(f"/proc/{mpirun}/task/{mpirun}/children").read_text().split()]
    assert len(watchers) == 2
    os.kill(watchers[1], signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode not in (0, None)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_before_the_ranks_run_ends_the_launcher(launch, launcher):
    process = subprocess.Popen(
        launch.argv("-n", "2", "--launcher", launcher, launch.script(WAIT_FOR_EVER)),
        cwd=launch.directory, env=launch.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=hears_signals,
    )  # fmt: skip
    wait_until(lambda: len(launch.processes()) > 1, "the launcher runs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


@needs_mpi
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            ["prlimit", "--nofile=24"],
            "before any rank started: this process may have 24 files open, too few for 2 ranks",
        ),
        pytest.param(["unshare", "-n"], "started: this machine has no loopback interface", marks=pytest.mark.root),
        (
            ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh"],
            "The current directory cannot be used",
        ),
        (["env", "-u", "HOME"], ""),  # which Open MPI does not start without
    ],
)
def test_what_keeps_a_launcher_from_starting_is_one_sentence(launch, where, said):
    if shutil.which(where[0]) is None or (where[0] == "unshare" and os.geteuid() != 0):
        pytest.skip(f"needs {where[0]}, and root for a network namespace")
    argv = [*where, *launch.argv("-n", "2", "--launcher", "mpirun", "--", "echo")]
    done = subprocess.run(argv, cwd=launch.directory, env=launch.environment, capture_output=True, text=True)
    assert said in done.stderr
    assert (done.returncode == 0) == (said == "") and "Traceback" not in done.stderr


@needs_mpi
def test_a_command_that_cannot_be_started_is_named(launch):
    script = launch.directory / "no-interpreter"
    script.write_text("#!/nowhere/interpreter\n")
    script.chmod(0o755)
    done = launch.run("-n", "2", "--launcher", "mpirun", str(script))
    assert done.returncode == 127
    assert f"{script} cannot be started: No such file or directory" in done.stderr.decode()


# --- Horovod


@needs_horovod
@pytest.mark.parametrize("launcher", ["auto", *LAUNCHERS])
def test_horovod_computes_over_the_launcher_that_was_asked_for(launch, launcher):
    """And where a rank fails then, it is named, not the one that lost it."""
    fails = launcher != "auto"
    done = launch.run("-n", "2", "--launcher", launcher, launch.script(f"""
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="x").item()
print(hvd.rank() == rank, hvd.size(), total, "mpi" if hvd.mpi_enabled() else "gloo", hvd.mpi_built())
if {fails}:
    if rank == 1: sys.exit(3)
    hvd.allreduce(torch.ones(2), name="x")
"""))  # fmt: skip
    first, second = sorted(done.stdout.decode().splitlines())
    built = first.endswith(" True")
    over_mpi = launcher == "mpirun" or (launcher == "auto" and built)
    expected = f"True 2 3.0 {'mpi' if over_mpi else 'gloo'} {built}"
    assert [first, second] == [f"[0] {expected}", f"[1] {expected}"], done.stderr.decode()
    if fails:
        named = "hvdkit launch: rank 1 (pid N) exited with status 3; the job was ended."
        assert (done.returncode, verdict(done)) == (3, named)
    else:
        assert done.returncode == 0, done.stderr.decode()
