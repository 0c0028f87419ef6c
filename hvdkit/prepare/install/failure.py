"""Picks out of a build's output what went wrong first, among the thousands of lines around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 400
"""Characters of an error that are shown; the log has all of it."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COMPILER = re.compile(
    r"^(?:\S[^:\n]*:\d+(?::\d+)?: (?:fatal )?error: "  # GCC, Clang
    r"|\S[^(\n]*\(\d+\): (?:fatal |catastrophic )?error(?: #\d+)?: "  # nvcc, Intel
    r"|\S+: (?:fatal error|error|internal compiler error): "  # the driver: no such file, unknown option, killed
    r"|nvcc fatal\s*: "
    r"|virtual memory exhausted)"
)
_LINKER = re.compile(r"undefined reference to|undefined symbol|\bcannot find -l|ld: .*(?:error|cannot find|not found)")
_DISK = re.compile(r"No space left on device|Disk quota exceeded")
_CMAKE = re.compile(r"^CMake Error")
_KILLED = re.compile(r"[Kk]illed|virtual memory exhausted|cannot allocate memory|out of memory", re.IGNORECASE)
_NOT_FOUND_BY_SHELL = re.compile(r": (?:command )?not found$|: Permission denied$")
_PIP = re.compile(r"^ERROR: ")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt))(?:: |$)")


def first_error(lines: Sequence[str]) -> str:
    """The first error that a person can act on, on one line.

    Errors of compiler, linker and CMake, in the order they appear; else pip's or Python's; else the last line.
    """
    clean = [_ANSI.sub("", line).rstrip() for line in lines]
    for number, line in enumerate(clean):
        if _CMAKE.match(line):
            return _short(_cmake_error(clean[number : number + 80]))
        if _COMPILER.match(line) or _LINKER.search(line) or _DISK.search(line):
            return _short(line)
    for pattern in (_NOT_FOUND_BY_SHELL, _PIP, _EXCEPTION):
        for line in clean:
            if pattern.search(line):
                return _short(line)
    last = [line for line in clean if line.strip()]
    return _short(last[-1]) if last else "it ended without saying why"


def is_out_of_memory(error: str) -> bool:
    """Whether an error is that of a compiler that the system ended, which it does when memory runs out."""
    return bool(_KILLED.search(error))


def _cmake_error(block: Sequence[str]) -> str:
    """CMake's own error with its text, or the compiler's when CMake only reports that one."""
    body = []
    for line in block[1:]:
        if line and not line.startswith(" "):
            break
        if _COMPILER.match(line.strip()):
            return line.strip()
        body.append(line.strip())
    return " ".join([block[0], *(line for line in body if line)])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
