"""Runs a launcher by itself: elastic jobs, and ranks on other hosts.

Elastic ranks are watched by horovodrun, which must replace those that fail; ranks on other hosts cannot reach the
socket of ``supervise``. Their output comes as the launcher passes it on, and it is the launcher that ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.outcome import Ended
from hvdkit.launch.signals import ENDING


def run(argv: list[str], environment: Mapping[str, str]) -> Ended:
    """Run a launcher to its end, passing signals on, a second one as SIGKILL; how it ended.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        process = subprocess.Popen(argv, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}.") from error
    ended_by: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        ended_by.append(number)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL if len(ended_by) > 1 else number)

    # One that is ignored stays ignored: "nohup hvdkit launch ..." outlives its terminal.
    watched = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in watched}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if ended_by:
        return Ended(128 + ended_by[0], interrupted=True)
    return Ended(status if status >= 0 else 128 - status, interrupted=False)
