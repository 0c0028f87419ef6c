"""The command-line flags of every example, so that single.py and its neighbour differ in the eight steps alone.

Why this room exists: single.py and its distributed neighbour take the same flags with the same checks; written in
each of them, the flags would be most of the file.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdkit.datasets import NAMES
from hvdkit.errors import HvdkitError, LauncherError
from hvdkit.steps import launchers


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence, once for the whole job, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        if _rank() == 0:
            sys.stderr.write(f"{self.prog}: {message} (see --help)\n")
        raise SystemExit(2)


def parse(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Read the training flags, before any process has connected to another.

    Args:
        description: the first line of ``--help``.
        argv: without the program's name; default: ``sys.argv[1:]``.
    Returns:
        epochs, batch_size, lr, warmup_epochs, device, num_threads, seed, data, data_dir, download, log_interval,
        fp16_allreduce, checkpoint_dir, resume.
    Raises:
        SystemExit: status 2 after one sentence for a bad value, 0 after ``--help``.
    """
    parser = _Parser(
        description=description,
        epilog="On N processes: hvdkit launch -n N -- python SCRIPT [flags]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=whole(1), default=16, help="passes over the training data")
    add("--batch_size", "--batch-size", type=whole(1), default=32, help="samples per step on each process")
    add("--lr", type=positive, default=0.03, help="learning rate for one process; scaled by their number")
    add(
        "--warmup_epochs",
        "--warmup-epochs",
        type=not_negative,
        default=3,
        help="epochs from that rate to the scaled one",
    )
    add("--device", choices=("auto", "gpu", "cpu"), default="auto", help="where to train")
    add("--num_threads", "--num-threads", type=whole(1), help="compute threads of each process (default: its share)")
    add("--seed", type=whole(0), default=42, help="of the weights, the data split and the order of samples")
    add("--data", choices=NAMES, default="digits", metavar="NAME", help=f"data set: {', '.join(NAMES)}")
    add(
        "--data_dir",
        "--data-dir",
        help="where the data set's files are (default: HVDKIT_DATA, then the user's data directory)",
    )
    add("--download", action="store_true", help="fetch missing files, once per node")
    add("--log-interval", "--log_interval", type=whole(1), default=10, help="steps between progress lines")
    add("--fp16-allreduce", "--fp16_allreduce", action="store_true", help="send gradients in half precision")
    add("--checkpoint_dir", "--checkpoint-dir", help="save a checkpoint after each epoch (default: none is written)")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint_dir, if there is one")
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint_dir, where the checkpoints are")
    return args


def run(main: Callable[[argparse.Namespace], None], description: str) -> NoReturn:
    """Call an example's ``main`` with its flags; a user's mistake ends it with one sentence, not a stack trace."""
    arguments = parse(description)
    try:
        main(arguments)
    except HvdkitError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        raise SystemExit(error.exit_code) from None
    raise SystemExit(0)


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are at least ``least``, for ``argparse``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        return number

    return read


def positive(text: str) -> float:
    """A positive, finite number, for ``argparse``."""
    number = not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be greater than 0, got 0")
    return number


def not_negative(text: str) -> float:
    """A finite number >= 0, for ``argparse``."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0, got {text}")
    return number


def _rank() -> int:
    try:
        launched = launchers.detect(os.environ)
    except LauncherError:
        return 0
    return launched.rank if launched else 0
