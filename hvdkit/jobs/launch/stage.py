"""``--stage``: the environment copied to the local disk of every host before the ranks start.

First, what it makes of a job: a key for the environment, a short job before the ranks' own, and another place for their
Python. The short job runs this file on each host, as ``python -m mpi4py -m hvdkit.jobs.launch.stage PREFIX STORE KEY
HOSTS``: over MPI the hosts find who lacks the environment, and these unpack what ``tar`` packs on the first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from hvdkit.common.units import bytes_text
from hvdkit.errors import DataError, HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.jobs.launch.model import Command, Host, LaunchPlan, Setting, Staged
from hvdkit.jobs.launch.options import Request

_MOVED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_START = (
    'test -x "$0" && exec "$0" "$@"; echo "hvdkit launch: host $(uname -n) cannot run $0: the environment, or the base '
    'interpreter that it is made of, is not there." >&2; exit 1'
)
_MARK = ".hvdkit-stage"
"""A file in a copy, with the key of what was unpacked."""
_PIECE = 8 << 20
"""Bytes that go over the network at a time: enough for MPI to send a part while it receives the next."""
_DAY_S = 86400.0
"""Seconds after which what a killed job has left is removed: no environment takes longer to arrive."""
_UNUSED_S = 30 * _DAY_S
"""Seconds since a job asked for a copy after which it is removed: no job runs for longer."""
_NAME_THE_PREFIX = ("bin/*", "lib*/python*/site-packages/*.pth", "lib*/python*/site-packages/__editable__*.py")
"""Files that may name the environment's own place; scripts in ``bin`` do in their first line."""
_SHARED = (
    *("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "panfs", "afs", "dvs", "pvfs"),
    *("weka", "gfs2", "ocfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs"),
)
"""What the names of file systems begin with that hosts share."""
_MOUNTS = Path("/proc/self/mounts")


# The job


def wanted(directory: Path | None) -> Staged:
    """What is to be staged, and where.

    Args:
        directory: on the hosts' own disks, None for $TMPDIR, else /tmp.
    Raises:
        InvalidArgumentError: this Python is in no environment, or it cannot be read.
    """
    prefix = Path(sys.prefix)
    if not ((prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()):
        raise InvalidArgumentError(
            f"--stage copies a virtual or conda environment, and {sys.executable} is in neither; install hvdkit in "
            "one, or leave --stage out."
        )
    store = (directory or Path(tempfile.gettempdir())).absolute() / f"hvdkit-stage-{os.geteuid()}"
    try:
        return Staged(prefix, store, key(prefix, str(prefix))[0], editable(prefix))
    except OSError as error:
        raise InvalidArgumentError(
            f"--stage cannot read the environment {prefix}: {error.strerror} ({error.filename}); repair it, or leave "
            "--stage out."
        ) from error


def key(prefix: Path, *more: str) -> tuple[str, int]:
    """The key of an environment and of what else makes a difference, and the environment's bytes.

    Of names, modes, sizes, times and links, without what Python compiles as it imports.

    Raises:
        OSError: something cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    digest, total = hashlib.sha256(repr(more).encode()), 0
    for directory, names, files in os.walk(prefix, onerror=fail):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted({*names, *files} - {_MARK}):
            path = Path(directory) / name
            status = path.lstat()
            what: tuple[object, ...] = (str(path.relative_to(prefix)), status.st_mode)
            if stat.S_ISREG(status.st_mode):
                what += (status.st_size, int(status.st_mtime))
                total += status.st_size
            elif stat.S_ISLNK(status.st_mode):
                what += (str(path.readlink()),)
            digest.update(repr(what).encode())
    return digest.hexdigest()[:16], total


def editable(prefix: Path) -> tuple[str, ...]:
    """Names of the ``.pth`` files of packages that lie outside of an environment: an editable install writes one."""
    names = []
    for file in sorted(prefix.glob("lib/python*/site-packages/*.pth")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        outside = (line.startswith("/") and not Path(line).is_relative_to(prefix) for line in lines)
        if file.name.startswith("__editable__") or any(outside):
            names.append(file.name)
    return tuple(names)


def request(job: LaunchPlan, asked: Request, staged: Staged, *, mpi4py: bool) -> Request:
    """The short job that brings the environment to every host, by the launcher of the job that follows.

    Raises:
        InvalidArgumentError: that launcher does not use MPI, there is no mpi4py, or the hosts are not known.
    """
    if job.launcher_name == "horovodrun":
        raise InvalidArgumentError(
            "--stage sends the environment over MPI, and this job is started by 'horovodrun --gloo' without it; use "
            "--launcher mpirun, or leave --stage out."
        )
    if not mpi4py:
        raise InvalidArgumentError(
            "--stage sends the environment by mpi4py, which is not installed; pip install 'hvdkit[mpi]', or leave "
            "--stage out."
        )
    hosts = len(asked.hosts) or -(-asked.n // (asked.ppn or asked.n))
    if not asked.hosts and asked.ppn is None and job.elsewhere:
        raise InvalidArgumentError(
            f"--stage under {job.launcher_name} needs --ppn here, to know how many hosts take part."
        )
    worker = ("-m", "mpi4py", "-m", "hvdkit.jobs.launch.stage")
    words = (str(staged.prefix), str(staged.store), staged.key, str(hosts))
    return Request(
        hosts,
        ("/bin/sh", "-c", _START, sys.executable, "-P", *worker, *words),
        launcher=job.launcher_name,
        threads=1,
        ppn=1 if job.elsewhere else None,
        hosts=tuple(Host(host.name, 1) for host in asked.hosts),
        hosts_chosen=asked.hosts_chosen,
        variables=asked.variables,
        dry_run=asked.dry_run,
    )


def moved_command(command: Command, staged: Staged) -> Command:
    """The command with the environment's program in its new place.

    Raises:
        InvalidArgumentError: it is a Python of another environment.
    """
    program = command.words[0]
    if command.script is not None and not Path(program).is_relative_to(staged.prefix):
        raise InvalidArgumentError(
            f"--stage copies the environment that hvdkit is in, {staged.prefix}, and the command is run by {program}; "
            "use that environment's python, or install hvdkit beside the other one."
        )
    return replace(command, words=(moved(program, staged), *command.words[1:]))


def moved(word: str, staged: Staged | None) -> str:
    """A path within the environment in its new place; any other word as it is."""
    if staged is None or not Path(word).is_relative_to(staged.prefix):
        return word
    return str(staged.at / Path(word).relative_to(staged.prefix))


def moved_variables(variables: Mapping[str, str], staged: Staged) -> Setting:
    """The ranks' variables that name the environment.

    Args:
        variables: as they would be otherwise.
    """
    found = {}
    for name in _MOVED:
        before = [part for part in variables.get(name, "").split(os.pathsep) if part]
        after = [moved(part, staged) for part in before]
        if name == "PATH":  # also with what was there: a launcher finds its own programs by it where nothing is staged
            after = list(dict.fromkeys([str(staged.at / "bin"), *after, *before]))
        if after != before:
            found[name] = os.pathsep.join(after)
    return Setting("--stage: the ranks' Python and packages lie on their host's own disk", variables=found)


# The short job, on each host


def main(argv: list[str]) -> None:
    """Stage the environment on this host, together with the others.

    Args:
        argv: where the environment is, the directory to stage it in, its key, the number of hosts.
    """
    prefix, store, name, hosts = Path(argv[0]), Path(argv[1]), argv[2], int(argv[3])
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != hosts:
        sys.exit(
            f"hvdkit launch: {hosts} hosts were to meet over MPI for --stage, and host {platform.node()} sees "
            f"{world.size}: mpi4py uses another MPI than the launcher; 'hvdkit doctor' says which."
        )
    began, place = time.monotonic(), store / name

    def look() -> tuple[bool, int]:
        prepare(store)
        lacks = not has(place)
        if lacks:
            clean(store)
        found, size = key(prefix, str(prefix)) if world.rank == 0 else (name, 0)
        if found != name:
            raise DataError(f"{prefix} was changed since this job began; end what installs there, and start again.")
        return lacks, size

    lacks, size = together(world, look)
    lacking = sum(world.allgather(lacks))
    if lacking:
        group = world.Split(0 if lacks or world.rank == 0 else 1, world.rank)
        with contextlib.ExitStack() as stack:
            part = together(world, lambda: stack.enter_context(making(place, prefix)) if lacks else None)
            together(world, lambda: transfer(group, prefix if world.rank == 0 else None, part))
            together(world, stack.close)
    if world.rank == 0:
        had = f"; {hosts - lacking} had it" if 0 < lacking < hosts else ""
        taken = time.monotonic() - began
        done = f"staged {bytes_text(size)} to {lacking} of {hosts} hosts in {taken:.1f} s{had}"
        _say(f"{done if lacking else 'nothing to stage, every host has it'}: {place}")


def together(world: Any, step: Callable[[], Any]) -> Any:
    """Take a step on every host; where it fails on one, all end, and the first one says on which and why.

    Args:
        world: a communicator of mpi4py.
        step: raises ``HvdkitError`` or ``OSError``.
    Returns:
        What the step returned here.
    """
    result, wrong = None, ""
    try:
        result = step()
    except HvdkitError as error:
        wrong = str(error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        wrong = f"{error.strerror or error}{where}; give a larger local directory that can be written with --stage-dir."
    told = [text for text in world.allgather(wrong and f"host {platform.node()}: {wrong}") if text]
    if not told:
        return result
    if world.rank == 0:
        more = [f"{len(told) - 3} more hosts failed."] if len(told) > 3 else []
        for text in (*told[:3], *more):
            _say(text)
    sys.exit(1)


def _say(sentence: str) -> None:
    sys.stderr.write(f"hvdkit launch: {sentence}\n")


def transfer(group: Any, prefix: Path | None, part: Path | None) -> None:
    """Send an environment from the first rank of a group to all others, as it is packed, and unpack it as it comes.

    Args:
        group: a communicator of mpi4py.
        prefix: of the environment, on the first rank of those that take part.
        part: an empty directory to unpack in, None on a host that has the environment.
    Raises:
        DataError: it cannot be read or written here, or was changed meanwhile; or what it leads to is not on this host.
    """
    if prefix is None and part is None:
        return
    tar = ("tar", "--no-same-owner", "-f", "-", "-C")
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        packing = unpacking = None
        if prefix is not None:
            packing = subprocess.Popen([*tar, str(prefix), "-c", "."], stdout=subprocess.PIPE, stderr=said)
        if part is not None:
            unpacking = subprocess.Popen([*tar, str(part), "-x"], stdin=subprocess.PIPE, stderr=said)
        piece = b"begin"
        while piece:
            piece = group.bcast(None if packing is None else cast(IO[bytes], packing.stdout).read(_PIECE))
            if unpacking is not None:
                with contextlib.suppress(BrokenPipeError):  # it has said why; the others go on
                    cast(IO[bytes], unpacking.stdin).write(piece)
        for process in filter(None, (packing, unpacking)):
            process.communicate()
            if process.returncode != 0:
                said.seek(0)
                why = (said.read().splitlines() or [f"it ended with status {process.returncode}"])[0]
                raise DataError(f"the environment was not copied by tar: {why.removeprefix('tar: ')}")
    for link in () if part is None else (part / "bin").glob("python*"):
        if not link.exists():
            raise DataError(
                f"there is no {link.readlink()}, which bin/{link.name} of the environment leads to; install it here, "
                "or leave this host out."
            )


# The directory of a host that copies lie in


def prepare(store: Path) -> None:
    """Make the directory, unless it is there.

    Raises:
        LaunchError: it cannot be made, is not this user's alone, or on a file system that hosts share; no ``tar``.
    """
    where = "give a directory on the host's own disk with --stage-dir"
    if shutil.which("tar") is None:
        raise LaunchError("there is no 'tar' on PATH, which packs the environment; install it, or leave --stage out.")
    try:
        with contextlib.suppress(FileExistsError):
            store.mkdir(mode=0o700)
        status = store.lstat()
    except OSError as error:
        raise LaunchError(f"{store} cannot be made ({error.strerror}); {where}.") from error
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & 0o077 or not os.access(store, os.W_OK | os.X_OK):
        raise LaunchError(f"{store} is not a directory of this user alone that can be written; remove it, or {where}.")
    above = {str(store.resolve()), *map(str, store.resolve().parents)}
    mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    covering = [(len(words[1]), number, words[2]) for number, words in enumerate(mounts) if words[1] in above]
    kind = max(covering)[2] if covering else ""
    if kind.startswith(_SHARED):
        raise LaunchError(f"{store} is on {kind}, which hosts share; {where}.")


def has(place: Path) -> bool:
    """Whether a copy is there and whole: something that cleans ``/tmp`` may have taken a part."""
    mark = place / _MARK
    if not mark.exists() or mark.read_text(encoding="ascii", errors="replace") != key(place)[0]:
        return False
    os.utime(place)
    return True


def clean(store: Path) -> None:
    """Remove copies that no job asked for lately, and what is no copy that a job would find."""
    for place in store.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another job does the same
            status = place.lstat()
            found = (store / place.stem).resolve() == place.resolve()
            if time.time() - status.st_mtime > (_UNUSED_S if found else _DAY_S) and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(place)


@contextlib.contextmanager
def making(place: Path, prefix: Path) -> Iterator[Path]:
    """A directory to unpack in, to which a link at the place leads when the block ends without an error.

    The link may replace that to a copy which is not whole: processes that use it then find what they missed. Scripts
    and ``.pth`` files name the new place. Links lead where they led to, and within the copy instead of the environment.

    Args:
        place: where the copy is to be found.
        prefix: where the environment was made.
    Raises:
        OSError: it cannot be written.
    """
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}."))
    old = re.compile(re.escape(os.fsencode(prefix)) + rb"(?![\w.+-])")
    with contextlib.ExitStack() as failed:
        failed.callback(shutil.rmtree, part)
        yield part
        for directory, names, files in os.walk(part):
            here = prefix / Path(directory).relative_to(part)
            for link in filter(Path.is_symlink, (Path(directory, name) for name in (*names, *files))):
                target = Path(os.path.normpath(here / link.readlink()))
                inside = target.is_relative_to(prefix)
                if link.readlink().is_absolute() is inside:
                    link.unlink()
                    link.symlink_to(os.path.relpath(target, here) if inside else target)
        for file in (file for pattern in _NAME_THE_PREFIX for file in part.glob(pattern)):
            text = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
            if b"\0" not in text and old.search(text) is not None:
                file.write_bytes(old.sub(lambda _: os.fsencode(place), text))
        (part / _MARK).write_text(key(part)[0], encoding="ascii")
        failed.pop_all()
    link = part.with_name(f"{part.name}.link")
    link.symlink_to(part.name)
    link.replace(place)


if __name__ == "__main__":
    main(sys.argv[1:])
