"""Starts a launcher: in a session of its own, with its output in pipes and nothing to read."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from hvdkit.errors import LaunchError
from hvdkit.run.launch.guard import guarded
from hvdkit.steps import secret


def start(
    argv: Sequence[str], environment: Mapping[str, str], *, stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a launcher. The terminal's Ctrl-C does not reach it: this process then ends the job in order.

    Args:
        argv: the launcher, its options and the command.
        environment: all its variables; a secret for the meeting of the ranks is put beside them where there is none.
        stderr: ``subprocess.PIPE``, or ``subprocess.STDOUT`` for one pipe with standard output.
    Raises:
        LaunchError: it cannot be started.
    """
    try:
        return subprocess.Popen(
            guarded(list(argv)),
            env={secret.VARIABLE: secret.new(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}.") from error
