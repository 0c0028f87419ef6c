"""One cause of lost time, injected in a training; the programs beside this one call it at the places where it can sit.

    python loop_torch.py CAUSE STRENGTH

STRENGTH is the share of a step that the cause shall cost. Ranks are those of the launcher's environment, since some
causes have to be there before Horovod is.
"""

import ctypes
import gc
import hashlib
import io
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

CAUSE, STRENGTH = sys.argv[1], float(sys.argv[2])
STEP_S = 0.03
"""Seconds that a step computes where nothing is injected."""
STEPS = 240
SLOW = 1
"""The rank in which a cause sits that is of one rank."""
MORE = STEP_S * STRENGTH / (1 - STRENGTH)
"""Seconds that it costs a step."""
PERIOD = 20
"""Steps between two pauses or stalls."""
SMALL_S, BYTES_PER_S, NAMED_S, METRIC_S, GATHERED_PER_S = 7e-5, 1.4e9, 6e-5, 2e-4, 6e8
"""About what one machine takes to exchange a small tensor, large ones, and a tensor with a new name."""
RANK = int(next((os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ), "0"))

SIZE = int(next((os.environ[name] for name in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE") if name in os.environ), "1"))
OBJECTS_PER_S = 2.5e7
"""About how many a collection looks at."""

_mine = RANK == SLOW
_held, _taken = threading.Lock(), threading.Event()
_heap = None
_draw = random.Random(RANK)  # noqa: S311  # which steps are late, by how much
_samples = _step = 0


def begin():
    """What runs beside the training, and what is there before it."""
    global _heap
    if CAUSE == "gc":
        gc.disable()
        _heap = [[number] for number in range(int(MORE * OBJECTS_PER_S))]
    if CAUSE == "slow-host" and RANK >= SIZE // 2:  # a name of its own is a host of its own
        ctypes.CDLL(None, use_errno=True).unshare(0x04000000)  # CLONE_NEWUTS
        socket.sethostname("slow")
    if CAUSE == "affinity" and STRENGTH:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    if CAUSE == "lock":
        threading.Thread(target=_hold, daemon=True).start()
    if CAUSE == "host" and _mine and STRENGTH:
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        nice = 15 if STRENGTH < 0.2 else 6 if STRENGTH < 0.4 else 0
        neighbour = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
        subprocess.Popen(["nice", "-n", str(nice), *neighbour])
    if CAUSE == "few-cores":
        for _ in range(0 if STRENGTH < 0.2 or not STRENGTH else 1 if STRENGTH < 0.4 else 2):
            threading.Thread(target=_hash_on, daemon=True).start()


def sample(hidden=0.0):
    """A sample is read; a batch has one.

    Args:
        hidden: seconds of a step in which the program reads ahead.
    """
    global _samples
    _samples += 1
    if CAUSE == "first-epoch" and _samples <= STEPS // 3:
        time.sleep(3 * MORE + hidden)
    elif CAUSE == "input" and _mine and _samples % 3:
        time.sleep(1.5 * (MORE + hidden))
    elif CAUSE == "input-everywhere":
        time.sleep((MORE + hidden) * _draw.uniform(0.5, 1.5))  # no two batches are alike


def compute():
    """The forward pass of the next step."""
    global _step
    _step += 1
    if CAUSE in ("host", "few-cores", "affinity", "lock", "fsync"):
        _work(STEP_S)
    else:
        time.sleep(STEP_S)
    if CAUSE == "growth":
        time.sleep(2 * MORE * _step / STEPS)
    elif CAUSE == "stall" and _step % PERIOD == 0:
        time.sleep(MORE * PERIOD)
    elif CAUSE == "lock" and _mine:
        _taken.set()
        time.sleep(1e-4)  # the other thread has it now
        with _held:
            pass
    elif CAUSE == "fsync" and _mine:
        _write_out()
    elif CAUSE == "gc":
        gc.collect()
    elif (CAUSE == "half-of-the-ranks" and RANK < SIZE // 2) or (CAUSE == "slow-host" and RANK >= SIZE // 2):
        _work(MORE)
    if CAUSE == "compute" and _mine:
        _work(MORE)
    elif CAUSE == "random-late" and _mine and _draw.random() < 0.1:
        time.sleep(10 * MORE)
    elif CAUSE == "random-ranks" and _step % 2 == RANK:
        time.sleep(MORE)
    elif CAUSE == "first-step" and _step == 1:
        time.sleep(MORE * STEPS)


def after_step():
    """Between two steps: a metric, a log."""
    if CAUSE == "logging" and _mine:
        time.sleep(MORE)
    elif CAUSE == "pause" and _step % PERIOD == 0:
        time.sleep(MORE * PERIOD)


def saves():
    """Whether this rank saves a checkpoint now, to ``SlowFile``."""
    return CAUSE == "saving" and _step % PERIOD == 0


class SlowFile(io.BytesIO):
    """A file that takes long, once."""

    def write(self, content):
        if not self.tell():
            time.sleep(MORE * PERIOD)
        return super().write(content)


def evaluates():
    """Whether this rank evaluates now, by ``evaluate``."""
    return CAUSE == "evaluation" and RANK == 0 and _step % PERIOD == 0


def evaluate():
    """A pass over samples that nobody trains on."""
    time.sleep(MORE * PERIOD)


def metrics():
    """How many numbers the ranks average one by one after each step."""
    return int(MORE / METRIC_S) if CAUSE == "metrics" else 0


def sparse():
    """How many rows of an embedding of 64 numbers a batch looks up, whose gradient is sparse."""
    return int(MORE * GATHERED_PER_S / 4 / 64 / SIZE) if CAUSE == "sparse-embedding" else 0


def dense():
    """How many rows of 64 numbers an embedding has whose gradient is dense."""
    return int(MORE * BYTES_PER_S / 4 / 64) if CAUSE == "dense-embedding" else 0


def small():
    """How many small tensors the model has."""
    return int(MORE / SMALL_S) if CAUSE == "small-tensors" else 0


def large():
    """How many numbers the model's largest tensor has."""
    return int(MORE * BYTES_PER_S / 4) if CAUSE == "large-tensors" else 64


def newly_named():
    """How many tensors of a step get a name that no tensor had before."""
    return int(MORE / NAMED_S) if CAUSE == "new-names" else 0


def settings():
    """Variables of Horovod's that are the cause, for who starts the job."""
    if CAUSE == "small-tensors":
        return {"HOROVOD_FUSION_THRESHOLD": "0"}
    return {}


def _work(seconds):
    """So much of the processor's time, not of the clock's."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def _hold():
    """Another thread that takes the lock when a step is about to need it."""
    while True:
        _taken.wait()
        _taken.clear()
        with _held:
            time.sleep(MORE)


def _write_out():
    """A file that the disk must have, as long as it takes."""
    end = time.perf_counter() + MORE
    with Path(f"written-{RANK}").open("wb") as file:
        while time.perf_counter() < end:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0)


def _hash_on():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
