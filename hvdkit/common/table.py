"""Tables and sentences for people, on a terminal or in a file; and the same for programs, as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import click
import rich.table
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hvdkit.common import json_files
from hvdkit.common.units import printable

if TYPE_CHECKING:
    from hvdkit.common.json_files import Document

WIDE = 200
"""Columns of what is not printed to a terminal, where COLUMNS does not say: a file or a pipe is as wide as a table."""
T = TypeVar("T")
_GAP = 2
_NAME = 20
"""Characters of a name in the first column that are never split."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table. Where it is wider than the terminal, text wraps at words, and no number is split."""

    title: str  # what it is; "" for none
    names: Sequence[str]  # of the columns, the most important ones first
    rows: Sequence[Sequence[object]]  # a cell for each column; None for what is not known
    left: Collection[str] = ()  # names of the columns of text, which are aligned to the left; the others hold numbers
    note: str = ""  # a sentence below

    @classmethod
    def of(
        cls,
        things: Sequence[T],
        cells: Mapping[str, Callable[[T], object]],
        left: Collection[str] = (),
        title: str = "",
        note: str = "",
    ) -> Table:
        """A row for each thing and a column for each cell; columns without any cell are left out.

        Args:
            things: what the rows are about.
            cells: heading to what a column says of a thing; None for what is not known.
            left, title, note: as in ``Table``.
        """
        columns = {name: [cell(thing) for thing in things] for name, cell in cells.items()}
        if things:
            columns = {name: column for name, column in columns.items() if any(cell is not None for cell in column)}
        rows = list(zip(*columns.values(), strict=True))
        return cls(title, list(columns), rows, left or list(columns)[:1], note)

    def words(self) -> list[list[str]]:
        """The rows as text that neither a terminal nor a browser obeys."""
        return [["-" if cell is None else printable(str(cell)) for cell in row] for row in self.rows]

    def show(self, console: Console) -> None:
        """Print it."""
        if self.title:
            # as the grid's own title it would be folded to its width
            console.print(Text(printable(self.title), "bold"), soft_wrap=True)
        lines = [[printable(name) for name in self.names], *self.words()]
        grid = rich.table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for name, cells in zip(self.names, zip(*lines, strict=True), strict=True):
            is_text = name in self.left
            # numbers with their units stay in one line, headings may wrap
            words = [word for cell in (cells if is_text else cells[:1]) for word in cell.split()]
            least = max(map(cell_len, [*words, *([] if is_text else cells[1:])]), default=1)
            if is_text and name == self.names[0]:
                least = min(least, _NAME)
            grid.add_column(Text(cells[0]), justify="left" if is_text else "right", min_width=least, overflow="fold")
        for line in lines[1:]:
            grid.add_row(*map(Text, line))
        console.print(grid, crop=False)
        if self.note:
            console.print(Text(printable(self.note)), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Page:
    """What a command says: tables and sentences in their order, and at the end notes, what a reader should know."""

    parts: Sequence[Table | str | Text]
    notes: Sequence[str] = ()

    def print(self, form: str | None, document: Document) -> None:
        """Print it to standard output, or for programs, where ``form`` is "json", the document that says the same."""
        if form == "json":
            click.echo(json_files.encode(document), nl=False)
        else:
            self.show(console())

    def show(self, console: Console) -> None:
        """Print it as a terminal shows it; a line is empty before and after each table."""
        parts = [*self.parts, *(f"- {note}" for note in self.notes)]
        for before, part in pairwise([None, *parts]):
            if before is not None and (isinstance(before, Table) or isinstance(part, Table)):
                console.print()
            if isinstance(part, Table):
                part.show(console)
            else:
                console.print(part if isinstance(part, Text) else Text(readable(part or "")), soft_wrap=True)


def console(*, stderr: bool = False) -> Console:
    """Standard output or error; where it is no terminal, wide enough for whole tables unless COLUMNS is set."""
    made = Console(stderr=stderr, highlight=False, markup=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = WIDE
    return made


def readable(text: str) -> str:
    """Lines that a job printed, or that a file holds, without anything that a terminal would obey."""
    return "\n".join(map(printable, text.splitlines()))
