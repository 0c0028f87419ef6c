"""Downloads from a server on this machine: once for many processes, verified, and never half a file."""

import gzip
import hashlib
import http.server
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdkit
from hvdkit.datasets import download, load
from hvdkit.datasets.download import RemoteFile, fetch
from hvdkit.datasets.loading import SOURCES
from hvdkit.errors import CorruptDataError, DataError

COMMAND = "python -m hvdkit.datasets mnist --download"


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``, counts requests, and answers only once ``may_answer`` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.requests: Counter[str] = Counter()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def remote(self, name: str, content: bytes) -> RemoteFile:
        self.files[name] = content
        return RemoteFile(name, hashlib.sha256(content).hexdigest(), self.url + name)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.requests[name] += 1
        self.server.may_answer.wait()
        if name in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[name])
            self.end_headers()
            return
        if name not in self.server.files:
            self.send_error(404, "\x1b[2J")
            return
        content = self.server.files[name]
        fault = self.server.faults.get(name)
        if fault == "other content":
            content = content[::-1]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = fault in ("cut off", "reset")
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if fault == "reset":
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.01])
        thread.start()
        yield running
        running.may_answer.set()
        running.shutdown()
        thread.join()


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def served_mnist(server: Server) -> tuple[RemoteFile, ...]:
    images = np.arange(2 * 28 * 28).astype(np.uint8).reshape(2, 28, 28)
    labels = np.array([4, 2], dtype=np.uint8)
    return (
        server.remote("train-images-idx3-ubyte.gz", idx(images)),
        server.remote("train-labels-idx1-ubyte.gz", idx(labels)),
        server.remote("t10k-images-idx3-ubyte.gz", idx(images)),
        server.remote("t10k-labels-idx1-ubyte.gz", idx(labels)),
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_load_downloads_what_is_missing_and_only_then(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = served_mnist(server)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], remote=remote))
    data = load("mnist", directory=tmp_path, download=True)
    assert data.y_train.tolist() == [4, 2]
    assert names_in(tmp_path / "mnist") == {".lock", *(file.name for file in remote)}
    load("mnist", directory=tmp_path, download=True)
    load("mnist", directory=tmp_path)
    assert server.requests == {file.name: 1 for file in remote}


def test_files_that_are_elsewhere_are_not_downloaded(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = served_mnist(server)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], remote=remote))
    for file in remote:
        (tmp_path / file.name).write_bytes(server.files[file.name])
    load("mnist", directory=tmp_path, download=True)
    assert not server.requests
    assert not (tmp_path / "mnist").exists()


RANK = """
import hashlib, sys
from dataclasses import replace
from hvdkit.datasets import load
from hvdkit.datasets.download import RemoteFile
from hvdkit.datasets.loading import SOURCES
directory, *rows = sys.argv[1:]
remote = tuple(RemoteFile(*row.split("|")) for row in rows)
SOURCES["mnist"] = replace(SOURCES["mnist"], remote=remote)
print("ready", flush=True)
data = load("mnist", directory=directory, download=True)
print(hashlib.sha256(data.x_train.tobytes() + data.y_test.tobytes()).hexdigest(), flush=True)
"""


def test_many_processes_make_one_request_per_file(tmp_path: Path, server: Server) -> None:
    server.may_answer.clear()
    remote = served_mnist(server)
    rows = [f"{file.name}|{file.sha256}|{file.url}" for file in remote]
    environment = {**os.environ, "PYTHONPATH": str(Path(hvdkit.__file__).parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), *rows], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(5)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        server.may_answer.set()
        answers = {rank.communicate(timeout=120)[0] for rank in ranks}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * 5
    assert len(answers) == 1
    assert server.requests == {file.name: 1 for file in remote}
    assert names_in(tmp_path / "mnist") == {".lock", *(file.name for file in remote)}


def in_parallel(count: int, call: Callable[[], None]) -> list[BaseException]:
    caught: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except DataError as error:
            caught.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return caught


def test_those_who_waited_hear_of_the_failure_at_once(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in all: no queue of time-outs on a node without network."""
    server.may_answer.clear()
    at_the_lock = threading.Barrier(4, action=server.may_answer.set)
    flock = download.fcntl.flock

    def announced_flock(*arguments: Any) -> None:
        at_the_lock.wait()
        flock(*arguments)

    monkeypatch.setattr(download.fcntl, "flock", announced_flock)
    missing = RemoteFile("a.gz", "0" * 64, server.url + "a.gz")
    caught = in_parallel(4, lambda: fetch([missing], tmp_path, COMMAND))
    assert len({str(error) for error in caught}) == 1
    assert len(caught) == 4
    assert server.requests == {"a.gz": 1}


def test_a_later_attempt_is_a_new_one(tmp_path: Path, server: Server) -> None:
    file = RemoteFile("a.gz", hashlib.sha256(b"content").hexdigest(), server.url + "a.gz")
    with pytest.raises(DataError, match=r"HTTP Error 404: \\x1b\[2J"):
        fetch([file], tmp_path, COMMAND)
    server.files["a.gz"] = b"content"
    fetch([file], tmp_path, COMMAND)
    assert (tmp_path / "a.gz").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("fault", "why"),
    [("cut off", "ended 500 bytes too early"), ("reset", "reset|ended"), ("other content", "1000 bytes")],
)
def test_what_a_server_sends_in_part_or_otherwise_is_refused_and_not_kept(
    tmp_path: Path, server: Server, fault: str, why: str
) -> None:
    file = server.remote("a.gz", bytes(range(250)) * 4)
    server.faults["a.gz"] = fault
    with pytest.raises(DataError, match=why) as caught:
        fetch([file], tmp_path, COMMAND)
    assert file.url in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, CorruptDataError) == (fault == "other content")
    if fault == "other content":
        assert file.sha256 in str(caught.value)
        assert hashlib.sha256(server.files["a.gz"][::-1]).hexdigest() in str(caught.value)
    assert names_in(tmp_path) == {".lock"}


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_another_user_put_there_is_not_written_to(tmp_path: Path, server: Server, kind: str) -> None:
    """Links at the name that the file had for the while, and at that of the lock, into which words are written."""
    victim, folder = tmp_path / "victim", tmp_path / "data"
    victim.write_bytes(b"precious")
    folder.mkdir()
    put = {"link": lambda path: path.symlink_to(victim), "pipe": os.mkfifo, "directory": Path.mkdir}[kind]
    put(folder / f".a.gz.{socket.gethostname()}.part")
    (folder / "a.gz").symlink_to(tmp_path / "nothing")
    fetch([server.remote("a.gz", b"content")], folder, COMMAND)
    assert (folder / "a.gz").read_bytes() == b"content" and not (folder / "a.gz").is_symlink()
    (folder / ".lock").unlink()
    put(folder / ".lock")
    missing = RemoteFile("b.gz", "0" * 64, server.url + "b.gz")
    with pytest.raises(DataError, match="cannot be written or locked"):
        fetch([missing], folder, COMMAND)
    assert victim.read_bytes() == b"precious" and not (tmp_path / "nothing").exists()


def test_no_network_names_the_urls_and_the_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as closed:
        url = closed.url + "a.gz"
    file = RemoteFile("a.gz", "0" * 64, url)
    with pytest.raises(DataError) as caught:
        fetch([file], tmp_path, COMMAND)
    message = str(caught.value)
    for part in (url, "Connection refused", "compute nodes often have no network", COMMAND):
        assert part in message
    assert "\n" not in message
    assert names_in(tmp_path) == {".lock"}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://localhost/a.gz", "data:,x"])
def test_only_http_is_accepted(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch([RemoteFile("a.gz", "0" * 64, url)], tmp_path, COMMAND)


@pytest.mark.parametrize(("scheme", "why"), [("file", "is not allowed"), ("ftp", "unknown url type: ftp")])
def test_a_server_cannot_redirect_to_anything_else(tmp_path: Path, server: Server, scheme: str, why: str) -> None:
    (tmp_path / "local").write_bytes(b"content")
    file = RemoteFile("a.gz", hashlib.sha256(b"content").hexdigest(), server.url + "a.gz")
    server.redirects["a.gz"] = f"{scheme}://{tmp_path}/local"
    with pytest.raises(DataError, match=f"could not be downloaded .*{why}"):
        fetch([file], tmp_path / "data", COMMAND)
    assert names_in(tmp_path / "data") == {".lock"}


def test_a_redirect_to_http_is_followed(tmp_path: Path, server: Server) -> None:
    file = server.remote("a.gz", b"content")
    server.redirects["moved"] = file.url
    fetch([replace(file, url=server.url + "moved")], tmp_path, COMMAND)
    assert (tmp_path / "a.gz").read_bytes() == b"content"


def test_a_full_disk_is_not_called_a_network_failure(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written or locked \(No space left on device\)"):
        fetch([server.remote("a.gz", b"1")], tmp_path, COMMAND)
    assert names_in(tmp_path) == {".lock"}


def test_downloaded_files_have_ordinary_permissions(tmp_path: Path, server: Server) -> None:
    (tmp_path / "by hand").write_bytes(b"")
    fetch([server.remote("a.gz", b"1")], tmp_path, COMMAND)
    assert (tmp_path / "a.gz").stat().st_mode == (tmp_path / "by hand").stat().st_mode


def test_the_table_is_well_formed() -> None:
    for source in SOURCES.values():
        spellings = [name for layout in source.layouts for names in layout.files for name in names]
        assert source.remote
        assert source.folders[-1] == "." or "." in source.folders
        assert source.name in source.folders
        for file in source.remote:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.name in spellings
            assert file.url.startswith("https://") and file.url.endswith("/" + file.name)


def test_command_downloads(tmp_path: Path, server: Server) -> None:
    """The command in a process of its own, with the published URLs replaced by this server's."""
    remote = served_mnist(server)
    code = RANK.replace('print("ready", flush=True)', "from hvdkit.datasets.__main__ import main").partition("data =")[
        0
    ]
    code += "sys.exit(main(['mnist', '--directory', directory, '--download']))"
    rows = [f"{file.name}|{file.sha256}|{file.url}" for file in remote]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *rows],
        env={**os.environ, "PYTHONPATH": str(Path(hvdkit.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mnist: 10 classes, images 28 x 28 x 1" in done.stdout
    assert done.stderr.splitlines() == [f"hvdkit: downloading {file.url}" for file in remote]
