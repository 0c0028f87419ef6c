"""Runs command lines of hvdkit one after the other, each in a forked process with little memory and time.

Standard input: in JSON a list of command lines to run first, in this process, so that what they import is there; and a
list of those to try. Standard output: for each a JSON list of status and standard error, where
a status below 0 is the signal that ended it.
"""

import json
import os
import resource
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hvdkit import cli

MEMORY = 1536 << 20
"""Bytes above what the process has when it starts."""
SECONDS = 60


def limited() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(3 * SECONDS)  # what waits uses no processor


def thrown(words: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                limited()
                with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
                    os.dup2(nothing.fileno(), 0)
                    os.dup2(nothing.fileno(), 1)
                os.dup2(said.fileno(), 2)
                status = cli.run(words)
            except BaseException as error:
                print(f"Traceback: {error!r}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(ended), said.read(4096).decode(errors="replace")


def main() -> None:
    warm, cold = json.load(sys.stdin)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # noqa: PTH123
        for words in warm:
            cli.run(words)
    for words in cold:
        print(json.dumps(thrown(words)), flush=True)


if __name__ == "__main__":
    main()
