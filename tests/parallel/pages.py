"""The Python blocks of a page in docs/, for tests that run them, and every command, for tests that read its --help."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvdkit.cli import hvdkit_command

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> dict[str, list[str]]:
    """The blocks of a page, by the heading that they stand under."""
    parts = re.split(r"^#+ (.+)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    code = [re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in parts[2::2]]
    return dict(zip(parts[1::2], code, strict=True))


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run blocks with these names, to which theirs are added."""
    exec(code, names)  # noqa: S102  # the repository's own pages
    return names


def every_command(
    command: click.Command = hvdkit_command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Each command and subcommand with its name, the last of all ``hvdkit`` itself with an empty one."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from every_command(command.get_command(context, name), (*path, name))
    yield " ".join(path), command
