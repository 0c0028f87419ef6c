"""What the command lines share: groups that import a command when it is called, so that ``--help`` is fast; options."""

from __future__ import annotations

import errno
import importlib
import io
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import click

from hvdkit.errors import HvdkitError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DIGITS = 16
"""More than any number of ranks has; Python refuses to read numbers of thousands of digits."""
_LONGEST = 200
"""Characters of what was received that a message quotes."""
_MOST = 10**18
"""More is a typing error, and no number that a table can show."""
_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
"""A file to read from."""
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What newer versions of click raise for a group without a command; others print its help themselves, with status 0."""


def run(command: click.Command, argv: Sequence[str], name: str) -> int:
    """Run one command line and return its exit status; a user's mistake is one sentence on stderr."""
    try:
        with command.make_context(name, list(argv)) as context:
            status: Any = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.UsageError as error:
        if isinstance(error, _HELP):
            click.echo(error.format_message())
            return 0
        where = error.ctx.command_path if error.ctx else name
        return _fail(f"{error.format_message().rstrip('.')} (see '{where} --help').", 2)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("Interrupted.", 130)
    except HvdkitError as error:
        return _fail(str(error), error.exit_code)
    except MemoryError:
        return _fail("The memory does not suffice; give smaller files, or run it where there is more.", 1)
    except (BrokenPipeError, SystemExit) as error:
        # a reader that has enough, as head has, is no failure; rich makes an exit of it
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _forget_output()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _forget_output()
        return _fail(f"Nothing more could be written ({error.strerror}); free space, or write to another place.", 1)
    return status if isinstance(status, int) else 0


def _forget_output() -> None:
    """Else Python tries to write the rest of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    click.echo(f"hvdkit: {message}", err=True)
    return status


class LazyGroup(click.Group):
    """A group made of a table."""

    table: Mapping[str, tuple[str, str]] = {}  # name to ("module:function", what it does in a sentence)
    sections: Mapping[str, Mapping[str, tuple[str, str]]] = {}  # for --help, heading to the part of the table below it
    moved: Mapping[str, str] = {}  # name of a command that is gone to what does the same now

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; one that is gone is an error that names what does the same now."""
        if cmd_name in self.moved:
            raise click.UsageError(f"'{ctx.command_path} {cmd_name}' is '{self.moved[cmd_name]}' now", ctx)
        if cmd_name not in self.table:
            return None
        module, _, function = self.table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), function)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{function} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The table, for ``--help``."""
        for heading, table in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, summary) for name, (_, summary) in table.items()])


def group_of(
    commands: Mapping[str, tuple[str, str]],
    sections: Mapping[str, Mapping[str, tuple[str, str]]] | None = None,
    moved: Mapping[str, str] | None = None,
) -> type[LazyGroup]:
    """A group class, for ``click.group(cls=...)``, of a table, in sections where given: see ``LazyGroup``."""
    attributes = {"table": commands, "sections": sections or {"Commands": commands}, "moved": moved or {}}
    return type("Group", (LazyGroup,), attributes)


def with_options(options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A decorator that gives a click command all of these options, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


JSON = click.option(
    "--json", "json_", is_flag=True, help="Print one JSON object, and nothing else, on standard output."
)


def time_limit(
    seconds: float, help_text: str, name: str = "--timeout", most: float | None = 3600
) -> Callable[..., Any]:
    """An option for a time limit of at least a second."""
    return click.option(
        name,
        type=click.FloatRange(min=1, max=most),
        callback=seconds_above_0,  # not a number is in every range
        default=seconds,
        metavar="SECONDS",
        help=help_text,
    )


def print_any_name() -> None:
    """Have standard output and error take names, from files, that are no text in their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def whole_numbers(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """A click callback for ``64,1,28,28``; None stays None."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(map(is_count, words)):
        raise click.BadParameter(
            f"expected whole numbers above 0 with commas between them, like 1,2,4, got {shortened(text)}"
        )
    return tuple(map(int, words))


def numbers_of_ranks(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """The same with each number once, in ascending order."""
    found = whole_numbers(ctx, parameter, text)
    return None if found is None else tuple(sorted(set(found)))


def is_count(word: str) -> bool:
    """Whether a word is a whole number above 0, of digits alone and not longer than any that makes sense."""
    return word.isascii() and word.isdigit() and len(word) <= _DIGITS and int(word) > 0


def shortened(text: str) -> str:
    """What was received, in quotes, for a message that stays a sentence."""
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}... ({len(text)} characters)"


def large_count(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """A click callback for a whole number such as 25557032, 1e12 or 7B."""
    if text is None:
        return None
    factor = _FACTORS.get(text[-1:].lower(), 1)
    try:
        value = Decimal(text if factor == 1 else text[:-1]) * factor
    except InvalidOperation:
        value = Decimal("nan")
    if not (value.is_finite() and 1 <= value <= _MOST and value == int(value)):
        raise click.BadParameter(f"expected a whole number from 1 to 1e18 like 25557032, 1e12 or 7B, got {text!r}")
    return int(value)


def output_file(_ctx: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    """A click callback for a file that is to be written, asked before anything runs; None stays None."""
    if file is None:
        return None
    require_possible(file)
    if file.is_dir():
        raise click.BadParameter(f"{str(file)!r} is a directory; give the path of a file in it")
    if not os.access(file.absolute().parent, os.W_OK):
        raise click.BadParameter(f"directory {str(file.absolute().parent)!r} does not exist or cannot be written to")
    return file


def require_possible(path: Path) -> None:
    """Refuse a path at which nothing can be: a name too long, links in a circle."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        raise click.BadParameter(f"{shortened(str(path))} cannot be a path ({error.strerror})") from error


def number(least: float, *, above: bool = False, most: float = math.inf) -> Callable[..., float | None]:
    """A click callback for a finite number: at least, or above, one and at most another; None stays None."""

    def check(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        if value is None or (least <= value <= most and value < math.inf and not (above and value == least)):
            return value
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise click.BadParameter(
            f"expected a finite number {'above' if above else 'of at least'} {least:g}{limit}, got {value}"
        )

    return check


seconds_above_0 = number(0, above=True)
"""A click callback for a time limit."""
not_below_0 = number(0)
"""A click callback for a quantity."""
