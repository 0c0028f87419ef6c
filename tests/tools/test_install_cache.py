"""The wheel cache: whole or not at all, verified when taken, one builder at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdkit.errors import InstallError
from hvdkit.prepare.install import here
from hvdkit.prepare.install.cache import LOGS_KEPT, Cache, sha256

KEY = "a" * 64
HOLDER = """
import sys, time
from pathlib import Path
from hvdkit.prepare.install.cache import Cache
with Cache(Path(sys.argv[1])).locked("key", print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def wheel(tmp_path: Path, content: bytes = b"wheel") -> Path:
    file = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    file.write_bytes(content)
    return file


def holder(cache: Cache) -> subprocess.Popen[str]:
    """A process that holds the lock "key" until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_wheel_comes_back_as_it_went_in(cache: Cache, tmp_path: Path) -> None:
    assert cache.get(KEY) is None
    assert not cache.has(KEY)
    kept = cache.put(KEY, wheel(tmp_path), {"torch": "2.13.0"})
    assert cache.get(KEY) == kept
    assert cache.has(KEY)
    assert kept.name == "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    assert kept.read_bytes() == b"wheel"
    assert json.loads((kept.parent / "manifest.json").read_text())["key"] == {"torch": "2.13.0"}


def test_a_new_wheel_replaces_the_old_one(cache: Cache, tmp_path: Path) -> None:
    cache.put(KEY, wheel(tmp_path, b"old"), {})
    cache.put(KEY, wheel(tmp_path, b"new"), {})
    found = cache.get(KEY)
    assert found is not None
    assert found.read_bytes() == b"new"
    assert [entry.name for entry in found.parent.parent.iterdir()] == [KEY]


def test_a_changed_wheel_is_refused_with_both_sums(cache: Cache, tmp_path: Path) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    expected = sha256(kept)
    kept.write_bytes(b"whee1")
    with pytest.raises(InstallError, match=f"has SHA-256 {sha256(kept)}, expected {expected}"):
        cache.get(KEY)


@pytest.mark.parametrize("damage", ["no wheel", "no manifest", "manifest cut", "manifest a list"])
def test_a_damaged_entry_is_refused(cache: Cache, tmp_path: Path, damage: str) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    manifest = kept.parent / "manifest.json"
    match damage:
        case "no wheel":
            kept.unlink()
        case "no manifest":
            manifest.unlink()
        case "manifest cut":
            manifest.write_text(manifest.read_text()[:20])
        case _:
            manifest.write_text("[]")
    with pytest.raises(InstallError, match="The cached wheel"):
        cache.get(KEY)
    cache.drop(KEY)
    assert cache.get(KEY) is None


def test_what_a_killed_builder_left_is_no_wheel_and_does_not_stand_in_the_way(cache: Cache, tmp_path: Path) -> None:
    half = cache.directory / "wheels" / f".new-{KEY}"
    half.mkdir(parents=True)
    (half / "horovod.whl").write_bytes(b"ha")
    assert cache.get(KEY) is None
    assert cache.put(KEY, wheel(tmp_path), {}).read_bytes() == b"wheel"
    assert not half.exists()


def test_a_manifest_cannot_point_out_of_its_entry(cache: Cache, tmp_path: Path) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    manifest = json.loads((kept.parent / "manifest.json").read_text())
    outside = tmp_path / "outside.whl"
    outside.write_bytes(b"wheel")
    (kept.parent / "manifest.json").write_text(json.dumps({**manifest, "wheel": str(outside)}))
    with pytest.raises(InstallError):
        cache.get(KEY)


def test_a_second_process_waits_for_the_lock_and_is_told_for_whom(cache: Cache) -> None:
    first = holder(cache)
    told = threading.Event()
    messages: list[str] = []

    def waiting(who: str) -> None:
        messages.append(who)
        told.set()

    entered = threading.Event()

    def second() -> None:
        with cache.locked("key", waiting):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert told.wait(30)
    assert f"process {first.pid} on " in messages[0]
    assert not entered.is_set()
    first.communicate("")
    thread.join(30)
    assert entered.is_set()


def test_a_killed_holder_leaves_no_lock(cache: Cache) -> None:
    first = holder(cache)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    messages: list[str] = []
    with cache.locked("key", messages.append):
        pass
    assert messages == []


def test_two_keys_do_not_wait_for_each_other(cache: Cache) -> None:
    first = holder(cache)
    messages: list[str] = []
    with cache.locked("another", messages.append):
        pass
    first.communicate("")
    assert messages == []


def test_old_logs_are_removed(cache: Cache) -> None:
    for _ in range(LOGS_KEPT + 5):
        cache.new_log(KEY).write_text("x")
    logs = cache.directory / "logs"
    for number in range(LOGS_KEPT + 5):
        (logs / f"20200101-{number:06d}-x.log").write_text("x")
    newest = cache.new_log(KEY)
    newest.write_text("x")
    left = sorted(logs.glob("*.log"))
    assert len(left) <= LOGS_KEPT
    assert newest in left


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert here.cache_directory() == tmp_path / "hvdkit"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert here.cache_directory() == tmp_path / "home/.cache/hvdkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert here.cache_directory() == tmp_path / "home/.cache/hvdkit"
