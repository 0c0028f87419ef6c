"""Step 6: the checkpoint protocol on a real file system."""

import json
import signal
import subprocess
import sys

import pytest

from hvdkit import CheckpointError, InvalidArgumentError
from hvdkit.steps.checkpoint import MANIFEST, CheckpointDirectory, verify


def writer(text):
    def write(directory):
        (directory / "weights").write_text(text)
        (directory / "more").mkdir()
        (directory / "more" / "slots").write_text(text * 2)

    return write


def names(directory):
    return sorted(path.name for path in directory.iterdir())


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
    assert names(tmp_path) == ["step-0000000004", "step-0000000030"]
    assert store.latest().step == 30


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


KILLED = """
import os, sys
from pathlib import Path
from hvdkit.steps.checkpoint import CheckpointDirectory
store = CheckpointDirectory(sys.argv[1], keep=2)
step = store.latest().step if store.latest() else 0
while True:
    step += 1
    store.save(step, lambda path: [(path / str(n)).write_bytes(os.urandom(20000)) for n in range(5)])
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_last_one_reported_is_there(tmp_path):
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        reported = [int(process.stdout.readline()) for _ in range(3)][-1]
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        reported = max([reported, *map(int, rest[:-1])])
        assert CheckpointDirectory(tmp_path).latest().step >= reported
    CheckpointDirectory(tmp_path, keep=2).save(10**6, writer("x"))
    assert all(name.startswith("step-") for name in names(tmp_path))
