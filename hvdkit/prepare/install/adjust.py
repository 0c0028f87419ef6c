"""Changes the released source of Horovod 0.28.1 where today's compilers and frameworks need it: ``patches/``.

One file a reason: its head says when it applies, what is known upstream, and why; the rest is a unified diff against
the released source. ``patch -p1`` applies those of one build in the order of their numbers, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hvdkit.errors import InstallError
from hvdkit.prepare.install.facts import Options

PATCHES = Path(__file__).parent / "patches"
_FILE = re.compile(r"^--- a/(.+)\n\+\+\+ b/.+\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ .*\n", re.MULTILINE)


CONDITIONS: dict[str, Callable[[Options], bool]] = {
    "always": lambda options: True,  # noqa: ARG005
    "built for PyTorch": lambda options: "torch" in (options.frameworks or ()),
    "built for TensorFlow": lambda options: "tensorflow" in (options.frameworks or ()),
    "--gpu none": lambda options: options.gpu == "none",
    "--gpu nccl or mpi": lambda options: options.gpu != "none",
    "without --plain": lambda options: not options.plain,
}
"""What the head of a patch says after ``When:``, with commas between several that all must hold."""


@dataclass(frozen=True)
class Hunk:
    """In ``file``, the lines ``old`` occur exactly once and become ``new``; both hold the lines around the change."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """One file of ``patches/``.

    Attributes:
        name: of the file, without its number.
        when: names of ``CONDITIONS``, with commas.
        upstream: its issues and pull requests, or "no issue found".
        why: the reason.
        hunks: what it changes.
    """

    name: str
    when: str
    upstream: str
    why: str
    hunks: tuple[Hunk, ...]

    def applies(self, options: Options) -> bool:
        """Whether a build needs it."""
        return all(CONDITIONS[words](options) for words in self.when.split(", "))


def parse(name: str, text: str) -> Patch:
    """A patch from the text of its file."""
    when, upstream, rest = text.split("\n", 2)
    why, _, diff = rest.partition("\n--- ")
    diff = f"--- {diff}"
    parts = _FILE.split(diff)[1:]
    hunks = [
        Hunk(file, _side(hunk, " -"), _side(hunk, " +"))
        for file, body in zip(parts[::2], parts[1::2], strict=True)
        for hunk in _HUNK.split(body)[1:]
    ]
    head = (when.removeprefix("When: "), upstream.removeprefix("Upstream: "), " ".join(why.split()))
    return Patch(name, *head, tuple(hunks))


@cache
def patches() -> tuple[Patch, ...]:
    """All patches, in the order of their numbers."""
    files = sorted(PATCHES.glob("*.patch"))
    return tuple(parse(file.stem.partition("-")[2], file.read_text(encoding="utf-8")) for file in files)


def applying(options: Options) -> tuple[Patch, ...]:
    """The patches that apply to a build, in order."""
    return tuple(patch for patch in patches() if patch.applies(options))


def digest(chosen: Iterable[Patch]) -> str:
    """SHA-256 over what patches change, for the cache key; their reasons do not count."""
    hunks = [[patch.name, hunk.file, hunk.old, hunk.new] for patch in chosen for hunk in patch.hunks]
    return hashlib.sha256(json.dumps(hunks).encode()).hexdigest()


def apply(tree: Path, chosen: Iterable[Patch]) -> None:
    """Change the source below ``tree``; every hunk exactly as it is written, or none of all.

    Raises:
        InstallError: a file is missing or the lines of a hunk do not occur once; nothing is written.
    """
    changed: dict[str, str] = {}
    for name, hunk in [(patch.name, hunk) for patch in chosen for hunk in patch.hunks]:
        if hunk.file not in changed:
            try:
                with (tree / hunk.file).open(encoding="utf-8", newline="") as opened:
                    changed[hunk.file] = opened.read()
            except FileNotFoundError as error:
                raise InstallError(
                    f"{hunk.file} is missing from the source of Horovod: adjustment '{name}' expects its text once."
                ) from error
        text = changed[hunk.file]
        found = [match.span() for match in re.finditer(f"^{re.escape(hunk.old)}", text, re.MULTILINE)]
        if len(found) != 1:
            raise InstallError(
                f"{hunk.file} is not the released one: adjustment '{name}' expects its text once and found it "
                f"{len(found)} times: {hunk.old.strip().splitlines()[0]!r}."
            )
        ((start, end),) = found
        changed[hunk.file] = text[:start] + hunk.new + text[end:]
    for file, text in changed.items():
        (tree / file).write_text(text, encoding="utf-8", newline="")


def _side(hunk: str, signs: str) -> str:
    """The lines of a hunk that begin with one of the signs, without them."""
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in signs)
