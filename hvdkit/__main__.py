"""``python -m hvdkit`` and ``hvdkit``: the command line."""

import importlib
import signal


def main() -> None:
    """Run the command line and exit; Ctrl-C while its modules load ends it without a word."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command_line = importlib.import_module("hvdkit.cli")
    signal.signal(signal.SIGINT, handler)
    command_line.main()


if __name__ == "__main__":
    main()
