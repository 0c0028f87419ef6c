"""A click group whose commands are imported when they are called, so that ``--help`` stays fast.

Why this room exists: ``hvdkit`` itself and those of its commands that have subcommands work the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click


class LazyGroup(click.Group):
    """A group made of a table.

    Attributes:
        table: name to ("module:function", what it does in a sentence).
    """

    table: Mapping[str, tuple[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in self.table:
            return None
        module, _, function = self.table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), function)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{function} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The table, for ``--help``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])


def group_of(commands: Mapping[str, tuple[str, str]]) -> type[LazyGroup]:
    """A group class, for ``click.group(cls=...)``, of a table: see ``LazyGroup``."""
    return type("Group", (LazyGroup,), {"table": commands})
