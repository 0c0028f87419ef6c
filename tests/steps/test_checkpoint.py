"""Step 6: the checkpoint protocol on a real file system."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from hvdkit import CheckpointError, InvalidArgumentError
from hvdkit.steps.checkpoint import CheckpointDirectory
from hvdkit.steps.lock import LOCK, WRITER
from hvdkit.steps.manifest import MANIFEST, verify
from hvdkit.steps.resume import read_arrays


def writer(text):
    def write(directory):
        (directory / "weights").write_text(text)
        (directory / "more").mkdir()
        (directory / "more" / "slots").write_text(text * 2)

    return write


def names(directory):
    """Of checkpoints, and of what interrupted writes left; not the lock and who holds it."""
    return sorted(path.name for path in directory.iterdir() if path.name not in (LOCK, WRITER))


def test_saved_is_found_again_verified(tmp_path):
    store = CheckpointDirectory(tmp_path / "run")
    assert store.latest() is None
    saved = store.save(100, writer("abc"), {"epoch": 3})
    found = store.latest()
    assert found == saved
    assert (found.step, found.metadata, found.path.name) == (100, {"epoch": 3}, "step-0000000100")
    assert set(verify(found.path)["files"]) == {"weights", "more/slots"}
    assert (found.path / "more" / "slots").read_text() == "abcabc"


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointDirectory(tmp_path, keep=2)
    for step in (1, 2, 30, 4):
        store.save(step, writer("x"))
    assert names(tmp_path) == ["step-0000000004-r1", "step-0000000030"]
    assert store.latest().step == 4


def test_a_lower_step_begins_a_newer_generation(tmp_path):
    """On more ranks the same training takes fewer steps: what is written later must not count as older."""
    store = CheckpointDirectory(tmp_path, keep=2)
    for step in (200, 225, 66, 77, 77, 80):
        store.save(step, writer(f"after {step}"))
    assert names(tmp_path) == ["step-0000000077-r2", "step-0000000080-r2"]
    assert (store.latest().path / "weights").read_text() == "after 80"


def test_the_best_stay_beside_the_newest(tmp_path):
    store = CheckpointDirectory(tmp_path, keep=1, keep_best=2)
    for step, score in enumerate((0.5, 0.9, 0.7, None, 0.8, -1)):
        store.save(step, writer(f"{score}"), score=score)
    assert names(tmp_path) == ["step-0000000001", "step-0000000004", "step-0000000005"]
    assert (store.latest().step, store.latest().score) == (5, -1)
    assert (store.best().step, store.best().score) == (1, 0.9)
    (store.best().path / "weights").write_text("x")
    best = store.best()
    assert best.step == 4 and "step-0000000001: weights has 1 bytes" in best.skipped[0]


def test_scalars_of_numpy_are_plain_numbers_and_a_score_may_be_a_bool(tmp_path):
    store = CheckpointDirectory(tmp_path, keep=np.int64(3))
    store.save(np.int64(3), writer("x"), {"accuracy": np.float32(0.5), "seen": np.int64(7)}, np.float32(0.25))
    assert store.save(4, writer("y"), score=True) == CheckpointDirectory(tmp_path).latest()
    assert (store.best().step, store.best().score) == (4, 1.0)
    first = json.loads((tmp_path / "step-0000000003" / MANIFEST).read_text())
    assert (first["step"], first["score"], first["metadata"]) == (3, 0.25, {"accuracy": 0.5, "seen": 7})
    for step, metadata in ((np.float32(5), {}), (5, {"x": np.ones(1)}), (5, {"x": np.float32("nan")})):
        with pytest.raises(InvalidArgumentError, match=r"must be an integer|must be JSON values"):
            store.save(step, writer("x"), metadata)


def test_without_scores_there_is_no_best(tmp_path):
    store = CheckpointDirectory(tmp_path, keep_best=2)
    store.save(1, writer("x"))
    assert store.best() is None
    for score in (float("nan"), float("inf"), "high", 10**400, np.ones(2)):
        with pytest.raises(InvalidArgumentError, match="score must be a finite number, got"):
            store.save(2, writer("x"), score=score)


def test_saving_a_step_again_wins_over_the_first(tmp_path):
    store = CheckpointDirectory(tmp_path, keep=1)
    store.save(7, writer("old"))
    store.save(7, writer("new"))
    assert (store.latest().path / "weights").read_text() == "new"
    assert names(tmp_path) == ["step-0000000007-r1"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "weights").unlink(), "weights is missing"),
        (lambda path: (path / "weights").write_text("ab"), "weights has 2 bytes, 3 were written"),
        (lambda path: (path / "weights").write_text("abX"), "weights has another SHA-256"),
        (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda path: (path / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda path: (path / MANIFEST).write_text("[]"), "not one of hvdkit's"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_one_is_skipped_and_named(tmp_path, damage, reason):
    store = CheckpointDirectory(tmp_path)
    store.save(1, writer("abc"))
    damage(store.save(2, writer("abc")).path)
    found = store.latest()
    assert found.step == 1
    (skipped,) = found.skipped
    assert skipped.startswith("step-0000000002: ") and reason in skipped


def with_manifest(path, **changes):
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, **changes}))


def replaced(path, make):
    path.unlink()
    make(path)


BAD_ENTRIES = {
    "deep": lambda path: (path / MANIFEST).write_text("[" * 200_000),
    "a score of 400 digits": lambda path: with_manifest(path, score=10**400),
    "a step of 400 digits": lambda path: (path / MANIFEST).write_text('{"step": ' + "9" * 5000 + "}"),
    "a name of 5,000 characters": lambda path: with_manifest(path, files={"n" * 5000: {"size": 1, "sha256": "x"}}),
    "a name with a null": lambda path: with_manifest(path, files={"n\0": {"size": 1, "sha256": "x"}}),
    "manifest is a FIFO": lambda path: replaced(path / MANIFEST, os.mkfifo),
    "manifest is a directory": lambda path: replaced(path / MANIFEST, os.mkdir),
    "manifest is /dev/zero": lambda path: replaced(path / MANIFEST, lambda here: here.symlink_to("/dev/zero")),
    "file is a FIFO": lambda path: replaced(path / "weights", os.mkfifo),
    "file is a link": lambda path: replaced(path / "weights", lambda here: here.symlink_to("/dev/zero")),
    "content": lambda path: (path / "weights").write_text("abX"),
    "empty": lambda path: (path / "weights").write_text(""),
}


@pytest.mark.filterwarnings("ignore:.*is left out")
@pytest.mark.parametrize("bad", BAD_ENTRIES)
def test_one_bad_entry_costs_only_itself(tmp_path, bad):
    before = CheckpointDirectory(tmp_path, keep=2, keep_best=1)
    before.save(1, writer("abc"), score=1.0)
    damaged = before.save(2, writer("abc"), score=2.0).path
    BAD_ENTRIES[bad](damaged)
    store = CheckpointDirectory(tmp_path, keep=2, keep_best=1)  # of another process
    assert store.latest().step == 1 and store.best().step == 1
    store.save(3, writer("abc"), score=0.5)
    assert "step-0000000001" in names(tmp_path), "the only other good one"
    assert (store.latest().step, store.best().step) == (3, 1)
    store.save(4, writer("abc"), score=0.1)
    store.save(5, writer("abc"), score=0.2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000004", "step-0000000005"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("step-0000000001")])
def test_what_is_named_like_a_checkpoint_and_is_none_is_one_warning(tmp_path, make):
    store = CheckpointDirectory(tmp_path)
    store.save(1, writer("abc"))
    make(tmp_path / "step-0000000009")
    with pytest.warns(UserWarning, match="step-0000000009 is named like a checkpoint and is no directory") as said:
        assert store.latest().step == 1
        assert store.save(2, writer("abc")).path.name == "step-0000000002"
        assert store.latest().step == 2
    assert len(said) == 1


def test_a_file_that_cannot_be_read_or_removed_is_left_out(tmp_path, monkeypatch):
    store = CheckpointDirectory(tmp_path, keep=1)
    store.save(1, writer("abc"))
    newest = store.save(2, writer("abc")).path

    def fails(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="Input/output error"):
        patched.setattr("hvdkit.steps.manifest._sha256", fails)
        with pytest.raises(CheckpointError, match="slots cannot be read"):
            store.latest()
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="cannot be removed: Input/output error"):
        patched.setattr("hvdkit.steps.checkpoint.shutil.rmtree", fails)
        assert store.save(3, writer("abc")).step == 3
    assert newest.name not in names(tmp_path)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path):
    store = CheckpointDirectory(tmp_path)
    path = store.save(1, writer("abc")).path
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["../../secret"] = manifest["files"]["weights"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        store.latest()


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path):
    store = CheckpointDirectory(tmp_path)
    store.save(1, writer("abc"))

    def fail(directory):
        (directory / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device"):
        store.save(2, fail)
    assert names(tmp_path) == ["step-0000000001"]
    assert store.latest().step == 1


def test_a_full_disk_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="No space left on device"):
        CheckpointDirectory(tmp_path).save(
            1, lambda path: path.joinpath("x").symlink_to("/dev/full") or write_full(path)
        )


def write_full(path):
    (path / "x").write_text("does not fit")


def test_links_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is a link"):
        CheckpointDirectory(tmp_path).save(1, lambda path: (path / "x").symlink_to("/etc/hostname"))


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_a_bad_step_is_refused(tmp_path, step):
    with pytest.raises(InvalidArgumentError, match="step must be an integer >= 0"):
        CheckpointDirectory(tmp_path / "run").save(step, writer("x"))
    assert not (tmp_path / "run").exists()


def test_metadata_must_be_json(tmp_path):
    for bad in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(InvalidArgumentError, match="JSON"):
            CheckpointDirectory(tmp_path / "run").save(1, writer("x"), bad)
    assert not (tmp_path / "run").exists()


def test_bad_directories_and_keep_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        CheckpointDirectory(tmp_path / "file")
    for keep in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgumentError, match="keep"):
            CheckpointDirectory(tmp_path, keep=keep)


KILLED = r"""
import os, sys
from hvdkit.steps.checkpoint import CheckpointDirectory

def save_until_killed():
    store = CheckpointDirectory(sys.argv[1], keep=2)
    step = store.latest().step if store.latest() else 0
    print(os.getpid(), flush=True)
    while True:
        step += 1
        store.save(step, lambda path: [(path / str(n)).write_bytes(os.urandom(20000)) for n in range(5)])
        os.write(1, b"%d\n" % step)  # print writes the end of the line apart where PYTHONUNBUFFERED is set

for _ in sys.stdin:
    if os.fork() == 0:
        save_until_killed()
    os.wait()
    print("ended", flush=True)
"""
"""For each line of its input, a process that saves until it is killed."""


def test_killed_at_any_of_a_hundred_moments_what_was_reported_saved_is_there(tmp_path):
    last = 0
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as processes:
        for _ in range(100):
            print(file=processes.stdin, flush=True)
            process = int(processes.stdout.readline())
            reported = [processes.stdout.readline()]
            time.sleep(random.uniform(0, 0.03))  # noqa: S311
            os.kill(process, signal.SIGKILL)
            reported += takewhile(lambda line: line != "ended\n", processes.stdout)
            assert all(line.strip().isdecimal() for line in reported)
            newest = CheckpointDirectory(tmp_path).latest()  # verified: raises unless it is complete
            assert newest.step >= int(reported[-1]) > last
            assert newest.skipped == ()
            last = newest.step
        processes.stdin.close()
    CheckpointDirectory(tmp_path, keep=2).save(last + 1, writer("x"))
    assert names(tmp_path) == [f"step-{step:010d}" for step in (last, last + 1)]


@pytest.mark.parametrize("seed", range(30))
def test_any_damage_to_the_newest_is_found_and_the_one_before_taken(tmp_path, seed):
    chance = random.Random(seed)  # noqa: S311
    store = CheckpointDirectory(tmp_path)
    store.save(1, writer("good"))
    store.save(2, lambda path: [(path / name).write_bytes(chance.randbytes(5000)) for name in ("weights", "slots")])
    file = tmp_path / "step-0000000002" / chance.choice(["weights", "slots", MANIFEST])
    contents = bytearray(file.read_bytes())
    kind = chance.choice(["flip", "truncate", "delete"])
    if kind == "flip":
        place = chance.randrange(len(contents))
        if file.name == MANIFEST:  # elsewhere a bit of the manifest may be of no consequence
            place = contents.index(b"sha256") + 12
        contents[place] ^= 1 << chance.randrange(4)
    file.unlink()
    if kind != "delete":
        file.write_bytes(contents[: chance.randrange(len(contents))] if kind == "truncate" else contents)
    found = store.latest()
    assert found.step == 1 and found.skipped[0].startswith("step-0000000002: ")
    assert file.name in found.skipped[0] or file.name == MANIFEST


def test_files_of_numpy_are_read_as_they_were_written_or_refused(tmp_path):
    array, archive = tmp_path / "random.npy", tmp_path / "outer.npz"
    assert read_arrays(array) is None
    np.save(array, np.arange(3))
    np.savez(archive, a=np.arange(4), b=np.ones(2))
    assert read_arrays(array).tolist() == [0, 1, 2]
    assert {name: value.tolist() for name, value in read_arrays(archive).items()} == {"a": [0, 1, 2, 3], "b": [1, 1]}
    np.save(array, np.array([{}]), allow_pickle=True)
    archive.write_bytes(archive.read_bytes()[:-30])
    for file in (array, archive):
        with pytest.raises(CheckpointError, match=f"{file.name} cannot be read"):
            read_arrays(file)
