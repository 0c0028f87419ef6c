"""Programs of this machine: what one answers when asked, which MPI it belongs to; and signals, handled for a while."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, cast

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers

PATIENCE_SECONDS = 120
"""On a slow parallel file system a wrapper or a small compilation may take seconds; what takes longer is broken."""
_VERSION_SECONDS = 30
LONGEST = 1 << 20
"""Bytes of an answer; who says more is broken too."""
_MPI_VERSIONS = (
    ("Open MPI", r"^Open MPI v([\d.]+\w*)"),
    ("Open MPI", r"\((?:Open MPI|OpenRTE)\) ([\d.]+\w*)"),
    ("IBM Spectrum MPI", r"IBM Spectrum MPI\D*([\d.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library(?:.*Version)?\D*([\d.]*)"),
    ("Cray MPICH", r"CRAY MPICH version ([\d.]+)"),
    ("MVAPICH", r"MVAPICH2?\D* Version\s*:?\s*([\d.]+\w*)"),
    ("MPICH", r"^MPICH Version\s*:\s*([\d.]+\w*)"),
    ("MPICH", r"^HYDRA build details:\s*Version:\s*([\d.]+\w*)"),
)
"""Name -> pattern of MPI_Get_library_version's or ``mpirun --version``'s text; the first that is found counts."""
_MPI_FAMILIES = {
    "Open MPI": "Open MPI",
    "IBM Spectrum MPI": "Open MPI",
    "MPICH": "MPICH",
    "Intel MPI": "MPICH",
    "Cray MPICH": "MPICH",
    "MVAPICH": "MPICH",
}
"""Implementations that share a way to tell a process its rank (PRRTE's PMIx, Hydra's PMI)."""


@dataclass(frozen=True)
class Answer:
    """What the program said (standard output and error together), whether it succeeded, and whether it ended at all."""

    text: str
    ok: bool
    ended: bool = True

    @property
    def first_line(self) -> str:
        """The first line that is not empty, "" when there is none."""
        return next(iter(self._lines), "")

    @property
    def problem(self) -> str:
        """The first line that speaks of an error, else the last one."""
        last = self._lines[-1] if self._lines else "it says nothing"
        return next((line for line in self._lines if "error" in line.lower()), last)

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]


def version(program: Path, environ: Mapping[str, str]) -> Answer:
    """What a program says of its version."""
    return ask([str(program), "--version"], environ=environ, seconds=_VERSION_SECONDS)


def ask(
    argv: Sequence[str],
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
    seconds: float = PATIENCE_SECONDS,
) -> Answer:
    """Run a program to its end, for ``seconds`` at most; one that cannot be run is an answer, too."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**(os.environ if environ is None else environ), "LC_ALL": "C"},
            start_new_session=True,  # so that what it starts ends with it
        )
    except OSError as error:
        return Answer(f"{argv[0]} cannot be run: {error.strerror}", ok=False)
    said, status = _hear(process, stdin.encode(), seconds)
    if status == -signal.SIGKILL and len(said) < LONGEST:
        return Answer(f"{argv[0]} did not answer within {seconds:g} s", ok=False, ended=False)
    return Answer(said.decode(errors="replace"), ok=status == 0)


def _hear(process: subprocess.Popen[bytes], stdin: bytes, seconds: float) -> tuple[bytes, int]:
    """What a process says and its exit status; it is killed when it takes too long, or says too much."""

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    patience = threading.Timer(seconds, end)
    patience.start()
    with process:
        try:
            with contextlib.suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as asked:
                asked.write(stdin)
            said = cast(IO[bytes], process.stdout).read(LONGEST)
            if len(said) == LONGEST:
                end()
            return said, process.wait()
        except BaseException:
            end()
            raise
        finally:
            patience.cancel()


def identify_mpi(text: str) -> tuple[str, str]:
    """Implementation and version in a version text, ("", "") when it is not known.

    >>> identify_mpi("Open MPI v5.0.11, package: Open MPI user@localhost Distribution")
    ('Open MPI', '5.0.11')
    """
    for name, pattern in _MPI_VERSIONS:
        found = re.search(pattern, text.strip(), re.MULTILINE)
        if found:
            return name, found.group(1).rstrip(".")
    return "", ""


def same_mpi_family(one: str, other: str) -> bool:
    """Whether programs of one implementation know their rank when the other's launcher starts them.

    True also when one of them is unknown: nothing can be said against it.
    """
    if one not in _MPI_FAMILIES or other not in _MPI_FAMILIES:
        return True
    return _MPI_FAMILIES[one] == _MPI_FAMILIES[other]


def major(version: str) -> str:
    """First number of a version: "5" of "5.0.11"."""
    return version.partition(".")[0]


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 34`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle these signals within the block.

    One that ends a process and is ignored stays ignored: ``nohup hvdkit launch ...`` outlives its terminal.
    """
    previous = {}
    for number in numbers:
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
