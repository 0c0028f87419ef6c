"""What a launcher starts in place of a rank: it has one forked (``warm_main.py``), and ends as that one ends.

``hvdkit launch --stall-timeout`` asks a rank for its stacks by a signal, and reads them from a pipe that the rank has
inherited: the fork gets both.

Usage: python -I -S rank_stub.py ADDRESS MODULE ARGUMENT ...   ADDRESS: of the socket of a ``warm_main.py``
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    files = [0, 1, 2]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        if stacks := os.environ.get("HVDKIT_STACKS"):
            pipe, _, number = map(int, stacks.split(":"))
            files.append(pipe)
            signal.signal(number, lambda number, _: connection.sendall(b"%d" % number))
        request = {"environment": dict(os.environ), "directory": os.getcwd(), "words": sys.argv[2:]}  # noqa: PTH109
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], files)
        status = int(connection.recv(100) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
