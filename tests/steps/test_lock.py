"""Two jobs, one directory of checkpoints: real processes that save at the same time."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from hvdkit import CheckpointError, InvalidArgumentError
from hvdkit.steps import lock
from hvdkit.steps.checkpoint import CheckpointDirectory
from hvdkit.steps.manifest import verify

JOB = """
import errno, fcntl, itertools, os, sys
from hvdkit import CheckpointError
from hvdkit.steps.checkpoint import CheckpointDirectory
from hvdkit.steps.manifest import verify

directory, locks, saves, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
lockf = fcntl.lockf
def answer(*arguments):
    if locks == "none":
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    try:
        return None if locks == "of this host alone" else lockf(*arguments)
    except OSError:
        print("busy", flush=True)
        raise
fcntl.lockf = answer

def write(path):
    for number in range(4):
        (path / str(number)).write_bytes(os.urandom(5000))

def store():
    return CheckpointDirectory(directory, keep=2 if locks == "real" else 100, wait=wait)

mine = store()
print("started", flush=True)
sys.stdin.readline()
for step in range(saves):
    try:
        saved = mine.save(step, write)
        verify(saved.path)
        print("saved", saved.path.name, flush=True)
    except CheckpointError as error:
        print("error", error, flush=True)
        if locks == "real":
            break
        mine = store()  # insists
sys.stdin.readline()
"""


class Job:
    """A process that saves when it is told to, and then waits to be told to end."""

    def __init__(self, directory, locks="real", saves=1, wait=0.0, **variables):
        command = [sys.executable, "-W", "ignore", "-c", JOB, str(directory), locks, str(saves), str(wait)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **variables}, cwd=Path.cwd()
        )
        assert self.line() == "started"

    def line(self):
        return self.process.stdout.readline().strip()

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """The rest of what it says."""
        self.go()
        self.process.stdin.close()
        said = self.process.stdout.read().splitlines()
        assert self.process.wait() == 0
        return said


@pytest.fixture
def job():
    jobs = []

    def start(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield start
    for one in jobs:
        one.process.kill()
        one.process.wait()
        one.process.stdin.close()
        one.process.stdout.close()


def test_of_two_jobs_that_save_at_the_same_time_one_has_one_clear_error_and_nothing_is_lost(job, tmp_path):
    jobs = [job(tmp_path, saves=60, SLURM_JOB_ID=number) for number in ("4711", "4712")]
    for one in jobs:
        one.go()
    first = [one.line() for one in jobs]
    said = [one.end() for one in jobs]
    loser = first.index("busy")
    winner = 1 - loser
    (told,) = said[loser]
    assert told.startswith(
        f"error another job writes checkpoints into {tmp_path}: process {jobs[winner].process.pid} on "
        f"{os.uname().nodename}, Slurm job {4711 + winner}; end it, wait"
    )
    assert len(said[winner]) == 59 and all(line.startswith("saved") for line in [first[winner], *said[winner]])


def test_one_that_has_just_taken_the_directory_has_time_to_say_who_it_is(job, tmp_path):
    holder = job(tmp_path)
    holder.go()
    assert holder.line().startswith("saved")
    signed = (tmp_path / lock.WRITER).read_text()
    (tmp_path / lock.WRITER).unlink()
    signing = threading.Timer(0.2, lambda: (tmp_path / lock.WRITER).write_text(signed))
    signing.start()
    with pytest.raises(CheckpointError, match=f"process {holder.process.pid} on "):
        CheckpointDirectory(tmp_path, wait=0).save(2, bytes)
    signing.join()


@pytest.mark.parametrize("locks", ["none", "of this host alone"])
def test_without_locks_what_is_reported_saved_is_there(job, tmp_path, locks):
    """Both insist: each takes the directory from the other again and again."""
    jobs = [job(tmp_path, locks, saves=25) for _ in range(2)]
    for one in jobs:
        one.go()
    said = [line.split(" ", 1) for one in jobs for line in one.end()]
    errors, saved = ([what for kind, what in said if kind == wanted] for wanted in ("error", "saved"))
    assert len(errors) > 1 and [what for what in errors if not what.startswith("another job writes checkpoints")] == []
    assert len(errors) + len(set(saved)) == len(said) == 50
    for name in saved:
        verify(tmp_path / name)


def test_the_death_of_the_holder_frees_it_at_once_whatever_it_has_forked(job, tmp_path):
    holder = job(tmp_path)
    holder.go()
    assert holder.line().startswith("saved")
    store = CheckpointDirectory(tmp_path, wait=0)
    with pytest.raises(CheckpointError, match=f"process {holder.process.pid} on "):
        store.save(2, bytes)
    assert store.latest().step == 0, "to read needs no lock"
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    assert store.save(3, bytes).step == 3


def test_a_job_waits_for_its_predecessor(job, tmp_path):
    first, second = job(tmp_path, saves=2), job(tmp_path, saves=2, wait=100)
    first.go()
    assert [first.line(), first.line()][1].startswith("saved")
    second.go()
    assert second.line() == "busy"
    assert first.end() == []
    assert [line for line in second.end() if line != "busy"] == ["saved step-0000000000-r1", "saved step-0000000001-r1"]


def test_a_forked_process_holds_nothing_and_releases_nothing(job, tmp_path):
    store = CheckpointDirectory(tmp_path, wait=0)
    store.claim()
    worker = os.fork()
    if worker == 0:  # a loader's worker that outlives, and one that saves
        told = b""
        try:
            store.save(1, bytes)
        except CheckpointError as error:
            told = str(error).encode()
        (tmp_path / "told").write_bytes(told)
        os.closerange(3, 256)
        os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0
    assert f"process {os.getpid()} on " in (tmp_path / "told").read_text()
    other = job(tmp_path)
    other.go()
    assert other.line() == "busy" and other.line().startswith("error")

    sleeper = os.fork()
    if sleeper == 0:
        signal.pause()
    try:
        del store
        last = job(tmp_path)
        last.go()
        assert last.line().startswith("saved"), "the one that was forked still has the descriptor"
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


def test_what_a_process_has_forked_can_take_it_when_that_one_has_ended(tmp_path):
    heard, said = os.pipe()
    parent = os.fork()
    if parent == 0:
        store = CheckpointDirectory(tmp_path, wait=100)
        store.claim()
        if os.fork() == 0:
            with contextlib.suppress(CheckpointError):
                store.save(1, bytes)
                os.write(said, b"saved")
        else:
            time.sleep(0.2)  # so that it finds the lock taken; it may also come later
        os._exit(0)
    os.close(said)
    with os.fdopen(heard, "rb") as file:
        assert file.read() == b"saved"
    assert os.waitpid(parent, 0)[1] == 0


def test_all_objects_of_a_process_share_it_until_the_last_one_goes(job, tmp_path):
    first, second = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path / "." / "x" / "..")
    (tmp_path / "x").mkdir()
    assert [store.save(step, bytes).step for step, store in enumerate((first, second, first))] == [0, 1, 2]
    del second
    other = job(tmp_path)
    other.go()
    assert other.line() == "busy" and other.line().startswith("error")
    del first
    last = job(tmp_path)
    last.go()
    assert last.line().startswith("saved")


def test_no_locks_is_said_once_and_the_first_job_stops_before_it_removes_anything(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    store = CheckpointDirectory(tmp_path, keep=1)
    with pytest.warns(UserWarning, match=r"has no locks \(Function not implemented\)") as said:
        store.save(1, bytes)
        store.save(2, bytes)
    assert len(said) == 1
    if (worker := os.fork()) == 0:
        os._exit(CheckpointDirectory(tmp_path).save(3, bytes).step)
    assert os.waitpid(worker, 0)[1] == 3 << 8
    with pytest.raises(CheckpointError, match=f"process {worker} on"):
        store.save(4, bytes)
    store._lock._sign()
    live, old, mine = (tmp_path / f".writing-{name}" for name in ("0123-x", "4567-y", f"{store._lock.token}-z"))
    for path in (live, old, mine):
        path.mkdir()
    os.utime(old, (time.time() - 2e5,) * 2)
    store.save(4, bytes)
    assert live.exists() and not old.exists() and not mine.exists()

    known = json.loads((tmp_path / lock.WRITER).read_text())
    taken = {**known, "token": "another", "process": 12, "host": "nid\n1" + "x" * 500, "job": "PBS job 7.polaris"}

    def write(_):
        (tmp_path / lock.WRITER).write_text(json.dumps(taken))

    def fail(_):
        write(_)
        raise FileNotFoundError

    for attempt in (write, fail):
        store._lock._sign()
        with pytest.raises(CheckpointError, match=r"process 12 on nid1x{76}, PBS job 7\.polaris; end it"):
            store.save(5, attempt)
    assert (tmp_path / "step-0000000004").exists(), "not pruned"
    for refused in (store.claim, lambda: store.save(6, bytes)):
        with pytest.raises(CheckpointError, match="process 12 on"):
            refused()
    assert not (tmp_path / "step-0000000006").exists()


def test_a_name_that_another_job_takes_meanwhile_is_not_used(monkeypatch, tmp_path):
    store = CheckpointDirectory(tmp_path)
    store.save(1, bytes)
    (tmp_path / "step-0000000001" / "x").touch()
    late = [tmp_path / "step-0000000001"]
    free_name = store._free_name
    monkeypatch.setattr(store, "_free_name", lambda step: late.pop() if late else free_name(step))
    assert store.save(1, bytes).path.name == "step-0000000001-r1"


def test_what_a_dead_job_was_writing_is_removed(job, tmp_path):
    live = tmp_path / ".writing-0123-x"
    live.mkdir()
    CheckpointDirectory(tmp_path).save(1, bytes)
    assert not live.exists()


def test_the_files_of_the_lock_may_be_anything(tmp_path):
    for made in (lambda file: file.write_text("[" * 4000), lambda file: file.write_bytes(b"\xff"), os.mkfifo):
        store = CheckpointDirectory(tmp_path)
        store.save(1, bytes)
        (tmp_path / lock.WRITER).unlink()
        made(tmp_path / lock.WRITER)
        assert store.save(2, bytes).step == 2
        assert json.loads((tmp_path / lock.WRITER).read_text())["process"] == os.getpid()
    for name in (lock.LOCK, lock.WRITER):  # by hand
        (tmp_path / name).unlink()
        assert store.save(3, bytes).step == 3
    (tmp_path / lock.LOCK).unlink()
    (tmp_path / lock.LOCK).symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="could not write the checkpoint"):
        store.save(4, bytes)


def test_who_may_write_the_directory_may_lock_it(tmp_path):
    for mode in (0o775, 0o700):
        run = tmp_path / f"{mode}"
        run.mkdir()
        run.chmod(mode)
        CheckpointDirectory(run).claim()
        assert (run / lock.LOCK).stat().st_mode & 0o777 == mode & 0o666


def test_where_nothing_can_be_written_a_claim_is_none(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    CheckpointDirectory(tmp_path / "file" / "run").claim()
    with monkeypatch.context() as patched, contextlib.suppress(FileNotFoundError):
        patched.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
        CheckpointDirectory(tmp_path).claim()


@pytest.mark.parametrize("wait", [-1, float("nan"), "2", True, None])
def test_a_bad_wait_is_refused(tmp_path, wait):
    with pytest.raises(InvalidArgumentError, match="wait must be a number of seconds >= 0, got"):
        CheckpointDirectory(tmp_path, wait=wait)


def test_a_long_wait_is_told(monkeypatch, job, tmp_path):
    holder = job(tmp_path)
    holder.go()
    assert holder.line().startswith("saved")
    monkeypatch.setattr(lock, "PATIENCE_S", 0)
    with warnings.catch_warnings(record=True) as said, pytest.raises(CheckpointError, match="another job"):
        warnings.simplefilter("always")
        CheckpointDirectory(tmp_path, wait=0.3).claim()
    assert [str(one.message).startswith("waiting up to 0.3 s: another job writes") for one in said] == [True]
