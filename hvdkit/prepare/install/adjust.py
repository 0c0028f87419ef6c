"""Changes the released source by the rows of a table (``adjustments``), and shows the table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hvdkit.errors import InstallError
from hvdkit.prepare.install.adjustments import ADJUSTMENTS, Adjustment, Target, applying


def apply(tree: Path, adjustments: Iterable[Adjustment]) -> None:
    """Change the source below ``tree``; every row or none.

    Raises:
        InstallError: a file is missing or an old text does not occur the stated number of times; nothing is written.
    """
    changed: dict[str, str] = {}
    for adjustment in adjustments:
        text = changed.get(adjustment.file)
        if text is None:
            text = _read(tree, adjustment)
        found = text.count(adjustment.old)
        if found != adjustment.count:
            raise InstallError(
                f"{adjustment.file} is not the released one: adjustment '{adjustment.name}' expects its text "
                f"{_times(adjustment.count)} and found it {_times(found)}: {_first_line(adjustment.old)!r}."
            )
        changed[adjustment.file] = text.replace(adjustment.old, adjustment.new)
    for file, text in changed.items():
        (tree / file).write_text(text, encoding="utf-8", newline="")


def describe(target: Target) -> str:
    """The table as text, one paragraph a row, saying which rows apply to ``target``."""
    chosen = applying(target)
    return "\n\n".join(_paragraph(row, row in chosen) for row in ADJUSTMENTS)


def _paragraph(row: Adjustment, applies: bool) -> str:
    old, new = _indented(row.old, "-"), _indented(row.new, "+")
    return (
        f"  {row.name}\n"
        f"    applies: {'yes' if applies else 'no'} (when: {row.when.words})\n"
        f"    why:     {row.why}\n"
        f"    file:    {row.file}, {_times(row.count)}\n"
        f"{old}{new}".rstrip("\n")
    )


def _indented(text: str, sign: str) -> str:
    return "".join(f"      {sign} {line}\n" for line in text.splitlines())


def _read(tree: Path, adjustment: Adjustment) -> str:
    try:
        with (tree / adjustment.file).open(encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError as error:
        raise InstallError(
            f"{adjustment.file} is missing from the source of Horovod: adjustment '{adjustment.name}' expects its "
            f"text {_times(adjustment.count)}."
        ) from error


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
