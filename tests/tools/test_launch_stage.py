"""``hvdkit launch --stage`` without ranks: the plan, the way to other hosts, and the directory of a host."""

import errno
import os
import queue
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch_hosts import FACTS, QUIET, SHOWN_ALIVE, TWO_HOSTS, YIELD

from hvdkit import cli
from hvdkit.errors import DataError, InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import plan, stage
from hvdkit.jobs.launch.model import Command, Staged
from hvdkit.jobs.launch.options import Request

STAGED = Staged(Path("/venv"), Path("/local/hvdkit-stage-7"), "0123")
COMMAND = Command(("/venv/bin/python", "train.py"), script=1)
AT = "/local/hvdkit-stage-7/0123"


def line_of_worker(**options):
    request = Request(8, ("python", "train.py"), stage=STAGED, **options)
    asked = stage.request(plan.build(request, FACTS, COMMAND, QUIET), request, STAGED, mpi4py=True)
    text = plan.command_line(plan.build(asked, FACTS, Command(("SH", *asked.command[3:])), QUIET))
    return text.replace(sys.executable, "PYTHON")


WORKER = "SH PYTHON -P -m mpi4py -m hvdkit.jobs.launch.stage /venv /local/hvdkit-stage-7 0123"
ONE = "OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"launcher": "mpirun"}, f"env {ONE} /usr/bin/mpirun -n 1 --bind-to none {YIELD} {WORKER} 1"),
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
    shell = plan.build(request, facts, Command(("/bin/sh", "run.sh")), environ)
    assert shell.command == ("/bin/sh", "run.sh")
    quoted = plan.build(request, facts, Command(("/venv/bin/python", "train.py", ":"), script=1), environ)
    assert f"os.execv('{AT}/bin/python'" in quoted.command[-1]


def test_the_run_names_editable_installs_which_stay_where_they_are(prefix):
    packages = prefix / "lib/python3.11/site-packages"
    (packages / "__editable__.mine.pth").write_text("import __editable___mine_finder\n")
    (packages / "within.pth").write_text(f"{prefix}/src\nimport x\n")
    left = stage.editable(prefix)
    assert left == ("__editable__.mine.pth", "own.pth")
    request = Request(8, ("python", "train.py"), launcher="mpirun", stage=replace(STAGED, left=left))
    notes = plan.build(request, FACTS, COMMAND, QUIET).notes
    assert "not staged, since the files lie outside of /venv: __editable__.mine.pth, own.pth." in notes


def test_what_cannot_be_staged_is_one_sentence(capsys):
    request = Request(8, ("python", "train.py"), launcher="horovodrun", stage=STAGED)
    built = plan.build(request, FACTS, COMMAND, QUIET)
    with pytest.raises(InvalidArgumentError, match="without it; use --launcher mpirun"):
        stage.request(built, request, STAGED, mpi4py=True)
    with pytest.raises(InvalidArgumentError, match="mpi4py, which is not installed"):
        stage.request(replace(built, launcher_name="mpirun"), request, STAGED, mpi4py=False)
    with pytest.raises(InvalidArgumentError, match="needs --ppn here"):
        stage.request(replace(built, launcher_name="srun", elsewhere=True), request, STAGED, mpi4py=True)
    with pytest.raises(InvalidArgumentError, match="and the command is run by /other/python"):
        plan.build(request, FACTS, Command(("/other/python", "train.py"), script=1), QUIET)
    assert cli.run(["launch", "-n", "2", "--stage-dir", "/tmp", "true"]) == 2
    assert "--stage-dir needs --stage" in capsys.readouterr().err


def test_a_host_that_cannot_run_the_environments_python_is_named():
    done = subprocess.run(["/bin/sh", "-c", stage._START, "/no/bin/python", "-V"], capture_output=True, text=True)
    said = f"hvdkit launch: host {os.uname().nodename} cannot run /no/bin/python: the environment, or the base interp"
    assert done.returncode == 1 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
    done = subprocess.run(["/bin/sh", "-c", stage._START, sys.executable, "-c", "print('a b')"], capture_output=True)
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
        stage.together(World(), step)
    first, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and last == "hvdkit launch: host h3: it is full."
    assert first.startswith(f"hvdkit launch: host {os.uname().nodename}: No space left on device (/local/x); give a")


@pytest.fixture
def prefix(tmp_path):
    """A venv in small, with links within it and out of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "python3").write_bytes(b"\0base")
    root = tmp_path / "venv"
    packages = root / "lib" / "python3.11" / "site-packages"
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "__pycache__" / "m.pyc").write_bytes(b"m")
    (packages / "own.pth").write_text(f"{root}/src\n{root}2/src\n")
    (root / "lib64").symlink_to("lib")
    (root / "bin").mkdir()
    (root / "bin" / "python3").symlink_to(outside / "python3")
    (root / "bin" / "python").symlink_to("python3")
    (packages / "whole").symlink_to(root / "large")
    (packages / "away").symlink_to("../../../../outside")
    (root / "bin" / "tool").write_text(f"#!{root}/bin/python\n")
    (root / "bin" / "tool").chmod(0o775)
    (root / "large").write_bytes(os.urandom(2 * stage._PIECE + 5))
    return root


class Group:
    """Ranks of one process, each on a thread: what mpi4py's communicator does for ``transfer``."""

    def __init__(self, rank, queues):
        self.rank, self._queues = rank, queues

    def bcast(self, piece):
        if self.rank == 0:
            for waiting in self._queues[1:]:
                waiting.put(piece)
            return piece
        return self._queues[self.rank].get(timeout=60)


def transferred(prefix, parts):
    """What ``transfer`` raises on each host; ``parts``: the directory of each, None for a host that has it."""
    queues = [queue.Queue() for _ in parts]

    def host(rank):
        try:
            return stage.transfer(Group(rank, queues), prefix if rank == 0 else None, parts[rank])
        except DataError as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(host, range(len(parts))))


@pytest.mark.parametrize("first_has_it", [True, False])
def test_an_environment_arrives_as_it_was_and_names_its_new_place(prefix, tmp_path, first_has_it):
    places = [tmp_path / f"host{rank}" / "key" for rank in range(3)]
    for place in places:
        place.parent.mkdir()
    with stage.making(places[0], prefix) as first, stage.making(places[1], prefix) as part:
        assert transferred(prefix, [None if first_has_it else first, part, None]) == [None] * 3
    for root in places[first_has_it:2]:
        packages = root / "lib" / "python3.11" / "site-packages"
        assert (root / "large").read_bytes() == (prefix / "large").read_bytes()
        assert (root / "lib64").readlink() == Path("lib") and (root / "bin/python").readlink() == Path("python3")
        assert (root / "bin/python3").readlink() == tmp_path / "outside/python3"
        assert (packages / "whole").samefile(root / "large")
        assert (packages / "away").readlink() == tmp_path / "outside"
        assert stat.S_IMODE((root / "bin/tool").stat().st_mode) == 0o775
        source, target = ((at / "large").stat().st_mtime for at in (prefix, root))
        assert int(source) == int(target)  # Python compares whole seconds with what it compiled
        assert (root / "bin/tool").read_text() == f"#!{root}/bin/python\n"
        assert (packages / "own.pth").read_text() == f"{root}/src\n{prefix}2/src\n"
        assert stage.has(root)


def test_a_host_that_cannot_write_or_lacks_the_interpreter_says_so_and_the_others_go_on(prefix, tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "large").mkdir()  # where a file is to be
    (tmp_path / "bad" / "large" / "full").touch()
    first, good, bad = transferred(prefix, [None, tmp_path / "good", tmp_path / "bad"])
    assert first is good is None
    assert isinstance(bad, DataError) and "was not copied by tar: ./large" in str(bad)
    (tmp_path / "outside/python3").unlink()
    (tmp_path / "again").mkdir()
    _, lacking = transferred(prefix, [None, tmp_path / "again"])
    assert "there is no " in str(lacking) and "of the environment leads to; install it here" in str(lacking)


def test_all_are_told_when_the_first_host_cannot_read(tmp_path):
    (tmp_path / "part").mkdir()
    first, other = transferred(tmp_path / "gone", [None, tmp_path / "part"])
    assert "No such file" in str(first) and isinstance(other, DataError)


def test_the_key_changes_with_the_environment_and_not_with_what_python_compiles(prefix):
    before, size = stage.key(prefix, "/a")
    assert size > 2 * stage._PIECE
    (prefix / "lib/python3.11/site-packages/__pycache__/m.pyc").write_bytes(b"again")
    assert stage.key(prefix, "/a")[0] == before
    assert stage.key(prefix, "/b")[0] != before
    os.utime(prefix / "bin/tool", (1, 1))
    changed = stage.key(prefix, "/a")[0]
    assert changed != before
    (prefix / "lib64").unlink()
    (prefix / "lib64").symlink_to("bin")
    assert stage.key(prefix, "/a")[0] != changed


@pytest.fixture
def own(tmp_path):
    directory = tmp_path / "hvdkit-stage-1"
    stage.prepare(directory)
    return directory


def staged(own, prefix, name="key"):
    with stage.making(own / name, prefix) as part:
        (part / "bin").mkdir()
        (part / "bin" / "tool").write_text("tool")
    return own / name


def aged(place, seconds):
    os.utime(place, (time.time() - seconds,) * 2)


def test_a_directory_that_is_not_ones_own_is_refused(own, tmp_path, monkeypatch):
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        stage.prepare(own)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        stage.prepare(tmp_path / "link")
    with pytest.raises(LaunchError, match=r"cannot be made \(No such file"):
        stage.prepare(tmp_path / "none" / "store")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(stage, "_MOUNTS", mounts)
    own.chmod(0o700)
    with pytest.raises(LaunchError, match="is on nfs4, which hosts share"):
        stage.prepare(own)


def test_a_copy_counts_only_while_it_is_whole_and_is_then_replaced(own, tmp_path):
    place = staged(own, tmp_path)
    assert stage.has(place) and not stage.has(own / "other")
    tool = place / "bin" / "tool"
    tool.unlink()
    assert not stage.has(place)
    staged(own, tmp_path)
    assert stage.has(place) and tool.exists(), "also for a process that has this path"
    before = set(own.iterdir())
    with pytest.raises(SystemExit), stage.making(place, tmp_path) as part:
        assert part.parent == own
        sys.exit(1)
    assert set(own.iterdir()) == before


def test_two_jobs_at_once_leave_a_whole_copy(own, tmp_path):
    with stage.making(own / "key", tmp_path) as part:
        (part / "late").touch()
        assert stage.has(staged(own, tmp_path))
    assert stage.has(own / "key") and (own / "key/late").exists()


def test_what_no_job_asked_for_lately_or_finds_is_removed(own, tmp_path):
    places = {name: staged(own, tmp_path, name) for name in ("old", "recent", "twice")}
    replaced = places["twice"].resolve()
    staged(own, tmp_path, "twice")
    for place, days in ((places["old"], 31), (places["recent"], 29), (replaced, 2)):
        aged(place, days * 86_400)
    for name, days in (("killed.a", 2), ("begun.a", 0.5)):
        (own / name / "bin").mkdir(parents=True)
        aged(own / name, days * 86_400)
    (own / "link").symlink_to(tmp_path)
    stage.clean(own)
    assert not places["old"].exists() and stage.has(places["recent"]) and stage.has(places["twice"])
    assert not replaced.exists() and not (own / "killed.a").exists()
    assert (own / "begun.a").exists() and (own / "link").exists()
