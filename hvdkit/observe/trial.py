"""The first steps of a script as it is, for ``hvdkit port --try``: its batches and weights, or the batches of another.

A trial records what a script's loaders gave and which weights its optimizers left, and then ends the script. Given the
recorded batches of another script, its loaders give those instead: so two scripts can be compared step by step,
whatever order each would draw, and one process can be given what several ranks had together. Before it ends, a script
reads the first epoch of its training data to the end, without training: which samples these are is recorded, too.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import DataError
from hvdkit.steps import launchers
from hvdkit.steps.agreement import digest

VARIABLE = "HVDKIT_TRIAL"
"""Asks for all this: what ``WantedTrial`` says, as JSON."""
_MOST_NUMBERS = 1_000_000
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WantedTrial:
    """What is asked of a script.

    Attributes:
        directory: where each rank leaves ``rank-K.json`` and ``rank-K.npz``.
        steps: optimizer steps until it is ended, > 0.
        batches: directory of the recording whose batches and learning rates it is given; "" for its own.
        dropout: whether its dropout layers drop anything.
        draws: number of the seed under which its loaders draw: augmentation is another in each run, and shows by that.
        reading_s: seconds in which the rest of the first epoch is read; then it counts as endless.
    """

    directory: str
    steps: int
    batches: str = ""
    dropout: bool = True
    draws: int = 0
    reading_s: float = 60.0

    def variable(self) -> str:
        """The value of the environment variable."""
        return json.dumps(vars(self))


@dataclass
class TrialRecording:
    """What a rank's script did.

    Attributes:
        events: what its loaders gave, in order: {"batch": its form and its arrays}, {"unknown": type}, or
            {"end": True}.
        steps: of each optimizer step: "digest" and "start" of the optimizer's weights, after it and before its first,
            as digests of all their bits; its "rate", and the script's "own rate" where it was given another's;
            "finite"; "drew": random numbers were drawn between the batch and the step; "optimizer", a number.
        notes: what keeps ranks from being one process, by name.
        epochs: of each loader that it trains on, in its first epoch: the number of "rows" in all, in the largest
            "batch" and in the "last" one; "why": why they are not all known, or "".
        same: it would have drawn the batches that it was given; None where it was given none.
        arrays: "b0", "b1", ... of the batches; of each step s a part of the weights "w{s}" and of their gradients
            "g{s}"; of each optimizer o the same part of its first weights "s{o}"; of each epoch e and array c of its
            batches "e{e}c{c}", a digest of each sample's part.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    same: bool | None = None
    arrays: dict[str, Array] = field(default_factory=dict)

    def write(self, directory: Path, rank: int) -> None:
        """Write the two files of a rank."""
        directory.mkdir(parents=True, exist_ok=True)
        said = {name: value for name, value in vars(self).items() if name != "arrays"}
        (directory / f"rank-{rank}.json").write_text(json.dumps(said))
        np.savez(directory / f"rank-{rank}.npz", **self.arrays)  # type: ignore[arg-type]


def read(directory: Path, rank: int) -> TrialRecording:
    """What a rank left.

    Raises:
        DataError: nothing, or something else.
    """
    try:
        with np.load(directory / f"rank-{rank}.npz", allow_pickle=False) as file:
            arrays = dict(file)
        return TrialRecording(**json.loads((directory / f"rank-{rank}.json").read_text()), arrays=arrays)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"rank {rank} left no recording of its steps in {directory}: {error}.") from error


# Batches --------------------------------------------------------------------------------------------------------------


class _Unknown(Exception):  # noqa: N818 - it becomes an event
    """A batch holds something that cannot be written down."""


def _packed(value: Any, arrays: dict[str, Array]) -> dict[str, Any]:
    """A batch as JSON: its "form", and the names of its "arrays", which are put beside the others."""
    names: list[str] = []

    def form(part: Any) -> dict[str, Any]:
        if part is None or isinstance(part, (bool, int, float, str)):
            return {"is": part}
        if type(part) in (list, tuple):
            return {type(part).__name__: [form(one) for one in part]}
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return {"dict": {key: form(one) for key, one in part.items()}}
        library = type(part).__module__.split(".")[0]
        try:
            array = np.asarray(part.detach().cpu().numpy() if library == "torch" else part.numpy())
        except (AttributeError, TypeError, NotImplementedError, RuntimeError):
            if not isinstance(part, np.ndarray):
                raise _Unknown(type(part).__name__) from None
            array = part
        if array.dtype.kind == "O":
            array = array.astype("S")  # TensorFlow's strings
        if array.dtype.kind not in "biufcS":
            raise _Unknown(f"{type(part).__name__} of {array.dtype}")
        names.append(f"b{sum(one.startswith('b') for one in arrays)}")
        arrays[names[-1]] = np.array(array)
        return {"array of": library}

    return {"form": form(value), "arrays": names}


def _unpacked(batch: dict[str, Any], arrays: dict[str, Array]) -> Any:
    """The batch as its loader gave it."""
    left = (arrays[name] for name in batch["arrays"])

    def value(form: dict[str, Any]) -> Any:
        ((kind, inside),) = form.items()
        if kind == "is":
            return inside
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(value, inside))
        if kind == "dict":
            return {key: value(one) for key, one in inside.items()}
        array = next(left)
        if inside == "torch":
            import torch

            return torch.from_numpy(array.copy())
        if inside == "tensorflow":
            import tensorflow as tf

            return tf.constant(array)
        return array.copy()

    return value(batch["form"])


def _samples(batch: dict[str, Any], arrays: dict[str, Array]) -> list[Array]:
    """A digest of each sample's part of each array in a batch; none of arrays that have no row for each sample."""
    rows = [np.ascontiguousarray(arrays[name]) for name in batch["arrays"] if arrays[name].ndim]
    return [np.array([digest(row) for row in one], dtype=np.int64) for one in rows if len(one) == len(rows[0])]


def union(ranks: Sequence[TrialRecording]) -> tuple[TrialRecording, str]:
    """The batches that one process is given for those of several ranks together, and why there are none, or "".

    Args:
        ranks: their recordings. A batch that all of them have alike is taken once: an evaluation is on all the data.
    """
    made = TrialRecording(steps=ranks[0].steps)
    if len({tuple(tuple(event) for event in one.events) for one in ranks}) > 1:
        return made, "the loaders of the ranks were not asked alike"
    for events in zip(*(one.events for one in ranks), strict=True):
        if "unknown" in events[0]:
            return made, f"a batch holds {events[0]['unknown']}, of which no union is known"
        if "end" in events[0]:
            made.events.append({"end": True})
            continue
        packs = [(event["batch"], one.arrays) for event, one in zip(events, ranks, strict=True)]
        alike = len({_digest(*pack) for pack in packs}) == 1
        try:
            made.events.append({"batch": _joined(packs[:1] if alike else packs, made.arrays)})
        except _Unknown as unknown:
            return made, f"the batches of the ranks cannot be put together: {unknown}"
    if not any("batch" in event for event in made.events):
        return made, "no loader that is known (DataLoader, tf.data, fit) gave the batches"
    return made, ""


def on_same_batches(ranks: Sequence[TrialRecording]) -> bool:
    """Whether all ranks were given the same batches only, where not all of their numbers are equal anyway."""
    packs = [[(event["batch"], one.arrays) for event in one.events if "batch" in event] for one in ranks]
    numbers = [one for name, one in ranks[0].arrays.items() if name.startswith("b")]
    if not any((one != one.reshape(-1)[:1]).any() for one in numbers):
        return False
    return all(len({_digest(*pack) for pack in row}) == 1 for row in zip(*packs, strict=False))


def _joined(packs: Sequence[tuple[dict[str, Any], dict[str, Array]]], arrays: dict[str, Array]) -> dict[str, Any]:
    """The ranks' batches as one, arrays one after the other; new arrays go into ``arrays``."""
    form = packs[0][0]["form"]
    if any(batch["form"] != form for batch, _ in packs):
        raise _Unknown("they have different forms")
    names: list[str] = []
    for parts in zip(*([one[name] for name in batch["arrays"]] for batch, one in packs), strict=True):
        if len(parts) > 1 and (parts[0].ndim == 0 or len({part.shape[1:] for part in parts}) > 1):
            raise _Unknown(f"arrays of the shapes {', '.join(str(part.shape) for part in parts)}")
        names.append(f"b{len(arrays)}")
        arrays[names[-1]] = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return {"form": form, "arrays": names}


def _digest(batch: dict[str, Any], arrays: dict[str, Array]) -> int:
    """Of a batch: its form and the bits of its arrays."""
    return hash((json.dumps(batch["form"]), *(digest(arrays[name]) for name in batch["arrays"])))


# The script's process -------------------------------------------------------------------------------------------------


@dataclass
class _Epoch:
    """One pass over a loader.

    Attributes:
        draw: gives its next batch.
        samples: of each batch, what ``_samples`` says.
        steps: the numbers of the optimizer steps before which it gave a batch.
        ended: before which step it ended; None for not yet.
        why: why its samples are not known, "" where they are.
    """

    draw: Callable[[], Any]
    samples: list[list[Array]] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    ended: int | None = None
    why: str = ""

    def note(self, event: dict[str, Any], arrays: dict[str, Array], step: int) -> None:
        """What it gave in front of a step."""
        if "end" in event:
            self.ended = step
            return
        self.samples.append(_samples(event["batch"], arrays) if "batch" in event else [])
        if not self.samples[-1]:
            self.why = f"a batch holds {event.get('unknown', 'no arrays')}"


class Trial:
    """Records a script, or gives it the batches of another. Called where a framework's own functions were.

    Attributes:
        made: what is recorded.
        seed: with which the script begins: another on each rank, so that what a broadcast makes equal was not before.
        draws: see ``WantedTrial``.
        batches: how many are an epoch of ``fit``; None where the loader's end is the epoch's.
        evaluating: whether ``fit`` evaluates.
    """

    def __init__(self, wanted: WantedTrial, rank: int) -> None:
        self._wanted, self._rank, self.seed, self.draws = wanted, rank, rank, wanted.draws
        self._given = read(Path(wanted.batches), rank) if wanted.batches else None
        self._left = iter(self._given.events if self._given else ())
        self.made = TrialRecording()
        self._weights: dict[int, int] = {}
        self._states: Any = None
        self._drew = False
        self._epochs: dict[int, _Epoch] = {}  # by the loader's iterator
        self._past: list[_Epoch] = []
        self._keep: list[object] = []
        self.batches: int | None = None
        self.evaluating = False

    def note(self, what: str) -> None:
        """Something that keeps ranks from being one process."""
        if what not in self.made.notes:
            self.made.notes.append(what)

    def drawn(self, draw: Callable[[], Any]) -> Any:
        """What a loader does under a seed of this run, so that only what is random in it differs between runs."""
        seed(1000 * (self.draws + 1) + len(self.made.steps))
        try:
            return draw()
        finally:
            seed(len(self.made.steps) + 1)

    def batch(self, draw: Callable[[], Any], loader: object = None) -> Any:
        """What a loader gives: the next batch, or another's.

        Args:
            draw: gives it.
            loader: whose pass this is: its iterator.
        Raises:
            StopIteration: there is none.
        """
        arrays = self.made.arrays if self._given is None else {}
        value, own = self._event(draw, arrays)
        self._passed(draw, loader, own, arrays)
        event = own
        if self._given is None:
            self.made.events.append(own)
        else:
            event = next(self._left, {})
            if not event:
                self.finish()
            same = set(event) == set(own)
            if "batch" in event:
                same = same and _digest(event["batch"], self._given.arrays) == _digest(own["batch"], arrays)
                value = _unpacked(event["batch"], self._given.arrays)
            self.made.same = same and self.made.same is not False
        if "end" in event:
            raise value if "end" in own else StopIteration
        self._states, self._drew = _random_states(), False
        return value

    def _event(self, draw: Callable[[], Any], arrays: dict[str, Array]) -> tuple[Any, dict[str, Any]]:
        """What a loader gives, a batch or the error that ends it, and how that is recorded."""
        value: Any = None
        try:
            value = self.drawn(draw)
            return value, {"batch": _packed(value, arrays)}
        except _Unknown as unknown:
            return value, {"unknown": str(unknown)}
        except Exception as error:
            if not isinstance(error, StopIteration) and type(error).__name__ != "OutOfRangeError":
                raise
            return error, {"end": True}

    def _passed(self, draw: Callable[[], Any], loader: object, event: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Note of a loader's pass what it gave."""
        if self.evaluating:
            return
        if id(loader) not in self._epochs:
            self._keep.append(loader)  # no other one will have its id
            self._epochs[id(loader)] = _Epoch(draw)
            self._past.append(self._epochs[id(loader)])
        epoch = self._epochs[id(loader)]
        epoch.note(event, arrays, len(self.made.steps))
        if "end" in event:
            del self._epochs[id(loader)]  # the next epoch may have the same iterator
        else:
            epoch.steps.add(len(self.made.steps))

    def _read_first_epochs(self) -> None:
        """Record the first epoch of each loader that is trained on, which is each that gives batches to each step."""
        first = [one for one in self._past if 0 in one.steps]
        first = [one for one in first if one.ended != 0] or first[-1:]  # what ended before a step was evaluated
        trained = [one for one in first if 1 in one.steps] or first[-1:]
        until = time.monotonic() + self._wanted.reading_s
        for number, epoch in enumerate(trained if self.made.steps else ()):
            while not epoch.why and epoch.ended is None and len(epoch.samples) != self.batches:
                self._read_on(epoch, until)
            columns = {len(one) for one in epoch.samples}
            if len(columns) > 1:
                epoch.why = epoch.why or "its batches have different forms"
            sizes = [len(one[0]) for one in epoch.samples if one]
            self.made.epochs.append({"rows": sum(sizes), "batch": max(sizes, default=0), "last": (sizes or [0])[-1],
                                     "why": epoch.why})  # fmt: skip
            for column in range(0 if epoch.why else columns.pop()):
                self.made.arrays[f"e{number}c{column}"] = np.concatenate([one[column] for one in epoch.samples])

    def _read_on(self, epoch: _Epoch, until: float) -> None:
        """Read one more batch of an epoch."""
        arrays: dict[str, Array] = {}
        try:
            _, event = self._event(epoch.draw, arrays)
        except Exception as error:
            epoch.why = f"reading on ended with {type(error).__name__}"
            return
        epoch.note(event, arrays, len(self.made.steps))
        if "end" not in event and time.monotonic() > until:
            epoch.why = f"its end was not reached within {self._wanted.reading_s:g} s"

    def rate(self) -> float | None:
        """The learning rate of the next step, where another's is to be used."""
        at = len(self.made.steps)
        return self._given.steps[at]["rate"] if self._given and at < len(self._given.steps) else None

    def begin(self, optimizer: object, weights: Sequence[Array], gradients: Sequence[Array]) -> None:
        """A step of an optimizer begins."""
        if id(optimizer) not in self._weights:
            number = self._weights[id(optimizer)] = len(self._weights)
            self.made.arrays[f"s{number}"] = _part(weights)
        self._start = _digest_of(weights)
        self.made.arrays[f"g{len(self.made.steps)}"] = _part(gradients)
        self._drew |= self._states is not None and self._states != _random_states()

    def end(self, optimizer: object, weights: Sequence[Array], rate: float, own_rate: float | None = None) -> None:
        """It has ended; after the last one that is wanted the script ends.

        One without gradients that moves nothing is none: Horovod's ``broadcast_optimizer_state`` makes slots by it.
        """
        part, digest_of_all = _part(weights), _digest_of(weights)
        if digest_of_all == self._start and not self.made.arrays[f"g{len(self.made.steps)}"].any():
            return
        self.made.arrays[f"w{len(self.made.steps)}"] = part
        own_rate = rate if own_rate is None else own_rate
        self.made.steps.append({
            "digest": digest_of_all, "start": self._start, "rate": rate, "own rate": own_rate, "drew": self._drew,
            "finite": bool(np.isfinite(part).all()), "optimizer": self._weights[id(optimizer)],
        })  # fmt: skip
        if len(self.made.steps) >= self._wanted.steps:
            self.finish()

    def epoch(self) -> None:
        """An epoch of Keras' ``fit`` ends: what it evaluates then comes from other loaders."""
        if self.made.steps:
            for one in self._past:
                one.ended = len(self.made.steps) if one.ended is None else one.ended
            self.finish()

    def finish(self) -> None:
        """Write what there is, and end the script.

        Raises:
            SystemExit: always.
        """
        self.write()
        raise SystemExit(0)

    def write(self) -> None:
        """Write what there is."""
        if not self.made.epochs:
            self._read_first_epochs()
        self.made.write(Path(self._wanted.directory), self._rank)

    def drawing(self) -> None:
        """A framework's generator, whose state does not show it, is used."""
        self._drew = True

    def drops(self) -> bool:
        """Whether dropout layers drop anything; one of them asks."""
        self.note("dropout")
        return self._wanted.dropout


@functools.cache
def current() -> Trial:
    """The trial of this process.

    Raises:
        DataError: the recording whose batches it is to be given cannot be read.
    """
    launched = launchers.detect(os.environ)
    return Trial(WantedTrial(**json.loads(os.environ[VARIABLE])), launched.rank if launched else 0)


def seed(number: int) -> None:
    """Seed Python's generator, NumPy's, and those of the frameworks that are there."""
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "manual_seed"):
        sys.modules["torch"].manual_seed(number)
    seeds = sys.modules.get("tensorflow.python.framework.random_seed")
    if seeds is not None:
        seeds.set_seed(number)


def _random_states() -> Any:
    torch = sys.modules.get("torch")
    framework = torch.get_rng_state().numpy().tobytes() if torch is not None else b""
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        framework += torch.cuda.get_rng_state().numpy().tobytes()
    return random.getstate(), np.random.get_state(legacy=True)[2], framework  # type: ignore[index]


def _digest_of(arrays: Sequence[Array]) -> int:
    return digest(np.array([digest(one) for one in arrays], dtype=np.int64))


def _part(arrays: Sequence[Array]) -> Array:
    """Evenly spaced numbers of all, float64, at most a million or so."""
    total = sum(one.size for one in arrays)
    stride = max(1, total // _MOST_NUMBERS)
    parts: Iterator[Array] = (np.asarray(one, dtype=np.float64).reshape(-1)[::stride] for one in arrays)
    return np.concatenate([np.zeros(0), *parts])


# A script in the place of another -------------------------------------------------------------------------------------


def run_script(source: str, script: str) -> None:
    """Run what ``source`` holds as ``script`` would run: with its name, directory and arguments, from fixed seeds."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = script
    sys.argv[:] = [script, *sys.argv[3:]]
    sys.path.insert(0, str(Path(script).resolve().parent))  # -P has left it out
    here = current()
    seed(here.seed)
    try:
        exec(compile(Path(source).read_bytes(), script, "exec"), vars(module))  # noqa: S102 - the user's own script
    finally:
        here.write()


if __name__ == "__main__":  # python -P -m hvdkit.observe.trial SOURCE SCRIPT.py ARGUMENT ...
    from hvdkit.observe import trial  # whose ``current`` the frameworks' marks ask

    trial.run_script(sys.argv[1], sys.argv[2])
