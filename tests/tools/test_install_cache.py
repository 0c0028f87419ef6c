"""The wheel cache: whole or not at all, verified when taken, one builder at a time."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.errors import InstallError
from hvdkit.prepare.install import here
from hvdkit.prepare.install.cache import Cache, DamagedError, sha256

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
    kept = cache.put(KEY, wheel(tmp_path), {"torch": "2.13.0"})
    assert cache.get(KEY) == kept
    assert kept.name == "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    assert kept.read_bytes() == b"wheel"
    assert json.loads((kept.parent / "manifest.json").read_text())["key"] == {"torch": "2.13.0"}


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
    with pytest.raises(InstallError, match=r"The cached .* (incomplete|cannot be read)"):
        cache.get(KEY)
    cache.drop(KEY)
    assert cache.get(KEY) is None


@pytest.fixture(params=["another's", "group", "anybody, sticky"])
def opened(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """Lets others change a path, and returns what the error must say of it."""

    def let(path: Path) -> str:
        mode = stat.S_IMODE(path.stat().st_mode)
        if request.param == "another's":
            if os.geteuid() != 0:
                pytest.skip("gives a file away, which root alone can do")
            os.chown(path, 4711, -1)
            return f"{path} belongs to no known user (uid 4711) and has mode {mode:04o}; expected you or root"
        mode |= 0o020 if request.param == "group" else 0o1002
        path.chmod(mode)
        return f"(uid {os.geteuid()}) and has mode {mode:04o}; expected you or root"

    return let


@pytest.mark.parametrize("place", ["", "wheels", f"wheels/{KEY}", f"wheels/{KEY}/manifest.json", "wheel"])
def test_a_wheel_that_others_could_have_replaced_with_its_manifest_is_refused(
    cache: Cache, tmp_path: Path, place: str, opened: Callable[[Path], str]
) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    said = opened(kept if place == "wheel" else cache.directory / place)
    with pytest.raises(InstallError, match=r"chmod -R go-w|remove it") as caught:
        cache.get(KEY)
    assert said in str(caught.value) and "XDG_CACHE_HOME" in str(caught.value)
    assert not isinstance(caught.value, DamagedError), "it would be built again in silence, over what shows an attack"
    assert kept.exists()


@pytest.mark.parametrize("place", ["", "locks"])
def test_nothing_is_written_where_others_can_lay_links(
    cache: Cache, tmp_path: Path, place: str, opened: Callable[[Path], str]
) -> None:
    (cache.directory / "locks").mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (cache.directory / "locks/key.lock").symlink_to(mine)
    said = opened(cache.directory / place)
    with pytest.raises(InstallError) as caught, cache.locked("key", print):
        pass
    assert said in str(caught.value)
    assert mine.read_text() == "precious"


def test_the_directory_above_may_be_anybodys_if_it_is_sticky(cache: Cache, tmp_path: Path) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    tmp_path.chmod(0o1777)
    assert cache.get(KEY) == kept
    tmp_path.chmod(0o777)
    with pytest.raises(InstallError, match=r"has no sticky bit.*chmod \+t"):
        cache.get(KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others, which root alone can do")
def test_a_cache_of_roots_is_taken_by_a_user_who_cannot_write_to_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        site = Cache(Path(name) / "hvdkit")
        kept = site.put(KEY, wheel(tmp_path), {})
        os.seteuid(4711)
        try:
            assert not os.access(kept, os.W_OK, effective_ids=True)
            assert site.get(KEY) == kept
        finally:
            os.seteuid(0)


def test_a_manifest_cannot_point_out_of_its_entry(cache: Cache, tmp_path: Path) -> None:
    kept = cache.put(KEY, wheel(tmp_path), {})
    manifest = json.loads((kept.parent / "manifest.json").read_text())
    outside = tmp_path / "outside.whl"
    outside.write_bytes(b"wheel")
    (kept.parent / "manifest.json").write_text(json.dumps({**manifest, "file": str(outside)}))
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


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert here.cache_directory() == tmp_path / "hvdkit"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert here.cache_directory() == tmp_path / "home/.cache/hvdkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert here.cache_directory() == tmp_path / "home/.cache/hvdkit"
    monkeypatch.setenv("HOME", "somewhere")
    with pytest.raises(InstallError, match="no home directory for the cache: set XDG_CACHE_HOME"):
        here.cache_directory()
