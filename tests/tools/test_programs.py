"""Signals that a tool handles for a while."""

import os
import signal

import pytest

from hvdkit.common.programs import handled, signal_name


@pytest.fixture
def ignored():
    """SIGUSR2 and SIGCHLD are ignored, as a shell may have left them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR2, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ignored")
def test_an_ignored_signal_stays_ignored_but_the_end_of_a_child_is_seen():
    seen, before = [], signal.getsignal(signal.SIGUSR1)
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    with pytest.raises(ZeroDivisionError), handled(numbers, lambda number, _: seen.append(number)):
        for number in numbers:
            os.kill(os.getpid(), number)
        raise ZeroDivisionError
    assert seen == [signal.SIGUSR1, signal.SIGCHLD]
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def test_a_signal_is_known_by_its_name():
    assert (signal_name(15), signal_name(36)) == ("SIGTERM", "signal 36")
