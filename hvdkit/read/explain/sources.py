"""Which file is what: files and directories to the recordings of one job."""

from __future__ import annotations

import fnmatch
import gzip
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hvdkit.common import files
from hvdkit.common.json_files import Document, Part, Positive
from hvdkit.common.units import printable
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.observe import history

LAUNCHED = "launch.json"
"""The file in the directory of a job that says how it was started."""


class JobLaunch(Document, frozen=True):
    """How a job was started.

    Attributes:
        ranks: how many processes.
        launcher: such as "mpirun".
        cores: usable ones of the machine on which it was started.
        ranks_on_a_host: the most that share one; None where only the launcher knows.
        threads: OMP_NUM_THREADS of each rank; None where it is not set to a number.
        settings: the variables of Horovod (HOROVOD_*) that are set.
    """

    kind = "job-launch"
    written_by = "hvdkit launch --explain-job"

    ranks: Positive
    launcher: str
    cores: Positive
    ranks_on_a_host: Positive | None
    threads: Positive | None
    settings: dict[str, str]


class Read(Part, frozen=True):
    """A recording that was read.

    Attributes:
        path: the file, or the directory of the files of all ranks.
        what: "step times", "timeline", "trace", "mpi profile", "launch" or "stall report".
        says: what was in it, a few words.
    """

    path: str
    what: str
    says: str


STEPS, TIMELINE, TRACE, MPI, LAUNCH, STALL, MONITOR, BENCH, EMULATE = (
    "step times", "timeline", "trace", "mpi profile", "launch", "stall report", "monitor history", "bench results",
    "emulate results",
)  # fmt: skip
OF_A_JOB = (LAUNCH, STEPS, TIMELINE, TRACE, MPI, STALL)
"""What explain reads."""
_BY_NAME = (
    (history.NAME, MONITOR),
    ("rank-*.jsonl", STEPS),
    ("rank-*.txt", STALL),
    ("trace-*-of-*.json", TRACE),
    ("trace-*-of-*.json.gz", TRACE),
    ("mpi_profile.*", MPI),
)
_SIGN = {
    MONITOR: re.compile(rb'^{"kind"\s*:\s*"start"'),
    STEPS: re.compile(rb'"step times"'),
    STALL: re.compile(rb"rank \d+ (did not arrive at|is not named by Horovod)"),
}
"""What stands in the beginning of such a file; others name their logs and metrics so, too."""
_BY_KIND = {b"bench-scaling": BENCH, b"emulate-results": EMULATE, JobLaunch.kind.encode(): LAUNCH}
_KIND = re.compile(rb'"kind"\s*:\s*"([a-z-]{1,40})"')
_HEAD = 4096
"""Bytes by which a file is known."""
_DEEP = 3
"""How many directories below the one that was given are searched."""
_MOST = 20_000
"""Files of a directory that are looked at."""


def find(paths: Sequence[Path], kinds: Collection[str] = OF_A_JOB, *, nearest: bool = False) -> dict[str, list[Path]]:
    """What is there of a job: files, by what they are.

    Args:
        paths: files, and directories, which are searched.
        kinds: what counts; other files are none.
        nearest: of each kind only what lies least deep: what another job left further below is not asked for.
    Raises:
        DataError: a file is no recording, or there is none in any directory.
        InvalidArgumentError: there are those of several jobs.
    """
    known: dict[str, dict[Path, Path]] = {}  # each file once, whatever it is called
    for path in paths:
        for file in _below(path):
            what = _what(file, named=file == path)
            if what is not None and what in kinds:
                known.setdefault(what, {}).setdefault(file.resolve(), file)
            elif file == path:
                raise DataError(
                    f"{printable(str(path))} is no recording of a job; expected one of {', '.join(kinds)}, or a "
                    "directory with them."
                )
    if not known:
        raise DataError(
            f"there is no recording of a job in {', '.join(printable(str(path)) for path in paths)}; record one with "
            "'hvdkit launch --explain-job -n 2 -- python train.py'."
        )
    sources = {what: list(found.values()) for what, found in known.items()}
    for what, found in sources.items():
        if nearest:
            depth = min(len(file.parts) for file in found)
            found[:] = [file for file in found if len(file.parts) == depth]
        in_one_directory = what in (STEPS, TRACE, MPI)
        several = list(dict.fromkeys(file.parent for file in found)) if in_one_directory else found
        if len(several) > 1 and what != STALL:
            raise InvalidArgumentError(
                f"there is more than one {what}: {printable(str(several[0]))} and {printable(str(several[1]))}; give "
                "the recordings of one job."
            )
    return sources


def _below(path: Path) -> Iterator[Path]:
    """The files below a directory, nearest first, up to a depth and a number; a file is itself."""
    if not path.is_dir():
        yield path
        return
    left = _MOST
    places = [(path, 0)]
    for place, depth in places:
        try:
            entries = sorted(place.iterdir())
        except OSError as error:
            raise DataError(f"{printable(str(place))} cannot be read: {error.strerror}.") from error
        for entry in entries:
            left -= 1
            if left < 0:
                return
            if entry.is_dir() and not entry.is_symlink():
                if depth < _DEEP and not entry.name.startswith("."):
                    places.append((entry, depth + 1))
            elif entry.is_file():
                yield entry


def _what(file: Path, *, named: bool) -> str | None:
    """What a file is; one that was not named itself has to be called like one."""
    for pattern, what in _BY_NAME:
        if fnmatch.fnmatch(file.name, pattern):
            sign = _SIGN.get(what)
            return what if sign is None or sign.search(_head(file)) else None
    if named and _SIGN[MONITOR].search(_head(file)):
        return MONITOR
    if not named and not file.name.endswith((".json", ".json.gz")):
        return None
    head = _head(file).lstrip()
    if head.startswith(b"["):  # an array with events, or one that was cut off before them
        return TIMELINE if b'"ph"' in head or not head.strip(b"[] \r\n") else None
    kind = _KIND.search(head)
    if kind is not None:
        return _BY_KIND.get(kind[1])
    return TRACE if b'"traceEvents"' in head or b'"schemaVersion"' in head else None


def _head(file: Path) -> bytes:
    try:
        with files.opened(file) as stream:
            head = stream.read(_HEAD)
            if head.startswith(files.GZIP_MAGIC):
                stream.seek(0)
                return gzip.GzipFile(fileobj=stream).read(_HEAD)
            return head
    except (OSError, EOFError, zlib.error):
        return b""
