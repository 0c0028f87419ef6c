"""Signals that a tool handles for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 34`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle these signals within the block.

    One that ends a process and is ignored stays ignored: ``nohup hvdkit launch ...`` outlives its terminal.
    """
    previous = {}
    for number in numbers:
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
