"""Where a training's numbers go beside its history: libraries that track experiments, Prometheus, a line of progress.

Each library writes with its own code, is imported when it is asked for, and is used by the root alone. A job that is
resumed in the same directory goes on in the same run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.observe.history import History
from hvdkit.observe.stragglers import Report


class Tracker:
    """What ``hk.Monitor`` tells its windows to; one of your own needs ``log``, ``report`` and ``close`` alone."""

    failed = False

    def begin(self, step: int, steps: int | None = None) -> None:
        """A job begins after ``step`` steps of a training of ``steps`` (None: not known)."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers of the window that ends with ``step``, by name."""
        raise NotImplementedError

    def report(self, text: str) -> None:
        """A sentence about what is wrong."""

    def fail(self) -> None:
        """The training has failed; ``close`` follows."""
        self.failed = True

    def close(self) -> None:
        """No more follows."""


_SHOWN = ("samples_per_s", "grad_norm", "step_s")
"""Values that are no logs of the training."""


def span_text(seconds: float) -> str:
    """A time for people who wait: ``42 s``, ``7 min``, ``3 h 05 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


class Progress(Tracker):
    """Writes a line for each window to standard output: how far the training is, what was logged, and the time left."""

    _steps: int | None = None

    def begin(self, _step: int, steps: int | None = None) -> None:
        self._steps = steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        words = [f"step {step}/{self._steps}" if self._steps else f"step {step}"]
        words += [f"{name} {value:.4g}" for name, value in values.items() if name not in _SHOWN]
        if "samples_per_s" in values:
            words.append(f"{values['samples_per_s']:.0f} samples/s")
        if self._steps and "step_s" in values and step < self._steps:
            words.append(f"{span_text((self._steps - step) * values['step_s'])} left")
        sys.stdout.write(f"{'  '.join(words)}\n")
        sys.stdout.flush()


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/``; what an earlier job wrote of later steps is no longer shown.

    By the library's record writer, since its summary writer imports all of TensorFlow where that is installed.
    """

    def __init__(self, directory: Path) -> None:
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._text: Any = importlib.import_module("tensorboard.plugins.text.summary_v2").text_pb
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder = directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}.hvdkit"
        self._writer = records.RecordWriter((folder / name).open("ab"))
        self._step = 0
        self._write(file_version="brain.Event:2")

    def begin(self, step: int, _steps: int | None = None) -> None:
        self._step = step
        started = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step + 1, session_log=started)  # TensorBoard forgets what earlier files hold from here on

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summaries.Summary(value=scalars))

    def report(self, text: str) -> None:
        self._write(step=self._step, summary=self._text("reports", text))

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class MLflow(Tracker):
    """A run in ``MLFLOW_TRACKING_URI``, else in ``mlflow.db`` beside the history; reports are its description."""

    _NOTE = "mlflow.note.content"

    def __init__(self, directory: Path) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient(tracking_uri=uri)

        def new() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            return str(self._client.create_run(experiment, run_name=directory.name).info.run_id)

        self._run = _same_id(directory / "mlflow-run", new)
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def report(self, text: str) -> None:
        before = self._client.get_run(self._run).data.tags.get(self._NOTE, "")
        self._client.set_tag(self._run, self._NOTE, f"{before}- {text}\n")

    def close(self) -> None:
        self._client.set_terminated(self._run, "FAILED" if self.failed else "FINISHED")


class WandB(Tracker):
    """A run of Weights & Biases, offline unless ``WANDB_MODE`` says otherwise; ``wandb sync`` uploads it."""

    def __init__(self, directory: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hvdkit"),
            name=directory.name,
            id=_same_id(directory / "wandb-run", lambda: uuid.uuid4().hex[:8]),
            dir=str(directory),
            mode=mode,
            resume=None if mode == "offline" else "allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def report(self, text: str) -> None:
        self._run.alert("hvdkit", text)

    def close(self) -> None:
        self._run.finish(int(self.failed))


def _same_id(file: Path, new: Callable[[], str]) -> str:
    """The id that a run of this directory had before, else a new one, which is kept."""
    if file.is_file() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    made = new()
    file.write_text(f"{made}\n", encoding="utf-8")
    return made


class Prometheus(Tracker):
    """Writes ``metrics.prom`` for the textfile collector of a node exporter, whole or not at all.

    Source: Prometheus, text-based exposition format 0.0.4.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "metrics.prom"
        self._label = f'run="{_escaped(directory.name)}"'
        self._step = self._steps = self._reports = 0
        self._values: dict[str, float] = {}

    def begin(self, step: int, steps: int | None = None) -> None:
        self._step, self._steps = step, steps or 0
        self._write()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step, self._values = step, dict(values)
        self._write()

    def report(self, _text: str) -> None:
        self._reports += 1
        self._write()

    def _write(self) -> None:
        now = round(time.time(), 3)
        counts = {"step": self._step, "steps": self._steps, "reports_total": self._reports, "time_seconds": now}
        lines = [f"hvdkit_{name}{{{self._label}}} {count}" for name, count in counts.items()]
        for name, value in self._values.items():
            lines.append(f'hvdkit_value{{{self._label},name="{_escaped(name)}"}} {value!r}')
        fresh = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        fresh.replace(self._file)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_KINDS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
    "prometheus": Prometheus,
    "progress": lambda _: Progress(),
}
_OWN = ("prometheus", "progress")
"""Those that need no library, which the others have their names of."""


def checked_trackers(given: Any, directory: Path | None) -> list[Any]:
    """Names of libraries and objects that may be trackers; asked on every rank, though the root alone makes them.

    Raises:
        InvalidArgumentError: something that is neither, or a name that is not known or needs a directory.
        MissingFrameworkError: the library of a name is not installed.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidArgumentError(f'trackers must be a list such as ["tensorboard"], got {given!r}.')
    for one in given:
        if not isinstance(one, str):
            if not all(callable(getattr(one, name, None)) for name in ("log", "report", "close")):
                raise InvalidArgumentError(f"a tracker has log, report and close, got {one!r}.")
            continue
        if one not in _KINDS:
            raise InvalidArgumentError(f"there is no tracker {one!r}; expected one of {', '.join(_KINDS)}.")
        if one not in _OWN and importlib.util.find_spec(one) is None:
            raise MissingFrameworkError(
                f"the tracker {one!r} needs {one}, which is not installed; pip install 'hvdkit[{one}]'."
            )
        if directory is None and one != "progress":
            raise InvalidArgumentError(f"the tracker {one!r} needs a directory, got None; give the monitor one.")
    return list(given)


def tracker(name: str, directory: Path) -> Tracker:
    """A tracker of this name, for the run of this directory, whose name is the run's."""
    path = directory.absolute()
    path.mkdir(parents=True, exist_ok=True)
    return _KINDS[name](path)


class RootSinks:
    """The history and the trackers, which the root alone has; no failure of theirs ends a training.

    Args:
        directory: of the history; None for none.
        trackers: see ``checked_trackers``.
    """

    def __init__(self, directory: Path | None, trackers: Sequence[Any]) -> None:
        self._kept = directory is not None
        directory = directory or Path()
        self._history = History(directory, importlib.metadata.version("hvdkit"))
        made = [_safely(tracker, one, directory) if isinstance(one, str) else one for one in trackers]
        self._trackers = [one for one in made if one is not None]

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


def _safely(action: Callable[..., Any], *arguments: Any) -> Any:
    """What the action returns; None where it fails, for what only looks on ends no training."""
    try:
        return action(*arguments)
    except Exception as error:
        warnings.warn(f"of the monitor: {type(error).__name__}: {error}", stacklevel=2)
        return None
