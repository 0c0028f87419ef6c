"""The ways in which a user ends a program that runs jobs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from hvdkit.common.signals import handled


class ToldToEnd(KeyboardInterrupt):
    """This program was told to end by a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise ``ToldToEnd`` when a batch system or a closed terminal ends this program, so that its job is ended too."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise ToldToEnd(number)

    with handled((signal.SIGTERM, signal.SIGHUP), end):
        yield
