"""Where the root tells what a monitor sees: the history on disk, trackers, its output."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.observe import trackers as named_trackers
from hvdkit.observe.history import History
from hvdkit.observe.stragglers import Report


class RootSinks:
    """The root's; no failure of theirs ends a training.

    Args:
        directory: of the history; None for none.
        trackers: see ``checked_trackers``.
    """

    def __init__(self, directory: Path | None, trackers: Sequence[Any]) -> None:
        self._kept = directory is not None
        directory = directory or Path()
        self._history = History(directory, importlib.metadata.version("hvdkit"))
        self._trackers: list[Any] = []
        for one in trackers:
            # The root alone does: an error of its own would desert the others.
            made = _safely(named_trackers.tracker, one, directory) if isinstance(one, str) else one
            self._trackers += [] if made is None else [made]

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """The training begins; ``step`` steps were done before."""
        if self._kept:
            _safely(self._history.begin, step, facts)
        for tracker in self._trackers:
            if callable(begin := getattr(tracker, "begin", None)):
                _safely(begin, step, facts.get("steps"))

    def window(self, line: Mapping[str, Any], values: Mapping[str, float]) -> None:
        """A window has ended.

        Args:
            line: the fields of its line in the history.
            values: what trackers get.
        """
        self._history.write("window", **line)
        for tracker in self._trackers:
            _safely(tracker.log, line["step"], dict(values))

    def report(self, report: Report) -> None:
        """Something is wrong."""
        self._history.write("report", **asdict(report))
        for tracker in self._trackers:
            _safely(tracker.report, report.text)
        sys.stderr.write(f"hvdkit monitor: {report.text}\n")

    def checkpoint(self, step: int) -> None:
        """A checkpoint is complete."""
        self._history.write("checkpoint", step=step)

    def close(self, end: int | None, *, failed: bool = False) -> None:
        """Tell no more.

        Args:
            end: the last step of a training that has come to its end.
            failed: it has come to none, by an error.
        """
        if end is not None:
            self._history.write("end", step=end)
        self._history.close()
        for tracker in self._trackers:
            if failed and callable(fail := getattr(tracker, "fail", None)):
                _safely(fail)
            _safely(tracker.close)


def checked_trackers(given: Any, directory: Path | None) -> list[Any]:
    """Names of libraries and objects that may be trackers.

    Raises:
        InvalidArgumentError: something that is neither, or a name that is not known or needs a directory.
        MissingFrameworkError: the library of a name is not installed.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidArgumentError(f'trackers must be a list such as ["tensorboard"], got {given!r}.')
    for one in given:
        if isinstance(one, str):
            named_trackers.require_known(one)
            if directory is None and one != "progress":
                raise InvalidArgumentError(f"the tracker {one!r} needs a directory, got None; give the monitor one.")
        methods = () if isinstance(one, str) else ("log", "report", "close")
        if not all(callable(getattr(one, name, None)) for name in methods):
            raise InvalidArgumentError(f"a tracker has log, report and close, got {one!r}.")
    return list(given)


def _safely(action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the action returns; None where it fails, for what only looks on ends no training."""
    try:
        return action(*arguments, **options)
    except Exception as error:
        warnings.warn(f"of the monitor: {type(error).__name__}: {error}", stacklevel=2)
        return None
