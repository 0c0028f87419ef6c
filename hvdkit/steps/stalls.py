"""What a rank says of itself to ``hvdkit launch``: where it stands when the job no longer moves, and what it lost.

Also run by path in Pythons that have no hvdkit (``observe/startup``): nothing but the standard library is imported
at import time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "HVDKIT_STACKS"
"""``FD:INODE:SIGNAL``: a pipe to the process that watches this rank, and the signal at which stacks go into it."""
IN_INIT, PAST_INIT, KILLED_WORKER = b"in init", b"past init", b"killed worker"
JOINED, TRAINED = b"joined others", b"trained"
"""What a rank reports beside its stacks: a line that begins with a zero byte, numbers follow after blanks."""
STALLED_STATUS = 75
"""Exit status of a job that was ended because it no longer moved (EX_TEMPFAIL of sysexits.h)."""


def hand_in_stacks_when_asked() -> bool:
    """Have the Python stacks of all threads written to the launcher's pipe when the launcher's signal comes.

    Written in C by ``faulthandler``, so that it works in a process that waits forever in a C library or a lock. The
    program sees nothing of it and goes on.

    Returns:
        False when nobody asks, which is the case without ``hvdkit launch``; also in a process that inherited the
        variable but not the pipe.
    """
    asked = _asked()
    if asked is None:
        return False
    fd, number = asked
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return True


def report(what: bytes) -> None:
    """Tell the launcher, where there is one that listens."""
    asked = _asked()
    if asked is not None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(asked[0], b"\0" + what + b"\n")


@contextlib.contextmanager
def reported_init() -> Iterator[None]:
    """In here this process waits for all other ranks; the launcher knows of it."""
    report(IN_INIT)
    try:
        yield
    finally:
        report(PAST_INIT)


def report_init(basics: Any) -> None:
    """Have each ``init`` of Horovod reported.

    Args:
        basics: ``horovod.common.basics``, which has just been imported.
    """
    init = reported_init()(basics.HorovodBasics.init)

    @functools.wraps(init)
    def initialized(self: Any, *arguments: Any, **options: Any) -> Any:
        done = init(self, *arguments, **options)
        _report_joined(self.size())
        return done

    basics.HorovodBasics.init = initialized


def report_process_groups(module: Any) -> None:
    """Have it reported that a process group has others; ``torch.distributed.distributed_c10d`` has been imported."""
    _after_first(module, "init_process_group", lambda *_: _report_joined(module.get_world_size()))


def report_strategies(module: Any) -> None:
    """The same of ``MultiWorkerMirroredStrategy``, whose ``collective_all_reduce_strategy`` has been imported."""
    extended = module.CollectiveAllReduceExtended
    _after_first(extended, "_initialize_multi_worker", lambda strategy, *_: _report_joined(strategy._num_workers))


def report_jax(module: Any) -> None:
    """The same of ``jax.distributed``, whose ``jax._src.distributed`` has just been imported."""
    _after_first(module.State, "initialize", lambda state, *_: _report_joined(state.num_processes or 1))


def _report_joined(size: int) -> None:
    if size > 1:
        report(JOINED)


def report_torch_steps(module: Any) -> None:
    """Have the first step of any optimizer reported; ``torch.optim.optimizer`` has just been imported."""
    told = False

    def stepped(*_: Any) -> None:
        nonlocal told
        if not told:
            told = True
            _report_trained()

    module.register_optimizer_step_post_hook(stepped)


def report_keras_steps(module: Any) -> None:
    """The same of Keras' optimizers; ``keras.src.optimizers.base_optimizer`` has just been imported."""
    _after_first(module.BaseOptimizer, "apply", lambda *_: _report_trained())


def _report_trained() -> None:
    mpi = sys.modules.get("mpi4py.MPI")  # has finders of its own, so that its import cannot be waited for
    if mpi is not None and mpi.Is_initialized():
        _report_joined(mpi.COMM_WORLD.Get_size())
    report(TRAINED)


def _after_first(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """Call ``action`` with the arguments of a function after its first call, and leave the function alone then."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        done = original(*arguments, **options)
        if getattr(owner, name) is call:
            setattr(owner, name, original)
            action(*arguments)
        return done

    setattr(owner, name, call)


def report_killed_workers(popen: Any) -> None:
    """Have each process of ``multiprocessing`` reported that a signal killed: PyTorch's loaders often do not say which.

    SIGTERM is not: with it a pool ends its own workers.

    Args:
        popen: ``multiprocessing.popen_fork``, which has just been imported; spawned processes are of its class, too.
    """
    poll = popen.Popen.poll

    @functools.wraps(poll)
    def polled(self: Any, *arguments: Any, **options: Any) -> Any:
        known = self.returncode
        status = poll(self, *arguments, **options)
        if known is None and status is not None and status < 0 and status != -signal.SIGTERM:
            report(b"%b %d %d" % (KILLED_WORKER, self.pid, -status))
        return status

    popen.Popen.poll = polled


def _asked() -> tuple[int, int] | None:
    """The launcher's pipe and signal; None where there is no such pipe."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    fd, inode, number = map(int, asked.split(":"))
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
        return None  # a number of the parent's, meanwhile a file of the program's own
    return fd, number


@contextlib.contextmanager
def must_go_on(seconds: float, directory: str | Path, rank: int) -> Iterator[Callable[[], None]]:
    """End this process when it makes no progress for a while: ``--stall-timeout`` for any launcher and any hang.

    Each rank watches itself, and the slowest limit counts; which rank is to blame is read from the files. ::

        with must_go_on(600, "stacks", world.rank) as going_on:
            for batch in loader:
                train(batch)
                going_on()

    Args:
        seconds: longest time between two calls, and before the first; > 0.
        directory: where ``rank-K.txt`` with the Python stacks of all threads is written; made when it is needed.
        rank: this process, 0 .. size-1, for the file's name.
    Yields:
        What to call after each step. When it is late, the process ends with status 75, without any clean-up, which
        would wait for the other ranks.
    Raises:
        InvalidArgumentError: seconds is not above 0.
    """
    if not 0 < seconds < threading.TIMEOUT_MAX:
        from hvdkit.errors import InvalidArgumentError  # not at import time, see above

        raise InvalidArgumentError(f"seconds must be a number above 0, got {seconds!r}.")
    last = time.monotonic()
    left = threading.Event()

    def going_on() -> None:
        nonlocal last
        last = time.monotonic()

    def watch() -> None:
        while (wait := last + seconds - time.monotonic()) > 0:
            if left.wait(wait):
                return
        _end(seconds, Path(directory), rank)

    watcher = threading.Thread(target=watch, name="hvdkit must_go_on", daemon=True)
    watcher.start()
    try:
        yield going_on
    finally:
        left.set()
        watcher.join()


def _end(seconds: float, directory: Path, rank: int) -> None:
    where = directory / f"rank-{rank}.txt"
    what = f"rank {rank} made no progress for {seconds:g} s"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with where.open("w") as file:
            file.write(f"{what}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        sys.stderr.write(f"hvdkit: {what}; its stacks are in {where}.\n")
    except OSError as error:
        sys.stderr.write(f"hvdkit: {what}; its stacks cannot be written to {where} ({error.strerror}).\n")
    sys.stderr.flush()
    os._exit(STALLED_STATUS)
