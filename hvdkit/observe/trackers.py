"""Where a training's numbers go beside its history: libraries that track experiments, Prometheus, a line of progress.

Each library writes with its own code, is imported when it is asked for, and is used by the root alone. A job that is
resumed in the same directory goes on in the same run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
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

    def begin(self, step: int, steps: int | None = None) -> None:
        """A job begins after ``step`` steps of a training of ``steps`` (None: not known)."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers of the window that ends with ``step``, by name."""
        raise NotImplementedError

    def report(self, text: str) -> None:
        """A sentence about what is wrong."""

    _failed = False

    def fail(self) -> None:
        """The training has failed; ``close`` follows."""
        self._failed = True

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


def bar(share: float, width: int) -> str:
    """So much of ``width`` characters filled as is done."""
    done = math.floor(width * min(1.0, max(0.0, share)))
    return "#" * done + "." * (width - done)


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


def require_known(name: str) -> None:
    """Refuse a name on every rank, though the root alone makes a tracker of it.

    Raises:
        InvalidArgumentError: there is no tracker of this name.
        MissingFrameworkError: its library is not installed.
    """
    if name not in _KINDS:
        raise InvalidArgumentError(f"there is no tracker {name!r}; expected one of {', '.join(_KINDS)}.")
    if name not in _OWN and importlib.util.find_spec(name) is None:
        raise MissingFrameworkError(
            f"the tracker {name!r} needs {name}, which is not installed; pip install 'hvdkit[{name}]'."
        )


def tracker(name: str, directory: str | os.PathLike[str]) -> Tracker:
    """A tracker of this name.

    Args:
        name: "tensorboard", "mlflow", "wandb", "prometheus" or "progress".
        directory: of the run; its name is the run's name.
    Raises:
        InvalidArgumentError: there is none of this name.
        MissingFrameworkError: its library is not installed.
    """
    require_known(name)
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return _KINDS[name](path)


def _same_id(file: Path, new: Callable[[], str]) -> str:
    """The id that a run of this directory had before, else a new one, which is kept."""
    if file.is_file() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    made = new()
    file.write_text(f"{made}\n", encoding="utf-8")
    return made


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/``; what an earlier job wrote of later steps is no longer shown.

    By the library's record writer, since its summary writer imports all of TensorFlow where that is installed.

    Args:
        directory: of the run.
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
    """A run in ``MLFLOW_TRACKING_URI``, else in ``mlflow.db`` beside the history; reports are its description.

    Args:
        directory: of the run; ``mlflow-run`` in it holds the run's id.
    """

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
        self._client.set_terminated(self._run, "FAILED" if self._failed else "FINISHED")


class WandB(Tracker):
    """A run of Weights & Biases, offline unless ``WANDB_MODE`` says otherwise; ``wandb sync`` uploads it.

    Args:
        directory: of the run; ``wandb-run`` in it holds the run's id.
    """

    def __init__(self, directory: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        own = _same_id(directory / "wandb-run", lambda: uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hvdkit"), name=directory.name, id=own, dir=str(directory),
            mode=mode, resume=None if mode == "offline" else "allow",
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def report(self, text: str) -> None:
        self._run.alert("hvdkit", text)

    def close(self) -> None:
        self._run.finish(int(self._failed))


class Prometheus(Tracker):
    """Writes ``metrics.prom`` for the textfile collector of a node exporter, whole or not at all.

    Args:
        directory: of the run; its name is the label ``run``.
    Source: Prometheus, text-based exposition format 0.0.4.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "metrics.prom"
        self._label = f'run="{_escaped(directory.name)}"'
        self._step, self._steps, self._reports, self._begun = 0, 0, 0, False
        self._values: dict[str, float] = {}

    def begin(self, step: int, steps: int | None = None) -> None:
        self._step, self._steps, self._begun = step, steps or 0, True
        self._write()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step, self._values = step, dict(values)
        self._write()

    def report(self, _text: str) -> None:
        self._reports += 1
        self._write()

    def close(self) -> None:
        if self._begun:  # what an earlier job wrote stays where this one took no step
            self._write()

    def _write(self) -> None:
        rows = [
            ("step", "gauge", "Steps that are done.", self._step),
            ("steps", "gauge", "Steps of the whole training, 0 where that is not known.", self._steps),
            ("reports_total", "counter", "What was wrong in a lasting way since this job began.", self._reports),
            ("time_seconds", "gauge", "When this was written, in seconds since 1970.", round(time.time(), 3)),
        ]
        text = "".join(
            f"# HELP hvdkit_{name} {help_}\n# TYPE hvdkit_{name} {kind}\nhvdkit_{name}{{{self._label}}} {value}\n"
            for name, kind, help_, value in rows
        )
        text += "# HELP hvdkit_value What the training said of the last window.\n# TYPE hvdkit_value gauge\n"
        for name, value in self._values.items():
            text += f'hvdkit_value{{{self._label},name="{_escaped(name)}"}} {value!r}\n'
        fresh = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._file)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_KINDS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB, "prometheus": Prometheus,
    "progress": lambda _: Progress(),
}  # fmt: skip
_OWN = ("prometheus", "progress")
"""Those that need no library, which the others have their names of."""


# What the root tells --------------------------------------------------------------------------------------------------


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
            made = _safely(tracker, one, directory) if isinstance(one, str) else one
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
            require_known(one)
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
