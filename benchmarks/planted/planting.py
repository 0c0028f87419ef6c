"""One cause of lost time, planted in a training; the programs beside this one call it at the places where it can sit.

    python loop_torch.py CAUSE STRENGTH

STRENGTH is the share of a step that the cause shall cost. Ranks are those of the launcher's environment, since some
causes have to be there before Horovod is.
"""

import hashlib
import os
import random
import subprocess
import sys
import threading
import time

CAUSE, STRENGTH = sys.argv[1], float(sys.argv[2])
STEP_S = 0.03
"""Seconds that a step computes where nothing is planted."""
STEPS = 240
SLOW = 1
"""The rank in which a cause sits that is of one rank."""
MORE = STEP_S * STRENGTH / (1 - STRENGTH)
"""Seconds that it costs a step."""
SMALL_S, BYTES_PER_S, NAMED_S = 7e-5, 1.4e9, 6e-5
"""About what one machine takes to exchange a small tensor, large ones, and a tensor with a new name."""
RANK = int(next((os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ), "0"))

_mine = RANK == SLOW
_draw = random.Random(RANK)  # noqa: S311  # which steps are late, by how much
_samples = _step = 0


def begin():
    """What runs beside the training."""
    if CAUSE == "host" and _mine:
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        nice = 15 if STRENGTH < 0.2 else 6 if STRENGTH < 0.4 else 0
        neighbour = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
        subprocess.Popen(["nice", "-n", str(nice), *neighbour])
    if CAUSE == "few-cores":
        for _ in range(0 if STRENGTH < 0.2 else 1 if STRENGTH < 0.4 else 2):
            threading.Thread(target=_hash_on, daemon=True).start()


def sample(hidden=0.0):
    """A sample is read; a batch has one.

    Args:
        hidden: seconds of a step in which the program reads ahead.
    """
    global _samples
    _samples += 1
    if CAUSE == "input" and _mine and _samples % 3:
        time.sleep(1.5 * (MORE + hidden))
    elif CAUSE == "input-everywhere":
        time.sleep((MORE + hidden) * _draw.uniform(0.5, 1.5))  # no two batches are alike


def compute():
    """The forward pass of the next step."""
    global _step
    _step += 1
    if CAUSE in ("host", "few-cores"):
        _work(STEP_S)
    else:
        time.sleep(STEP_S)
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


def _hash_on():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
