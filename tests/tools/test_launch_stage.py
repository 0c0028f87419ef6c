"""``hvdkit launch --stage`` without ranks: the plan, the archive, and the directory of a host."""

import errno
import fcntl
import io
import os
import queue
import stat
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch_hosts import FACTS, QUIET, SHOWN_ALIVE, TWO_HOSTS, YIELD

from hvdkit import cli
from hvdkit.errors import DataError, InvalidArgumentError, LaunchError
from hvdkit.run.launch import plan
from hvdkit.run.launch.command import Command
from hvdkit.run.launch.model import Staged
from hvdkit.run.launch.options import Request
from hvdkit.run.launch.stage import copy, job, worker

STAGED = Staged(Path("/venv"), Path("/local/hvdkit-stage-7"), "0123", ("lib/linked",))
COMMAND = Command(("/venv/bin/python", "train.py"), script=1)
AT = "/local/hvdkit-stage-7/0123"


def line_of_worker(**options):
    request = Request(8, ("python", "train.py"), stage=STAGED, **options)
    asked = job.request(plan.build(request, FACTS, COMMAND, QUIET), request, STAGED, mpi4py=True)
    text = plan.command_line(plan.build(asked, FACTS, Command(("SH", *asked.command[3:])), QUIET))
    return text.replace(sys.executable, "PYTHON")


WORKER = "SH PYTHON -P -m mpi4py -m hvdkit.run.launch.stage.worker /venv /local/hvdkit-stage-7 0123"
ONE = "OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"launcher": "mpirun"}, f"env {ONE} /usr/bin/mpirun -np 1 --bind-to none {YIELD} {WORKER} 1"),
        (
            {"launcher": "mpirun", **TWO_HOSTS},
            f"{SHOWN_ALIVE} {ONE} /usr/bin/mpirun -n 2 --host h1:1,h2:1 --map-by ppr:1:node --bind-to none {YIELD} "
            "-x OMP_NUM_THREADS -x GLIBC_TUNABLES -x PATH -x PYTHONHASHSEED -x PYTHONUNBUFFERED -x HVDKIT_SECRET "
            f"{WORKER} 2",
        ),
        (
            {"launcher": "srun", "ppn": 2, "depth": 4, "gpus_per_node": 2},
            f"env {ONE} /site/bin/srun --ntasks=4 --ntasks-per-node=1 --nodes=4 --cpu-bind=none --kill-on-bad-exit=1 "
            f"--quit-on-interrupt --export=ALL {WORKER} 4",
        ),
        (
            {"launcher": "mpiexec", "ppn": 4, **TWO_HOSTS},
            f"env {ONE} /site/bin/mpiexec -n 2 --ppn 1 --cpu-bind none --hosts h1,h2 --env {ONE} {WORKER} 2",
        ),
    ],
)
def test_one_worker_on_each_host_by_the_jobs_own_launcher(options, expected):
    assert line_of_worker(**options) == expected


def test_the_ranks_get_the_staged_python_and_its_variables():
    request = Request(
        8, ("python", "train.py"), launcher="mpirun", stage=STAGED, variables={"PYTHONPATH": "/venv/x:/a"}
    )
    environ = {**QUIET, "PATH": "/venv/bin:/usr/bin", "VIRTUAL_ENV": "/venv"}
    facts = replace(FACTS, path=environ["PATH"])
    built = plan.build(request, facts, COMMAND, environ)
    assert built.command == (f"{AT}/bin/python", "train.py")
    assert built.added == {
        "PATH": f"{AT}/bin:/usr/bin:/venv/bin",
        "PYTHONPATH": f"{AT}/x:/a",
        "VIRTUAL_ENV": AT,
    }
    assert any("lib/linked" in note for note in built.notes)
    shell = plan.build(request, facts, Command(("/bin/sh", "run.sh")), environ)
    assert shell.command == ("/bin/sh", "run.sh")
    quoted = plan.build(request, facts, Command(("/venv/bin/python", "train.py", ":"), script=1), environ)
    assert f"os.execv('{AT}/bin/python'" in quoted.command[-1]


def test_what_cannot_be_staged_is_one_sentence(capsys):
    request = Request(8, ("python", "train.py"), launcher="horovodrun", stage=STAGED)
    built = plan.build(request, FACTS, COMMAND, QUIET)
    with pytest.raises(InvalidArgumentError, match="without it; use --launcher mpirun"):
        job.request(built, request, STAGED, mpi4py=True)
    with pytest.raises(InvalidArgumentError, match="mpi4py, which is not installed"):
        job.request(replace(built, launcher_name="mpirun"), request, STAGED, mpi4py=False)
    with pytest.raises(InvalidArgumentError, match="needs --ppn here"):
        job.request(replace(built, launcher_name="srun", direct=True), request, STAGED, mpi4py=True)
    with pytest.raises(InvalidArgumentError, match="and the command is run by /other/python"):
        plan.build(request, FACTS, Command(("/other/python", "train.py"), script=1), QUIET)
    assert cli.run(["launch", "-n", "2", "--stage-dir", "/tmp", "true"]) == 2
    assert "--stage-dir needs --stage" in capsys.readouterr().err


def test_a_host_that_cannot_run_the_environments_python_is_named():
    done = subprocess.run(["/bin/sh", "-c", job._START, "/no/bin/python", "-V"], capture_output=True, text=True)
    said = f"hvdkit launch: host {os.uname().nodename} cannot run /no/bin/python: the environment, or the base interp"
    assert done.returncode == 1 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
    done = subprocess.run(["/bin/sh", "-c", job._START, sys.executable, "-c", "print('a b')"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"a b\n")


class World:
    """Three hosts of which this one is the first, and the last has failed, too."""

    rank = 0

    def allgather(self, text):
        return [text, "", "host h3: it is full."]


def test_a_step_that_fails_somewhere_ends_the_job_everywhere_with_the_hosts_named(capsys):
    def step():
        raise OSError(errno.ENOSPC, "No space left on device", "/local/x")

    with pytest.raises(SystemExit) as ended:
        worker.together(World(), step)
    first, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and last == "hvdkit launch: host h3: it is full."
    assert first.startswith(f"hvdkit launch: host {os.uname().nodename}: No space left on device (/local/x); give a")


@pytest.fixture
def prefix(tmp_path):
    """A venv in small, with links within it and out of it."""
    outside = tmp_path / "outside"
    (outside / "source").mkdir(parents=True)
    (outside / "python3").write_bytes(b"\0base")
    (outside / "cached.py").write_text("cached")
    root = tmp_path / "venv"
    packages = root / "lib" / "python3.11" / "site-packages"
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "__pycache__" / "m.pyc").write_bytes(b"m")
    (packages / "linked.py").symlink_to(outside / "cached.py")
    (packages / "source").symlink_to(outside / "source")
    (packages / "gone").symlink_to(outside / "gone")
    (packages / "own.pth").write_text(f"{root}/src\n{root}2/src\n")
    (root / "lib64").symlink_to("lib")
    (root / "bin").mkdir()
    (root / "bin" / "python3").symlink_to(outside / "python3")
    (root / "bin" / "python").symlink_to(root / "bin" / "python3")
    (root / "bin" / "tool").write_text(f"#!{root}/bin/python\n")
    (root / "bin" / "tool").chmod(0o4775)
    (root / "large").write_bytes(os.urandom(2 * copy.PIECE + 5))
    os.mkfifo(root / "pipe")
    return root


def packed(prefix, found):
    stream = io.BytesIO()
    copy.pack(prefix, found, stream)
    return io.BytesIO(stream.getvalue())


def test_an_environment_arrives_as_it_was(prefix, tmp_path):
    found = copy.entries(prefix)
    root, final = tmp_path / "copy", tmp_path / "final"
    root.mkdir()
    copy.unpack(packed(prefix, found), root)
    copy.link_out([entry for entry in found if entry.leaves], root)
    packages = root / "lib" / "python3.11" / "site-packages"
    assert (root / "large").read_bytes() == (prefix / "large").read_bytes()
    assert (root / "lib64").readlink() == Path("lib") and (root / "bin/python").readlink() == Path("python3")
    assert (root / "bin/python3").readlink() == tmp_path / "outside/python3"
    assert (packages / "source").readlink() == tmp_path / "outside/source"
    assert (packages / "linked.py").read_text() == "cached" and not (packages / "linked.py").is_symlink()
    assert not (root / "pipe").exists() and not (packages / "gone").is_symlink()
    assert stat.S_IMODE((root / "bin/tool").stat().st_mode) == 0o755
    source, target = ((at / "large").stat().st_mtime for at in (prefix, root))
    assert int(source) == int(target)  # Python compares whole seconds with what it compiled
    copy.move(root, prefix, final)
    assert (root / "bin/tool").read_text() == f"#!{final}/bin/python\n"
    assert (packages / "own.pth").read_text() == f"{final}/src\n{prefix}2/src\n"


def test_a_host_without_what_a_link_leads_to_says_so(tmp_path):
    with pytest.raises(DataError, match="there is no /nowhere/python3, which bin/python3 of the environment leads to"):
        copy.link_out([copy.Entry("bin/python3", 0, target="/nowhere/python3")], tmp_path)


def test_an_environment_that_changes_while_it_is_packed_is_refused(prefix):
    found = copy.entries(prefix)
    (prefix / "large").write_bytes(b"now small")
    with pytest.raises(DataError, match="was changed while it was staged"):
        packed(prefix, found)


def test_the_key_changes_with_the_environment_and_not_with_what_python_compiles(prefix):
    before = copy.key(copy.entries(prefix), "/a")
    (prefix / "lib/python3.11/site-packages/__pycache__/m.pyc").write_bytes(b"again")
    assert copy.key(copy.entries(prefix), "/a") == before
    assert copy.key(copy.entries(prefix), "/b") != before
    os.utime(prefix / "bin/tool", (1, 1))
    assert copy.key(copy.entries(prefix), "/a") != before


def member(name, kind=tarfile.REGTYPE, target=""):
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


BAD = {
    "above": [member("../up")],
    "above in the middle": [member("a", tarfile.DIRTYPE), member("a/../../up")],
    "link above": [member("a", tarfile.SYMTYPE, "../up")],
    "absolute link": [member("a", tarfile.SYMTYPE, "/etc")],
    "device": [member("a", tarfile.CHRTYPE)],
    "pipe": [member("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_is_refused(tmp_path, case):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as written:
        for bad in BAD[case]:
            written.addfile(bad)
    root = tmp_path / "in" / "it"
    root.mkdir(parents=True)
    with pytest.raises(DataError, match="refused"):
        copy.unpack(io.BytesIO(file.getvalue()), root)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["it"]


@pytest.mark.parametrize("bad", [b"no archive" * 100, None], ids=["noise", "cut off"])
def test_a_damaged_archive_is_refused(prefix, tmp_path, bad):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as written:
        written.add(prefix / "large", "large")
    data = bad or file.getvalue()[: copy.PIECE]
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="the archive is damaged"):
        copy.unpack(io.BytesIO(data), tmp_path / "in")


class Group:
    """Ranks of one process, each on a thread: what mpi4py's communicator does for ``spread``.

    ``damage`` changes the second message to the last rank.
    """

    def __init__(self, rank, queues, damage):
        self.rank, self.size, self._queues, self._damage = rank, len(queues), queues, damage
        self._sent = 0

    def Recv(self, buffer, source):  # noqa: N802 - mpi4py's
        sender, message = self._queues[self.rank].get(timeout=60)
        assert sender == source
        buffer[: len(message)] = message

    def Isend(self, message, dest):  # noqa: N802
        self._sent += 1
        if self._damage and dest == self.size - 1 and self._sent == 2:
            message = message[:-1] + bytes([message[-1] ^ 1])
        self._queues[dest].put((self.rank, message))
        return self

    def Wait(self):  # noqa: N802
        pass


def spread(ranks, pieces, damage=False):
    """What each rank has got and raised."""
    queues = [queue.Queue() for _ in range(ranks)]

    def one(rank):
        kept = []
        try:
            whole = worker.spread(Group(rank, queues, damage), None if rank else pieces, kept.append)
        except (DataError, OSError) as error:
            return error
        return b"".join(kept) if whole else None

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_every_host_gets_all_pieces():
    pieces = [os.urandom(copy.PIECE) for _ in range(12)] + [b"the end"]
    assert spread(6, iter(pieces)) == [b"".join(pieces)] * 6


def test_what_arrives_otherwise_than_it_was_sent_is_refused():
    *others, last = spread(3, iter([b"a" * copy.PIECE] * 3), damage=True)
    assert isinstance(last, DataError) and "not the one that was sent" in str(last)
    assert not any(isinstance(other, Exception) for other in others)


def test_all_are_told_when_the_first_host_cannot_read():
    wrong = OSError(errno.EIO, "Input/output error")

    def pieces():
        yield b"a" * copy.PIECE
        raise wrong

    assert spread(3, pieces()) == [wrong, None, None]


def test_pieces_come_while_the_next_ones_are_packed_and_so_does_the_error(prefix):
    found = copy.entries(prefix)
    assert b"".join(worker.packed(prefix, found)) == packed(prefix, found).getvalue()
    (prefix / "large").write_bytes(b"now small")
    with pytest.raises(DataError, match="was changed while it was staged"):
        list(worker.packed(prefix, found))


@pytest.fixture
def own(tmp_path):
    directory = tmp_path / "hvdkit-stage-1"
    copy.prepare(directory)
    return directory


def stage(own, prefix, name="key"):
    with copy.making(own / name, prefix) as part:
        (part / "bin").mkdir()
        (part / "bin" / "tool").write_text("tool")
    return own / name


def test_a_directory_that_is_not_ones_own_is_refused(own, tmp_path, monkeypatch):
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        copy.prepare(own)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        copy.prepare(tmp_path / "link")
    with pytest.raises(LaunchError, match=r"cannot be made \(No such file"):
        copy.prepare(tmp_path / "none" / "store")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(copy, "_MOUNTS", mounts)
    own.chmod(0o700)
    with pytest.raises(LaunchError, match="is on nfs4, which hosts share"):
        copy.prepare(own)


def test_a_copy_counts_only_while_it_is_whole(own, tmp_path):
    place = stage(own, tmp_path)
    assert copy.has(place) and not copy.has(own / "other")
    (place / "bin" / "tool").unlink()
    assert not copy.has(place) and not list(own.iterdir())
    with pytest.raises(SystemExit), copy.making(place, tmp_path) as part:
        assert part.parent == own
        sys.exit(1)
    assert not list(own.iterdir())


def test_the_copy_of_the_job_that_was_sooner_stays(own, tmp_path):
    with copy.making(own / "key", tmp_path) as part:
        (part / "late").touch()
        stage(own, tmp_path)
    assert copy.has(own / "key") and (own / "key/bin/tool").exists() and len(list(own.iterdir())) == 1


def test_only_what_nobody_uses_is_removed(own, tmp_path, monkeypatch):
    processes = tmp_path / "proc"
    for name, text in {"self": "", "12": f"A=b\0PATH=/x:{own}/used/bin:/y\0"}.items():
        (processes / name).mkdir(parents=True)
        (processes / name / "environ").write_text(text)
    monkeypatch.setattr(copy, "_PROCESSES", processes)
    for name in ("used", "unused", "recent", "made", "left"):
        stage(own, tmp_path, name)
        if name != "recent":
            os.utime(own / name, (time.time() - 3600,) * 2)
    descriptor = os.open(own / "made", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    copy.clean(own)
    os.close(descriptor)
    assert sorted(path.name for path in own.iterdir()) == ["made", "recent", "used"]
    (own / "used/bin/tool").unlink()
    with pytest.raises(LaunchError, match="a process uses it"):
        copy.has(own / "used")
