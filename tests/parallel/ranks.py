"""Ranks that stay alive for many tests: the body of a test runs on each of them.

    @on_ranks("torch", "tensorflow", n=(2, 3))
    def test_metrics_are_means(hk, world, everyone):
        assert hk.average_metrics({"loss": float(world.rank)}, world)["loss"] == (world.size - 1) / 2

What only a rank can give are arguments by these names: ``hk`` is hvdkit's adapter, ``on`` what this directory's
``training_ADAPTER.py`` holds, ``world`` the started job, ``everyone(value)`` a list of what each rank found, by rank,
and ``alone(function, **arguments)`` what a function of a test's file returns in a process without a launcher, once for
all tests that ask (with ``fresh=True`` in one that has just begun). All other arguments are fixtures and parameters as
ever, the same on every rank; the ranks run in ``tmp_path``. A test fails with the traceback of each rank that failed,
and what was printed.

Ranks end and new ones start after a failure, when ranks of another kind are wanted, and where a test says ``fresh``:
one about what happens once in a process, or that ends Horovod. Over Gloo they are forked from a process that has
imported the framework (``warm_main.py``), over MPI ``mpirun`` starts stubs for such forks. conftest.py orders the tests
so that ranks of one kind start once.
"""

import atexit
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
START_S, TEST_S = 120.0, 150.0
LEAVE_S = 15.0
"""Seconds that the other ranks have after one has failed."""

DIGITS = ("sklearn.datasets", "sklearn.model_selection")
TORCH = ("pytest", "torch", "torch._dynamo", "horovod.torch", *DIGITS)
TENSORFLOW = ("pytest", "keras", "tensorflow", "horovod.tensorflow", *DIGITS)
KERAS_ON_TENSORFLOW = (("KERAS_BACKEND", "tensorflow"),)
# Most of a small training on jax is compiling; this is a third less, and all ranks compute with the same code.
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True)
class Framework:
    """What ranks compute with: hvdkit's adapter, the packages that must be there, what is imported before the fork."""

    adapter: str
    needs: tuple[str, ...]
    modules: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


# Keras imports TensorFlow on every backend, for its data sets and for saving.
FRAMEWORKS = {
    "torch": Framework("torch", ("torch", "horovod"), TORCH),
    "tensorflow": Framework("tensorflow", ("tensorflow", "horovod"), TENSORFLOW, KERAS_ON_TENSORFLOW),
    "keras": Framework("keras", ("keras", "tensorflow", "horovod"), TENSORFLOW, KERAS_ON_TENSORFLOW),
    "keras-torch": Framework(
        "keras", ("keras", "torch", "horovod"), ("keras", "tensorflow", *TORCH), (("KERAS_BACKEND", "torch"),)
    ),
    "keras-jax": Framework(
        "keras",
        ("keras", "jax", "torch", "horovod"),
        ("pytest", "jax", "keras", "tensorflow", "torch", "horovod.torch", *DIGITS),
        (("KERAS_BACKEND", "jax"), ("XLA_FLAGS", COMPILE_FAST)),
    ),
    "arrays": Framework("arrays", ("mpi4py", "ml_dtypes"), ("pytest", "ml_dtypes", "mpi4py")),
}
KERAS = ("keras", "keras-torch", "keras-jax")


def on_ranks(
    *frameworks: str,
    n: int | Iterable[int] = 2,
    mpi: bool | Iterable[tuple[str, int]] = False,
    fresh: bool = False,
    smoke: Iterable[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on n ranks that compute with each of FRAMEWORKS.

    Args:
        mpi: whether the ranks are connected over MPI, not Gloo; or for which frameworks and n they are.
        fresh: the ranks start for this test and end after it.
        smoke: frameworks on which only the first of the test's own parameters is tried.
    """
    sizes = [n] if isinstance(n, int) else list(n)
    pairs = [(framework, size) for framework in (*frameworks, *smoke) for size in sizes]
    over_mpi = set(pairs if mpi else ()) if isinstance(mpi, bool) else set(mpi)
    kinds = [
        pytest.param(
            Kind(*pair, "mpi" if pair in over_mpi else "gloo", fresh),
            marks=[pytest.mark.first_case_only] if pair[0] in smoke else [],
        )
        for pair in pairs
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for mark in (pytest.mark.parallel, pytest.mark.usefixtures("ranks")):
            function = mark(function)
        return pytest.mark.parametrize("ranks", kinds, ids=str, indirect=True)(function)

    return decorate


@dataclass(frozen=True, order=True)
class Kind:
    """Tests with the same are run by the same ranks."""

    framework: str
    n: int
    controller: str
    fresh: bool

    def __str__(self) -> str:
        return f"{self.framework}-{self.n}-{self.controller}"


def rank_environment() -> dict[str, str]:
    """The environment of a rank: this one without an outer job's variables, one compute thread."""
    outer = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=str(HERE.parent.parent))
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    if os.geteuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return environment


def launcher_argv(n: int, controller: str) -> list[str]:
    """How this directory starts n ranks: by plain mpirun, or by horovodrun, not by the launcher that it also tests."""
    from hvdkit.jobs.launch.horovodrun import guarded  # not in the ranks, which import this file

    if controller == "gloo":  # horovodrun as that launcher starts it: by itself it takes 14 s to begin
        return guarded([str(BIN / "horovodrun"), "--gloo", "--network-interface", "lo", "-np", str(n)])
    mpirun = shutil.which("mpirun", path=rank_environment()["PATH"])
    assert mpirun is not None, "no mpirun beside this Python or on PATH"
    yielding = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [mpirun, "-n", str(n), "--map-by", ":OVERSUBSCRIBE", *yielding]


class Warm:
    """A process that has imported a framework. It starts with the first rank and ends with the tests."""

    def __init__(self, modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> None:
        # Ranks that wait exchange messages in each of Horovod's cycles, by default 1000 a second.
        self.environment = {**rank_environment(), "HOROVOD_CYCLE_TIME": "5", **dict(variables)}
        directory = Path(tempfile.mkdtemp(prefix="hvdkit-tests-"))
        self.address = str(directory / "warm")
        # All ranks of a job compile the same for jax, and many tests train the same model.
        self.environment["JAX_COMPILATION_CACHE_DIR"] = str(directory / "compiled")
        self.environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "warm_main.py"), str(listener.fileno()), *modules],
                env=self.environment,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def stub(self, *words: str) -> list[str]:
        """The command of a process that has a rank forked here, for a launcher."""
        return [sys.executable, "-I", "-S", str(HERE / "rank_stub.py"), self.address, *words]

    def fork(self, words: list[str], directory: Path, variables: dict[str, str], output: int) -> socket.socket:
        """A connection that says the exit status of a rank when that ends, and that kills it by ending."""
        request = {"environment": {**self.environment, **variables}, "directory": str(directory), "words": words}
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with Path(os.devnull).open() as nothing:
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [nothing.fileno(), output, output])
        return connection

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)


_warm = functools.cache(Warm)


def warm(framework: str) -> Warm:
    """The process that forks ranks for one of FRAMEWORKS."""
    return _warm(FRAMEWORKS[framework].modules, FRAMEWORKS[framework].variables)


class FailedOnRanks(Exception):  # noqa: N818
    """What happened on the ranks."""


class Ranks:
    """n ranks that are alive."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._directory = Path(tempfile.mkdtemp(prefix="hvdkit-ranks-"))
        self._output = self._directory / "output"
        self._output.touch()
        self._printed = 0
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._ends: list[socket.socket] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._pids: dict[int, int] = {}
        self._drivers: dict[int, Connection] = {}
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        address = str(self._directory / "ranks")
        source, n = warm(self.kind.framework), self.kind.n
        words = ["rank_serve", address, FRAMEWORKS[self.kind.framework].adapter]
        listener = self._stack.enter_context(Listener(address, "AF_UNIX"))
        output = self._stack.enter_context(self._output.open("ab"))
        if n > 1 and self.kind.controller == "mpi":
            command = [*launcher_argv(n, "mpi"), *source.stub(*words)]
            self._launcher = subprocess.Popen(
                command, env=source.environment, cwd=self._directory, stdout=output, stderr=output
            )
        else:
            port = self._rendezvous(source, n, output.fileno()) if n > 1 else 0
            for rank in range(n):
                variables = gloo_variables(rank, n, port) if n > 1 else {}
                self._ends.append(source.fork(words, self._directory, variables, output.fileno()))
        listener._listener._socket.settimeout(START_S)
        for _ in range(n):
            driver = listener.accept()
            rank, pid = driver.recv()
            self._drivers[rank], self._pids[rank] = driver, pid
        assert sorted(self._drivers) == list(range(n)), f"the ranks are {sorted(self._drivers)} of {n}"

    def _rendezvous(self, source: Warm, n: int, output: int) -> int:
        reading, writing = os.pipe()
        self._stack.enter_context(source.fork(["rank_rendezvous", str(n)], self._directory, {}, writing))
        os.close(writing)
        with os.fdopen(reading) as port:
            return int(port.readline())

    def run(self, file: str, function: str, arguments: dict[str, Any], directory: Path, timeout: float = TEST_S) -> Any:
        """What each rank's function returned, pickled, by rank.

        Raises:
            FailedOnRanks: on a rank or more; the ranks are no more.
        """
        job = {"file": file, "function": function, "arguments": arguments, "directory": str(directory)}
        job["check"] = not self.kind.fresh
        try:
            for driver in self._drivers.values():
                driver.send(job)
            return self._follow(timeout)
        except BaseException:
            self.kill()
            raise
        finally:
            text = self._output.read_text(errors="replace") if self._output.exists() else self._last
            print(text[self._printed :], end="")
            self._printed = len(text)

    def _follow(self, timeout: float) -> list[bytes]:
        """Answer what the ranks ask, until each has ended its function."""
        done: dict[int, bytes] = {}
        failures: dict[int, str] = {}
        gathered: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout
        while len(done) + len(failures) < self.kind.n:
            running = {one: rank for rank, one in self._drivers.items() if rank not in done and rank not in failures}
            ready = wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._late(sorted(running.values()), timeout, others=bool(failures)))
                break
            for driver in ready:
                rank = running[driver]
                try:
                    what, value = driver.recv()
                except (EOFError, ConnectionError):
                    what, value = "failed", "the process ended"
                if what == "gather":
                    gathered[rank] = value
                elif what == "alone":
                    driver.send(alone(self.kind.framework, *value))
                elif what == "done":
                    done[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + LEAVE_S)
            if len(gathered) == self.kind.n:
                for driver in self._drivers.values():
                    driver.send([gathered[one] for one in range(self.kind.n)])
                gathered.clear()
        if failures:
            raise FailedOnRanks("\n".join(f"rank {rank} of {self.kind}: {failures[rank]}" for rank in sorted(failures)))
        return [done[rank] for rank in range(self.kind.n)]

    def _late(self, ranks: list[int], timeout: float, others: bool) -> dict[int, str]:
        """Let the ranks say where they are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        after = f"{LEAVE_S:.0f} s after another had failed" if others else f"after {timeout:.0f} s"
        return dict.fromkeys(ranks, f"was still in it {after}; what is printed says where")

    def end(self) -> None:
        """Let the ranks end as programs do, where they are alive."""
        for driver in self._drivers.values():
            with contextlib.suppress(OSError):
                driver.send(None)
        for end in self._ends:
            with contextlib.suppress(OSError):  # also where it is closed
                end.settimeout(LEAVE_S)
                end.recv(100)
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(LEAVE_S)
        self.kill()

    def kill(self) -> None:
        """End whatever is left of the ranks."""
        _alive.pop(self.kind, None)
        for end in self._ends:
            with contextlib.suppress(OSError), end:
                end.settimeout(LEAVE_S)
                end.shutdown(socket.SHUT_WR)
                end.recv(100)
        for driver in self._drivers.values():
            driver.close()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        self._last = self._output.read_text(errors="replace") if self._output.exists() else ""
        self._stack.close()


_alive: dict[Kind, Ranks] = {}
_answers: dict[tuple[str, bytes], bytes] = {}


def ranks_of(kind: Kind) -> Ranks:
    """The ranks of a kind; those of another kind end, but for a process alone with the same framework."""
    for other, ranks in list(_alive.items()):
        if other != kind and (other.n > 1 or other.framework != kind.framework or other.fresh):
            ranks.end()
    if kind not in _alive:
        _alive[kind] = Ranks(kind)
    return _alive[kind]


def end_all() -> None:
    for ranks in list(_alive.values()):
        ranks.end()


def alone(framework: str, fresh: bool, wanted: bytes) -> bytes:
    """What a function returns in a process without a launcher, pickled; it runs once for all who ask."""
    if (framework, wanted) not in _answers:
        kind = Kind(framework, 1, "gloo", fresh)
        _alive[kind] = ranks = _alive.get(kind) or Ranks(kind)
        with tempfile.TemporaryDirectory() as directory:
            (_answers[framework, wanted],) = ranks.run(**pickle.loads(wanted), directory=Path(directory))  # noqa: S301
        if fresh:
            ranks.end()
    return _answers[framework, wanted]


def run_test(ranks: Ranks, item: pytest.Function, directory: Path) -> None:
    """Run a test's function on ranks; ``item.funcargs`` holds its fixtures."""
    # monkeypatch, too, is the rank's own: another process's would not undo there what the test has replaced.
    wanted = set(inspect.signature(item.function).parameters) - {*GIVEN, "monkeypatch"}
    arguments = {name: value for name, value in item.funcargs.items() if name in wanted}
    told = ""
    try:
        ranks.run(str(item.path), item.function.__name__, arguments, directory)
    except FailedOnRanks as failed:
        told = str(failed)
    if told:
        pytest.fail(told, pytrace=False)


GIVEN = ("hk", "on", "world", "everyone", "alone")
"""The arguments that ranks give themselves."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """The mark of tests that need these packages, which are not imported for it: that takes longer than most tests."""
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)} (`make test` installs all)")


def jax() -> Any:
    """JAX in float64, which compiles fast; to be called before anything else imports it."""
    os.environ["XLA_FLAGS"] = COMPILE_FAST
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax


def missing(framework: str) -> list[str]:
    return [name for name in FRAMEWORKS[framework].needs if importlib.util.find_spec(name) is None]


def gloo_variables(rank: int, n: int, port: int) -> dict[str, str]:
    """What horovodrun sets for a rank of one host."""
    return {
        "HOROVOD_HOSTNAME": "localhost",
        **dict.fromkeys(("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"), str(n)),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
