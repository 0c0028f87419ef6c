"""What was ported and what is left, as text."""

from __future__ import annotations

from textwrap import fill

from hvdkit.prepare.port.run import Ported

_FROM = {"horovod": "plain Horovod", "ddp": "PyTorch DDP", "none": "one process", "hvdkit": "hvdkit"}
_WIDTH = 110


def as_text(ported: Ported) -> str:
    """What stays, by line of the ported script, with reason and what to write."""
    path = ported.before.path
    changed = ported.after != ported.before.content
    to = f" to hvdkit.{ported.adapter}" if changed else ""
    lines = [f"{path}: from {_FROM[ported.library]}{to}{'' if changed else ', nothing changed'}"]
    for one in ported.left:
        lines += ["", f"line {one.line}: {one.why}."]
        lines.append(_filled(f"write: {one.write}"))
    if ported.notes:
        lines += ["", *(_filled(f"note: {one}.") for one in ported.notes)]
    count = len(ported.left)
    said = f"{count} place{'' if count == 1 else 's'} to write by hand" if count else "Nothing is left to write by hand"
    return "\n".join([*lines, "", f"{said}."])


def _filled(text: str) -> str:
    return fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
    )
