"""Step 6: what lies in a checkpoint: its files, and ``manifest.json`` with the size and SHA-256 of each."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit.errors import CheckpointError

MANIFEST = "manifest.json"
_LONGEST_MANIFEST = 64 * 2**20
_LONGEST_NAME = 200
_LARGEST_SCORE = 10**300


def seal(temporary: Path, step: int, metadata: dict[str, Any], score: float | None) -> None:
    """Flush every file of a new checkpoint to disk, and list them in its manifest.

    Raises:
        CheckpointError: it holds a link.
        OSError: something cannot be read or written.
    """
    temporary.chmod(0o755)
    files = {}
    for path in _files(temporary):
        fsync(path)
        files[path.relative_to(temporary).as_posix()] = {"sha256": _sha256(path), "size": path.stat().st_size}
    for path in temporary.rglob("*"):
        if path.is_dir():
            fsync(path)
    manifest = {"format": 1, "step": step, "score": score, "files": files, "metadata": metadata}
    target = temporary / MANIFEST
    target.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    fsync(target)
    fsync(temporary)


def verify(path: Path, *, contents: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest.

    Args:
        contents: read the files, too; else only their sizes are compared.
    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, of another size or content, or
            cannot be read.
    """
    manifest = _manifest(path)
    for name, expected in manifest["files"].items():
        file, shown = path / name, name if len(name) < _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        if kind_of(file) != stat.S_IFREG:
            raise CheckpointError(f"{shown} is missing")
        try:
            size = file.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{shown} has {size} bytes, {expected['size']} were written")
            if contents and _sha256(file) != expected["sha256"]:
                raise CheckpointError(f"{shown} has another SHA-256 than when it was written")
        except OSError as error:
            raise CheckpointError(f"{shown} cannot be read ({error.strerror or error})") from error
    return manifest


def require_stored(file: Path) -> None:
    """Check that a zip archive (PyTorch's, NumPy's) holds its records as they are: reading takes no more than its size.

    Raises:
        CheckpointError: it is no archive, or its records are compressed, overlap, or claim more than is there.
    """
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    packed = [one for one in records if one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size]
    if packed or sum(one.file_size for one in records) > size:
        name = (packed or records)[0].filename
        raise CheckpointError(
            f"{file} is refused: {f'its record {name} is compressed' if packed else 'its records claim more'} and "
            f"would unpack to more than the {size} bytes of the file; hvdkit writes records as they are."
        )


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    kind = kind_of(file)
    if kind is None:
        raise CheckpointError(f"{MANIFEST} is missing")
    if kind != stat.S_IFREG:  # a FIFO would be waited for
        raise CheckpointError(f"{MANIFEST} is no plain file")
    try:
        if file.stat().st_size > _LONGEST_MANIFEST:
            raise CheckpointError(f"{MANIFEST} is longer than hvdkit's, {_LONGEST_MANIFEST} bytes at most")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    _check_form(manifest)
    return dict(manifest)


def kind_of(path: Path) -> int | None:
    """The type of what stands there, links not followed, such as ``stat.S_IFREG``; None for nothing."""
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except (OSError, ValueError):  # also a name that no file can have
        return None


def score_of(path: Path) -> float | None:
    """The score in a checkpoint's manifest; None where there is none, or no manifest to be read."""
    try:
        return _manifest(path).get("score")
    except CheckpointError:
        return None


def _check_form(manifest: Any) -> None:
    well_formed = (
        isinstance(manifest, dict)
        and isinstance(manifest.get("step"), int)
        and _is_score(manifest.get("score"))
        and isinstance(manifest.get("metadata"), dict)
        and isinstance(manifest.get("files"), dict)
        and all(
            isinstance(entry, dict)
            and {"sha256", "size"} <= entry.keys()
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            for name, entry in manifest["files"].items()
        )
    )
    if not well_formed:
        raise CheckpointError(f"{MANIFEST} is not one of hvdkit's")
    if manifest.get("format") != 1:
        raise CheckpointError(f"{MANIFEST} has format {manifest.get('format')!r}, this version reads 1")


def _is_score(value: Any) -> bool:
    """Not a number that no float holds."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _LARGEST_SCORE
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path.name} is a link; a checkpoint holds plain files only.")
        if path.is_file():
            yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
