"""What each rank runs: the user's words, checked before anything is started."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common.files import content, exists
from hvdkit.errors import InvalidArgumentError

_PYTHON = re.compile(r"python[0-9.]*$")
_OPTIONS_WITH_VALUE = ("W", "X")
_IMPORTS_MPI4PY = re.compile(rb"^[ \t]*(?:from|import)[ \t]+mpi4py\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that exists.

    Attributes:
        words: program (an absolute path) and arguments.
        script: index in ``words`` of the Python script that is run, None when it is no Python script.
    """

    words: tuple[str, ...]
    script: int | None = None

    @property
    def imports_mpi4py(self) -> bool:
        """Whether it is a Python script that itself imports mpi4py."""
        if self.script is None:
            return False
        try:
            return _IMPORTS_MPI4PY.search(content(Path(self.words[self.script]))) is not None
        except OSError:  # Python itself will say so
            return False


def resolve(words: Sequence[str], search_path: str, python: Path) -> Command:
    """Find the program and, for Python, the script.

    Args:
        words: as typed; a first word that ends in ``.py`` is a script for ``python``.
        search_path: directories to look for the program in, as in PATH.
        python: the interpreter to use where none is named, or where ``python`` is not on the path.
    Raises:
        InvalidArgumentError: no command, or the program or the script does not exist.
    """
    if not words:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit launch -n 2 python train.py")
    is_script = words[0].endswith(".py")
    if is_script:
        words = (str(python), *words)
    is_python = is_script or _PYTHON.match(Path(words[0]).name) is not None
    program = str(python) if is_script else shutil.which(words[0], path=search_path)
    if program is None and is_python and "/" not in words[0]:
        program = str(python)
    if program is None:
        raise InvalidArgumentError(_why_not_runnable(words[0]))
    script = _script_index(words) if is_python else None
    if script is not None and not exists(Path(words[script])):
        where = "" if Path(words[script]).is_absolute() else f" in {Path.cwd()}"
        raise InvalidArgumentError(
            f"Script {words[script]!r} does not exist{where}; give the path of an existing file."
        )
    return Command((str(Path(program).absolute()), *words[1:]), script)


def through_mpi4py(command: Command) -> Command:
    """The same script run by ``python -m mpi4py``, which ends the job when a rank ends by an exception."""
    before, after = command.words[: command.script], command.words[command.script :]
    return Command((*before, "-m", "mpi4py", *after), len(before) + 2)


def as_one_word(command: Command, python: Path) -> Command:
    """The same command in a single word of Python, for launchers that would read the words themselves."""
    words = f"import os; os.execv({command.words[0]!a}, {list(command.words)!a})"
    return Command((str(python), "-I", "-S", "-c", words))


def _why_not_runnable(word: str) -> str:
    if "/" not in word:
        return f"Command {word!r} was not found on PATH; give an installed program or the path of one."
    what = "is not an executable file" if exists(Path(word)) else "does not exist"
    return f"Command {word!r} {what}; give the path of a program, or of a script that ends in .py."


def _script_index(words: Sequence[str]) -> int | None:
    """Index of the script in a Python command line; None for ``-c``, ``-m`` and standard input."""
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--check-hash-based-pycs":
            index += 1
        elif not word.startswith("-"):
            return index
        elif word == "-":
            return None
        elif not word.startswith("--"):
            for position, letter in enumerate(word[1:], start=1):
                if letter in "cm":
                    return None
                if letter in _OPTIONS_WITH_VALUE:
                    index += position == len(word) - 1
                    break
        index += 1
    return None
