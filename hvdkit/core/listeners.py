"""Who is told what a training does while it runs; nothing is where nobody listens.

Framework bindings and steps say it here. Those who listen are the recorder of ``hvdkit bench`` and ``explain``, and
monitors (``hvdkit.observe``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

STEP_TIMES = "HVDKIT_STEP_TIMES"
"""Environment variable with the directory to which every rank writes; unset or empty: nothing is recorded."""
MONITOR = "HVDKIT_MONITOR"
"""Environment variable with the directory of the history that ``hvdkit launch --monitor`` asks for."""
RECORDERS: list[Any] = []
"""The recorder of this process, once there is one; who looks here first need not call ``ready`` where nobody hears."""
MONITORS: list[Any] = []
"""Those of this process that have not been closed."""
restored_step = 0
"""Of the checkpoint that this process has gone on from."""


def wanted() -> bool:
    """Whether somebody listens, so that a graph that is built now should say when its gradients are there."""
    return bool(os.environ.get(STEP_TIMES) or os.environ.get(MONITOR) or MONITORS)


def ready() -> None:
    """Say that this rank's gradients are there and that it only waits for the others from now on.

    Without it the wait for slower ranks counts as part of the computation. Does nothing where nobody listens.
    """
    for recorder in RECORDERS:
        recorder.ready()
    for monitor in MONITORS:
        monitor.ready()


def arrived() -> None:
    """Say that the gradients of all ranks are there, and the wait for them is over."""
    for recorder in RECORDERS:
        recorder.arrived()
    for monitor in MONITORS:
        monitor.arrived()


def taken() -> None:
    """Say, within a step, that its batch is only there now."""
    for monitor in MONITORS:
        monitor.taken()


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """Say what is done meanwhile: see ``hvdkit.observe.step_files.StepEvent.name``."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        for recorder in RECORDERS:
            recorder.event(name, begun, time.perf_counter() - begun)


@contextlib.contextmanager
def sharing_weights() -> Iterator[None]:
    """Say that this rank meanwhile gets the weights that others have updated (``shard_state=True``)."""
    for monitor in MONITORS:
        monitor.ready()
    with during("shard_state"):
        yield
    for monitor in MONITORS:
        monitor.arrived()


def looked(parameter: str, norm: Any) -> None:
    """Say what the norm of this rank's own gradient of a parameter is: not finite, or not known to the host yet."""
    for monitor in MONITORS:
        monitor.looked(parameter, norm)


def wants_norm() -> bool:
    """Whether the norm of this step's mean gradient is to be told, by ``tell_norm``."""
    return any(monitor.wants_norm() for monitor in MONITORS)


def tell_norm(value: Any) -> None:
    """Tell it: a number, or what ``float`` makes one of."""
    for monitor in MONITORS:
        monitor.norm(value)


def saved(step: int) -> None:
    """Say, on the root, that a checkpoint is complete."""
    for monitor in MONITORS:
        monitor.saved(step)


def restored(step: int) -> None:
    """Say that the training goes on after so many steps."""
    global restored_step
    restored_step = step


def done() -> int | None:
    """Steps that are done, as a monitor counts; None where nobody knows."""
    return next((one.done() for one in MONITORS), restored_step or None)


def go_to(step: int | None, epoch: int) -> None:
    """Say that an elastic training goes on after so many steps; None: where it began."""
    if step is not None:
        restored(step)
    for monitor in MONITORS:
        monitor.go_to(step, epoch)


def follow(world: Any) -> None:
    """Say that the ranks of an elastic training are others now; ``world`` is the new ``Topology``."""
    for monitor in MONITORS:
        monitor.follow(world)
