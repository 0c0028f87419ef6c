"""The command-line flags that examples share, so that single.py and its neighbour differ in the eight steps alone.

Why this room exists: single.py and its distributed neighbour take the same flags with the same checks; written in
each of them, the flags would be most of the file. An example that needs only some of them, other defaults or flags of
its own says so in its call of ``run``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.datasets import NAMES
from hvdkit.errors import HvdkitError, LauncherError
from hvdkit.steps import launchers
from hvdkit.steps.lock import PATIENCE_S

Add = Callable[[Callable[..., Any]], None]
"""Adds an example's own flags: it is called with ``ArgumentParser.add_argument``."""
_LARGEST_SEED = 2**32 - 1  # that Keras takes
_MOST_THREADS = 10**4


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence, once for the whole job, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        if _rank() == 0:
            sys.stderr.write(f"{self.prog}: {message} (see --help)\n")
        raise SystemExit(2)


def parse(
    description: str,
    argv: list[str] | None = None,
    *,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    add: Add | None = None,
) -> argparse.Namespace:
    """Read the training flags, before any process has connected to another.

    Args:
        description: the first line of ``--help``.
        argv: without the program's name; default: ``sys.argv[1:]``.
        only: names of the shared flags that this example takes; default: all of them.
        defaults: values of flags that are not given, by name, in place of the shared ones.
        add: adds the example's own flags.
    Returns:
        epochs, batch_size, lr, warmup_epochs, device, num_threads, seed, data, data_dir, download, log_interval,
        fp16_allreduce, checkpoint_dir, resume, wait, or ``only`` those, and the example's own.
    Raises:
        TypeError: ``only`` or ``defaults`` name a flag that there is not: a mistake in the example.
        SystemExit: status 2 after one sentence for a bad value, 0 after ``--help``.
    """
    parser = _Parser(
        description=description,
        epilog="On N processes: hvdkit launch -n N -- python SCRIPT [flags]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shared = _shared()
    wanted = shared if only is None else {name: shared.get(name) for name in only}
    for name, options in wanted.items():
        if options is None:
            raise TypeError(f"there is no shared flag {name!r}, only {', '.join(shared)}")
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **options)
    if add is not None:
        add(parser.add_argument)
    known = {action.dest for action in parser._actions}
    if unknown := set(defaults or ()) - known:
        raise TypeError(f"defaults name {', '.join(sorted(unknown))}, which are no flags of this example")
    parser.set_defaults(**(defaults or {}))
    args = parser.parse_args(argv)
    if getattr(args, "resume", False) and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint_dir, where the checkpoints are")
    return args


def _shared() -> dict[str, dict[str, Any]]:
    """What ``add_argument`` is given for each shared flag; every one is also spelled with dashes."""
    return {
        "epochs": {"type": whole(1), "default": 16, "help": "passes over the training data"},
        "batch_size": {"type": whole(1), "default": 32, "help": "samples per step on each process"},
        "lr": {"type": positive, "default": 0.03, "help": "learning rate for one process; scaled by their number"},
        "warmup_epochs": {"type": not_negative, "default": 3, "help": "epochs from that rate to the scaled one"},
        "device": {"choices": ("auto", "gpu", "cpu"), "default": "auto", "help": "where to train"},
        "num_threads": {"type": whole(1, _MOST_THREADS), "help": "compute threads of a process (default: its share)"},
        "seed": {"type": whole(0, _LARGEST_SEED), "default": 42, "help": "of weights, data split and order of samples"},
        "data": {"choices": NAMES, "default": "digits", "metavar": "NAME", "help": f"data set: {', '.join(NAMES)}"},
        "data_dir": {"help": "where the data set's files are (default: HVDKIT_DATA, then the user's data directory)"},
        "download": {"action": "store_true", "help": "fetch missing files, once per node"},
        "log_interval": {"type": whole(1), "default": 10, "help": "steps between progress lines"},
        "fp16_allreduce": {"action": "store_true", "help": "send gradients in half precision"},
        "checkpoint_dir": {"help": "save a checkpoint after each epoch (default: none is written)"},
        "resume": {"action": "store_true", "help": "go on from the newest checkpoint in --checkpoint_dir, if any"},
        "wait": {
            "type": not_negative,
            "default": PATIENCE_S,
            "metavar": "SECONDS",
            "help": "for another job that writes into --checkpoint_dir",
        },
    }


def run(
    main: Callable[[argparse.Namespace], None],
    description: str,
    *,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    add: Add | None = None,
) -> NoReturn:
    """Call an example's ``main`` with its flags; a user's mistake ends it with one sentence, not a stack trace.

    Args:
        main: takes what ``parse`` returns.
        description, only, defaults, add: see ``parse``.
    """
    arguments = parse(description, only=only, defaults=defaults, add=add)
    try:
        main(arguments)
    except HvdkitError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: interrupted by Ctrl-C.\n")
        raise SystemExit(130) from None
    raise SystemExit(0)


def whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """A reader of whole numbers from ``least`` to ``most``, for ``argparse``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        if number > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {number}")
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
