"""Finds the C and C++ compilers, and learns whether the C++ compiler is new enough by compiling something."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdkit.common.ask import ask
from hvdkit.prepare.install.facts import CompilerFacts

CXX_NAMES = ("c++", "g++", "clang++")
CC_NAMES = ("cc", "gcc", "clang")

CXX20_PROGRAM = (
    "#include <bit>\n#include <concepts>\nint main() { return static_cast<int>(std::has_single_bit(2u)) - 1; }\n"
)
"""Small, and refused by every compiler or library that cannot do C++20."""

# Horovod's own choice of vector instructions, by the flag of the processor that announces each.
ARCH_FLAGS = {"f16c": "-mf16c", "avx": "-mavx", "fma": "-mfma"}

_FAMILIES = (
    ("Cray clang", "Cray clang"),
    ("Intel(R) oneAPI", "Intel oneAPI"),
    ("nvc++", "NVHPC"),
    ("clang", "Clang"),
    ("Free Software Foundation", "GCC"),
)


def find_cxx(environ: Mapping[str, str]) -> CompilerFacts | None:
    """The C++ compiler: CXX when it is set, else the first of c++, g++, clang++ on PATH; None when not there."""
    command = compiler_command(environ, "CXX", CXX_NAMES)
    if command is None:
        return None
    test = ask([*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], stdin=CXX20_PROGRAM)
    return _describe(command, "" if test.ok else test.problem)


def find_cc(environ: Mapping[str, str]) -> CompilerFacts | None:
    """The C compiler, which Gloo's build asks for: CC when it is set, else the first of cc, gcc, clang."""
    command = compiler_command(environ, "CC", CC_NAMES)
    return None if command is None else _describe(command, "")


def compiler_command(environ: Mapping[str, str], variable: str, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Command line of a compiler with the full path of its program, None when it is not on PATH.

    The variable may hold arguments too, as in ``CXX="ccache g++"``.
    """
    path = environ.get("PATH", "")
    wanted = _words(environ.get(variable, ""))
    for words in [wanted] if wanted else [[name] for name in names]:
        program = shutil.which(words[0], path=path)
        if program is not None:
            return (str(Path(program).absolute()), *words[1:])
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def arch_flags(cpuinfo: str) -> tuple[str, ...]:
    """Compiler flags for the vector instructions that Horovod uses and a processor has.

    Args:
        cpuinfo: the text of ``/proc/cpuinfo``.
    """
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    present = set(line.group(1).split()) if line else set()
    return tuple(flag for name, flag in ARCH_FLAGS.items() if name in present)


def libc() -> str:
    """Name and version of the C library, such as "glibc 2.36"."""
    return " ".join(platform.libc_ver()).strip()


def _describe(command: tuple[str, ...], problem: str) -> CompilerFacts:
    answer = ask([*command, "--version"])
    family = next((name for mark, name in _FAMILIES if mark.lower() in answer.text.lower()), "")
    # The first word is the name it was called by: c++ and g++ are one compiler.
    banner = answer.first_line.partition(" ")[2]
    version = re.search(r"\d+\.\d+(?:\.\d+)*", re.sub(r"\([^)]*\)", "", banner))
    name = f"{family} {version[0]}" if family and version else answer.first_line
    target = ask([*command, "-dumpmachine"]).first_line
    return CompilerFacts(command, name, " ".join([family, banner, target, *command[1:]]), problem)
