"""Step 6: checkpoints that are complete or absent, whatever happens while they are written.

A checkpoint is a directory ``step-0000000100`` below the one given. Its files are written to a temporary directory
beside it, flushed to disk, listed with their size and SHA-256 in ``manifest.json``, and the whole is renamed in one
step. A save of the newest step again, or of a lower one (a training that goes on from an older checkpoint, or that
counts fewer steps on more ranks), begins a new generation, ``step-0000000100-r1``, which is newer than all before it.
Which process may write is the caller's business; the framework bindings let only the root do it. Of several jobs only
one may (``lock.py``).

Source of the protocol: write, fsync, rename, fsync the directory: Pillai et al., OSDI 2014, section 2.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.core import listeners
from hvdkit.errors import CheckpointError, InvalidArgumentError, finite, whole
from hvdkit.steps import manifest
from hvdkit.steps.lock import PATIENCE_S, WriterLock

_NAME = re.compile(r"step-(\d{10,30})(?:-r(\d{1,9}))?")
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint on disk.

    Attributes:
        path: its directory.
        step: optimizer steps completed when it was written.
        metadata: what the caller stored beside the files (JSON values).
        score: how good it is, the higher the better; None where the caller did not say.
        skipped: newer (or better) checkpoints that were not valid, each "name: reason".
        extra: (PyTorch) what was saved as ``extra``, on the CPU, when ``restore`` returns it; else empty.
        missing, unexpected: (PyTorch) after ``restore(strict=False)`` the names that the model has and that were not
            loaded, and those in the checkpoint that the model has not, or not of this shape.
    """

    path: Path
    step: int
    metadata: dict[str, Any]
    score: float | None = None
    skipped: tuple[str, ...] = field(default=())
    extra: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class CheckpointDirectory:
    """The checkpoints of one training run.

    Args:
        directory: where they live; made on the first save.
        keep: how many of the newest valid ones stay, >= 1.
        keep_best: how many of those with the highest scores stay beside them, >= 0.
        wait: seconds to wait for another job that writes there, before an error.
    Raises:
        InvalidArgumentError: keep < 1, keep_best < 0, a bad ``wait``, or the directory is a file.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, keep_best: int = 0, *, wait: float = PATIENCE_S
    ) -> None:
        self.keep, self.keep_best = whole("keep", keep, 1), whole("keep_best", keep_best, 0)
        self.directory = Path(directory)
        self._lock = WriterLock(self.directory, wait)
        self._complained: set[str] = set()
        self._written: set[Path] = set()
        if self.directory.exists() and not self.directory.is_dir():
            raise InvalidArgumentError(f"the checkpoint directory {self.directory} is a file; give a directory.")

    def claim(self) -> None:
        """Have the directory from now on, not from the first save, so that a second job learns of it when it starts.

        Where nothing can be written nothing happens: that is for ``save`` to say.

        Raises:
            CheckpointError: another job writes there.
        """
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock.writing():
                pass

    def temporary(self) -> Path:
        """A new directory beside the checkpoints; the next ``save`` removes it, and a later job that of a dead one.

        Raises:
            CheckpointError: it could not be made, or another job writes there.
        """
        try:
            with self._lock.writing():
                return Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{self._lock.token}-", dir=self.directory))
        except OSError as error:
            raise CheckpointError(
                f"could not write in {self.directory}: {error.strerror or error}; give a directory that can be written."
            ) from error

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        metadata: dict[str, Any] | None = None,
        score: float | None = None,
    ) -> Saved:
        """Write one checkpoint: ``write`` puts its files into the directory that it is given.

        Args:
            step: optimizer steps completed, >= 0.
            write: called once with an empty directory; may make sub-directories, not links.
            metadata: JSON values that go into the manifest.
            score: how good it is, a finite number, the higher the better, for ``best`` and ``keep_best``.
        Returns:
            The checkpoint, complete and on disk.
        Raises:
            InvalidArgumentError: a bad step or score, or metadata that is not JSON.
            CheckpointError: it could not be written (full disk, no permission, ...), or another job writes there;
                earlier ones are intact.
        """
        step, metadata, score = checked(step, metadata, score)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock.writing():
                final = self._write(step, write, metadata, score)
                self._prune()
        except OSError as error:
            raise CheckpointError(
                f"could not write the checkpoint of step {step} in {self.directory}: {error.strerror or error}; free "
                "some space or give a directory that can be written (earlier checkpoints are intact)."
            ) from error
        listeners.saved(step)
        return Saved(final, step, metadata, score)

    def _write(self, step: int, write: Callable[[Path], None], metadata: dict[str, Any], score: float | None) -> Path:
        temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{self._lock.token}-", dir=self.directory))
        try:
            write(temporary)
            manifest.seal(temporary, step, metadata, score)
            try:
                temporary.rename(final := self._free_name(step))
            except OSError:  # without locks: a job that has yet to see that it lost the directory was faster
                temporary.rename(final := self._free_name(step))
            self._written.add(final)
            manifest.fsync(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def latest(self) -> Saved | None:
        """The newest valid checkpoint, verified; None when there is none at all.

        Raises:
            CheckpointError: there are checkpoints, but not one of them is valid.
        """
        return self._first_valid(self._newest_first())

    def best(self) -> Saved | None:
        """The valid checkpoint with the highest score, verified; None when none has a score.

        Raises:
            CheckpointError: there are checkpoints with a score, but not one of them is valid.
        """
        return self._first_valid(self._best_first())

    def _first_valid(self, paths: list[Path]) -> Saved | None:
        skipped: list[str] = []
        for path in paths:
            try:
                found = manifest.verify(path)
            except CheckpointError as error:
                skipped.append(f"{path.name}: {error}")
                self._complain(f"{path} is left out: {error}")
                continue
            return Saved(path, found["step"], found["metadata"], found.get("score"), tuple(skipped))
        if skipped:
            raise CheckpointError(f"no valid checkpoint in {self.directory}: {'; '.join(skipped)}")
        return None

    def _prune(self) -> None:
        """Remove all but the newest ``keep`` and the best ``keep_best``, and writes that were cut off.

        One that is not valid does not count and is left in place, for whoever wants to know, until ``keep`` newer ones
        that are valid exist. What goes is renamed first, so that no half-removed one is ever taken for complete. What
        cannot be removed is a warning, once.
        """
        own = f"{_TEMPORARY}{self._lock.token}-"
        best = list(itertools.islice(filter(self._is_valid, self._best_first()), self.keep_best))
        kept, old = 0, []
        for path in self._newest_first():
            if kept < self.keep:
                kept += self._is_valid(path)
            elif path not in best:
                old.append(path)
        begun = [
            path
            for path in self.directory.glob(f"{_TEMPORARY}*")
            if path.name.startswith(own) or self._lock.is_dead(path)
        ]
        self._lock.check()  # now: what is listed above, and what was just saved, is not another job's
        for path in old:
            with self._complaining(path):
                begun.append(path.rename(self.directory / f"{own}{path.name}"))
        for path in begun:
            with self._complaining(path):
                shutil.rmtree(path)

    def _is_valid(self, path: Path) -> bool:
        """Whether all files are what they were; of one that this process wrote, whether they are there."""
        try:
            manifest.verify(path, contents=path not in self._written)
        except CheckpointError as error:
            self._complain(f"{path} is left out: {error}")
            return False
        self._written.add(path)
        return True

    def _complain(self, sentence: str) -> None:
        if sentence not in self._complained:
            self._complained.add(sentence)
            warnings.warn(sentence, stacklevel=5)

    @contextlib.contextmanager
    def _complaining(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain(f"{path} cannot be removed: {error.strerror or error}")

    def _best_first(self) -> list[Path]:
        scored = [(score, path) for path in self._newest_first() if (score := manifest.score_of(path)) is not None]
        return [path for _, path in sorted(scored, key=lambda pair: pair[0], reverse=True)]

    def _generations(self) -> list[tuple[int, int, Path]]:
        """Generation, step and path of each checkpoint, the newest first."""
        found: list[tuple[int, int, Path]] = []
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and manifest.kind_of(path) == stat.S_IFDIR:
                    found.append((int(match[2] or 0), int(match[1]), path))
                elif match:
                    self._complain(f"{path} is named like a checkpoint and is no directory: left out")
        return sorted(found, reverse=True)

    def _newest_first(self) -> list[Path]:
        return [path for *_, path in self._generations()]

    def _free_name(self, step: int) -> Path:
        generation, newest, _ = next(iter(self._generations()), (0, -1, None))
        generation += step <= newest
        return self.directory / (f"step-{step:010d}" + (f"-r{generation}" if generation else ""))


def checked(step: Any, metadata: dict[str, Any] | None, score: Any) -> tuple[int, dict[str, Any], float | None]:
    """Step, metadata and score as plain JSON values, for a caller that wants to know before it writes.

    Raises:
        InvalidArgumentError: as ``CheckpointDirectory.save``.
    """
    step, score = whole("step", step, 0), None if score is None else finite("score", score)
    for name, value in (metadata or {}).items():
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"checkpoint metadata must be JSON values, got {name} with {error}; in PyTorch extra= saves tensors, "
                "state dicts and numbers that are inf or nan."
            ) from error
    return step, json.loads(json.dumps(metadata or {}, default=_plain)), score


def _plain(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as Python's, for ``json.dumps``."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
