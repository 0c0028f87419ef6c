"""Find the files of a data set, or say what is missing, where it was looked for and how to get it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdkit.datasets.sources import DataSource, FolderLayout
from hvdkit.errors import DataError, DataNotFoundError


class FoundFiles(NamedTuple):
    """The files of a data set, in the order in which their layout's reader wants them."""

    layout: FolderLayout
    paths: list[Path]


def data_directory(directory: str | os.PathLike[str] | None) -> Path:
    """The directory below which data sets lie.

    Args:
        directory: the caller's choice; None asks HVDKIT_DATA, then XDG_DATA_HOME/hvdkit, then
            ~/.local/share/hvdkit. An empty variable counts as unset.
    Raises:
        DataError: none of them is set and there is no home directory.
    Source: XDG Base Directory Specification 0.8 (a relative XDG_DATA_HOME is to be ignored).
    """
    try:
        if directory is not None:
            return Path(directory).expanduser()
        if chosen := os.environ.get("HVDKIT_DATA"):
            return Path(chosen).expanduser()
        shared = Path(os.environ.get("XDG_DATA_HOME", ""))
        return (shared if shared.is_absolute() else Path.home() / ".local" / "share") / "hvdkit"
    except RuntimeError as error:
        raise DataError("there is no home directory to look for data in; set HVDKIT_DATA to a directory") from error


def find(source: DataSource, base: Path) -> FoundFiles | None:
    """The first folder and layout that hold the whole data set; None when no folder does."""
    for folder in _folders(source, base):
        for layout in source.layouts:
            paths = [path for names in layout.files if (path := _existing(folder, names))]
            if len(paths) == len(layout.files):
                return FoundFiles(layout, paths)
    return None


def not_found(source: DataSource, base: Path, directory: str | os.PathLike[str] | None) -> DataNotFoundError:
    """The error that says which files are missing, every place looked at, and how to get them."""
    folders = _folders(source, base)
    return DataNotFoundError(
        f"{source.name}: found {_what_is_missing(source, folders)}; looked in {', '.join(map(str, folders))}; "
        f"put the files there, name their directory (directory argument or HVDKIT_DATA), or download them from "
        f"{source.remote[0].urls[0].rpartition('/')[0]}/ with `{download_command(source.name, directory)}` "
        f"(in Python: download=True)"
    )


def download_command(name: str, directory: str | os.PathLike[str] | None) -> str:
    """The command line that downloads a data set to where this call looks for it."""
    command = ["python", "-m", "hvdkit.datasets", name, "--download"]
    if directory is not None:
        command += ["--directory", str(directory)]
    return shlex.join(command)


def _what_is_missing(source: DataSource, folders: Sequence[Path]) -> str:
    for folder in folders:
        for layout in source.layouts:
            missing = [names[0] for names in layout.files if not _existing(folder, names)]
            if len(missing) < len(layout.files):
                return f"no {', '.join(missing)} in {folder}, where the other files are"
    return "no " + " and no ".join(", ".join(names[0] for names in layout.files) for layout in source.layouts)


def _folders(source: DataSource, base: Path) -> list[Path]:
    return [base / folder for folder in source.folders]


def _existing(folder: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_file()), None)
