"""``--try``: a script and its distributed form take some steps on the same batches, and their weights are compared."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hvdkit
from hvdkit.common.units import count_text
from hvdkit.errors import DataError
from hvdkit.observe import trial
from hvdkit.observe.trial import TrialRecording, WantedTrial

_LAST_LINES = 12
_STACKS = Path(hvdkit.__file__).parent / "observe" / "startup"
"""Of the ``sitecustomize`` that looks into a script as it is."""
_NEAR = 1e-3
"""How far weights may be apart, as a part of the way moved so far. Threads of TensorFlow add up in any order."""
_NOISE = 1e-5
"""Of the largest gradient. What is smaller may be rounding alone, which Adam and its like turn into whole steps."""
_MORE = 10
"""So many times as far as one process is apart from itself by rounding after a step may 2 ranks be apart from it."""
_HIDES = 0.1
"""Rounding that is this part of the way moved would hide a mistake."""
_SHORT = "the steps move the weights by little more than rounding; give a larger learning rate, or more --try-steps"

_SPARSE = (
    "Keras' own steps of embeddings. Its Adam and the like square each row of a token by itself, hvdkit their sum, "
    "as for a dense gradient; the script took dense ones here"
)
_OWN = "1 rank takes the script's own steps"
_AGAIN = "data drawn without a seed are others on each rank, and in each run"


@dataclass(frozen=True)
class Scripts:
    """One script, and the one that is made of it.

    Attributes:
        path: of the script that was given.
        before, after: their content.
        asks_ddp: whether the given one wants the environment that torchrun makes.
    """

    path: str
    before: bytes
    after: bytes
    asks_ddp: bool = False


@dataclass
class ComparedTrial:
    """What was compared.

    Attributes:
        ok: something was compared, and all of it is equal.
        verdict: one line.
        lines: what was measured, and what was not compared and why.
    """

    ok: bool = False
    verdict: str = ""
    lines: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """The verdict first."""
        return "\n".join([self.verdict, *(f"  {one}" for one in self.lines)])


class _Ended(Exception):  # noqa: N818 - it becomes the verdict
    """Nothing more can be compared, or something differs, or a run came to no end of its own."""


def attempt(scripts: Scripts, arguments: Sequence[str], steps: int, timeout_s: float) -> ComparedTrial:
    """Run both scripts, and compare them.

    Args:
        scripts: the script, and the ported one.
        arguments: the script's own.
        steps: of optimizers, > 0.
        timeout_s: seconds for each run.
    """
    if scripts.after == scripts.before:
        return ComparedTrial(verdict="Nothing was tried: nothing is ported.")
    found = ComparedTrial()
    with tempfile.TemporaryDirectory(prefix="hvdkit-try-") as name:
        runs = _Runs(scripts, list(arguments), steps, timeout_s, Path(name))
        try:
            found.verdict, found.ok = _compare_runs(runs, found.lines), True
        except (_Ended, DataError) as ended:
            found.verdict = str(ended)
    return found


def _compare_runs(runs: _Runs, lines: list[str]) -> str:
    """Compare the ported script on 1 rank with the script itself and then 2 ranks with both.

    Args:
        lines: gets what is measured.
    Returns:
        The verdict where all is equal.
    Raises:
        _Ended: with every other verdict.
    """
    (ours,) = runs.run("the ported script on 1 rank", "ours-1", 1)
    if not ours.steps:
        raise _Ended("Nothing was compared: no step of an optimizer of PyTorch or of Keras on TensorFlow was seen.")
    (theirs,) = runs.run("the script itself", "theirs-1", 0, batches="ours-1")
    said, equal = _compare(ours, theirs)
    order = " The script was given the same batches: by itself it draws another order." if theirs.same is False else ""
    lines.append(f"1 rank and the script itself: {said}.{order}")
    left = sum(one["rows"] for one in theirs.epochs) - sum(one["rows"] for one in ours.epochs)
    if left > 0:
        lines.append(f"1 rank: an epoch leaves out {left} of the script's samples, which fill no step.")
    apart = _rates_apart(ours, theirs)
    if apart is not None:
        other = _span([step["own rate"] for step in theirs.steps])
        lines.append(f"without the port's rates the script has a {other}, another from step {apart + 1} on.")
    if "sparse" in theirs.notes:
        lines.append(f"not compared: {_SPARSE}.")
    if equal is None:
        raise _Ended(f"Nothing was compared: {_SHORT}.")
    if not equal and theirs.steps and ours.steps[0]["start"] != theirs.steps[0]["start"]:
        raise _Ended("Nothing was compared: the script begins with other weights in each run. Let it set a seed.")
    if not equal:
        raise _Ended("Differs: on 1 rank the ported script does not take the script's own steps.")
    if apart is not None and (not apart or left <= 0):
        raise _Ended("Differs: on 1 rank the learning rate is not the script's own.")
    verdict = _two_ranks(runs, lines, theirs, ours)
    if apart is not None:  # a schedule that counts the samples which are left out begins at the same rate
        verdict = verdict.replace("Equal", "Equal but for the learning rate", 1)
    return verdict


def _two_ranks(runs: _Runs, lines: list[str], whole: TrialRecording, again: TrialRecording) -> str:
    """Compare 2 ranks with the script itself, as ``_compare_runs``.

    Args:
        whole, again: two runs in one process, whose epoch is that of the script.
    """
    ranks = runs.run("the ported script on 2 ranks", "ours-2", 2, dropout=False)
    apart = next((at for at, pair in enumerate(zip(*(recording.steps for recording in ranks), strict=False), 1)
                  if len({(step["start"], step["digest"]) for step in pair}) > 1), None)  # fmt: skip
    counts = [len(recording.steps) for recording in ranks]
    if apart is not None or counts[0] != counts[1] or not counts[0]:
        what = f"take {counts[0]} and {counts[1]} steps" if apart is None else f"hold different weights in step {apart}"
        raise _Ended(f"Differs: on 2 ranks the ranks {what}.")
    if not all(step["finite"] for step in ranks[0].steps):
        raise _Ended("Differs: on 2 ranks the weights are not finite.")
    if trial.on_same_batches(ranks):
        raise _Ended("Differs: both of 2 ranks train on the same batches.")
    samples, unknown = _covered(whole, again, ranks)
    lines += [f"2 ranks: {samples}."] if samples else []
    lines += [f"not compared: the samples of an epoch: {unknown}."] if unknown else []
    given, why = trial.union(ranks)
    drew = any(step["drew"] for step in ranks[0].steps[1:] or ranks[0].steps)  # the first one may make weights
    if drew:
        why = "each step draws random numbers, others on each rank"
    if "BatchNorm" in ranks[0].notes:
        why = "BatchNorm takes the statistics of each rank's own samples; sync_batch_norm takes those of all"
    if why:
        lines.append(f"2 ranks with each other: {_steps(ranks[0].steps)}, equal bit for bit.")
        lines.append(f"not compared: 2 ranks with one process: {why}.")
        return f"Equal where that is defined: {_OWN}, and 2 ranks agree with each other."
    given.write(runs.directory / "union", 0)
    (theirs,) = runs.run("one process on the batches of 2 ranks", "theirs-2", 0, batches="union", dropout=False)
    said, equal = _compare(ranks[0], theirs)
    own = [] if equal is not False else _rounding_alone(runs, ranks, theirs)
    if own:
        said, equal = _compare(ranks[0], theirs, own)
    off = " Dropout was off, whose masks each rank draws." if "dropout" in ranks[0].notes else ""
    lines.append("2 ranks with each other: equal bit for bit.")
    lines.append(f"2 ranks and one process on both ranks' batches: {said}.{off}")
    if any(own):
        change = "when the halves of each batch change places"
        lines.append(f"one process comes {max(own):.1e} apart from itself by rounding, {change}.")
    if equal is None:
        raise _Ended(f"Nothing was compared on 2 ranks: {_SHORT}.")
    if not equal:
        raise _Ended("Differs: 2 ranks do not take the steps of one process on both ranks' batches.")
    where = " where that is defined" if unknown else ""
    return f"Equal{where}: {_OWN}, and 2 ranks those of one process on both ranks' batches."


def _rounding_alone(runs: _Runs, ranks: list[TrialRecording], theirs: TrialRecording) -> list[float]:
    """How far one process is apart from itself, after each step, by the order in which a batch's samples add up."""
    trial.union(ranks[::-1])[0].write(runs.directory / "exchanged", 0)
    what = "one process on the batches of 2 ranks, whose halves changed places"
    (again,) = runs.run(what, "theirs-3", 0, batches="exchanged", dropout=False)
    if len(again.steps) != len(theirs.steps):
        return []
    return [_distance(again, theirs, at) or 0.0 for at in range(len(theirs.steps))]


# An epoch's samples ---------------------------------------------------------------------------------------------------


def _covered(whole: TrialRecording, again: TrialRecording, ranks: Sequence[TrialRecording]) -> tuple[str, str]:
    """Compare the first epoch of the ranks together with that of one process, which has each sample once.

    Args:
        whole, again: two runs of one process; what differs between them is random.
    Returns:
        What was compared, and why not all was compared; "" each where there is nothing to say.
    Raises:
        _Ended: the epochs differ.
    """
    if not whole.epochs or len({len(one.epochs) for one in (whole, again, *ranks)}) > 1:
        return "", "no loader that is known (DataLoader, tf.data, fit) gave the batches"
    said: list[str] = []
    for at, epoch in enumerate(whole.epochs):
        runs = [epoch, again.epochs[at], *(recording.epochs[at] for recording in ranks)]
        why = next((run["why"] for run in runs if run["why"]), "")
        if why:
            return "", why
        rows, trained = epoch["rows"], sum(one["rows"] for one in runs[2:])
        step = sum(one["batch"] for one in runs[2:])
        # One process that drops its last partial batch leaves out samples that ranks may take, at most these.
        slack = epoch["batch"] - 1 if epoch["last"] == epoch["batch"] else 0
        if not -slack <= rows - trained <= (rows % step if step else 0):
            raise _Ended(f"Differs: in an epoch 2 ranks train on {trained} samples, and the script itself on {rows}.")
        fixed = _fixed_columns(whole, again, at, slack)
        if not fixed:
            return f"an epoch of {trained} samples, of the script's {rows}", "each run alters them at random"
        own = Counter(_rows(whole, fixed))
        more = sum((Counter(_rows(recording, fixed)) for recording in ranks), Counter[bytes]()) - own
        twice = sum(count for row, count in more.items() if row in own)
        if twice > slack:
            more_often = f"{twice} of the script's {rows} samples more often than it does"
            raise _Ended(f"Differs: in an epoch 2 ranks train on {more_often}.")
        if more.total() > slack:
            return "", f"{more.total() - twice} of the ranks' {trained} are none of the script's: {_AGAIN}"
        left = f", and leaves out {rows - trained}, which fill no step" if trained < rows else ""
        said.append(f"an epoch is the script's own {rows} samples, each once{left}")
    return "; ".join(dict.fromkeys(said)), ""


def _fixed_columns(whole: TrialRecording, again: TrialRecording, epoch: int, slack: int) -> list[str]:
    """The arrays of an epoch's batches whose samples two runs have in common."""
    names = [one for one in whole.arrays if one.startswith(f"e{epoch}c") and one in again.arrays]
    counts = {name: [Counter(run.arrays[name].tolist()) for run in (whole, again)] for name in names}
    return [one for one, (once, anew) in counts.items() if (anew - once).total() <= slack]


def _rows(recording: TrialRecording, columns: Sequence[str]) -> list[bytes]:
    """A sample's parts as one, of each sample."""
    return [row.tobytes() for row in np.stack([recording.arrays[one] for one in columns], axis=1)]


# What was recorded ----------------------------------------------------------------------------------------------------


def _compare(ours: TrialRecording, theirs: TrialRecording, own: Sequence[float] = ()) -> tuple[str, bool | None]:
    """How many steps are how near, and whether all are near enough, None: not told.

    Args:
        own: how far one process is apart from itself by rounding, after each step, where that is known.
    """
    pairs = list(zip(ours.steps, theirs.steps, strict=False))
    told = _steps([mine for mine, _ in pairs])
    if len(ours.steps) != len(theirs.steps):
        return f"{len(ours.steps)} and {len(theirs.steps)} steps", False
    if all(a["start"] == a["digest"] == b["digest"] for a, b in pairs):
        return f"{told}, which move nothing", None
    if all((a["start"], a["digest"]) == (b["start"], b["digest"]) for a, b in pairs):
        return f"{told}, equal bit for bit", True
    apart = [_distance(ours, theirs, at) for at in range(len(pairs))]
    clear = [one for one in apart if one is not None]
    if not clear:
        return f"{told}, too short to tell from rounding", None
    wider = [_MORE * one for one in own or [0.0] * len(apart)]
    limits = [one if _NEAR < one < _HIDES else _NEAR for one in wider]
    far_at = next((at for at, one in enumerate(apart) if one is not None and not one <= limits[at]), None)
    how = f"{max(clear):.1e} of the way moved apart" if any(clear) else "equal but for rounding"
    far = "" if far_at is None else f", too far (more than {limits[far_at]:.1g}) from step {far_at + 1} on"
    return f"{told}, {how}{far}", far_at is None


def _steps(steps: Sequence[dict[str, Any]]) -> str:
    return f"{count_text(len(steps), 'step')} at a {_span([step['rate'] for step in steps])}"


def _span(rates: Sequence[float]) -> str:
    span = dict.fromkeys(f"{one:g}" for one in (min(rates, default=0.0), max(rates, default=0.0)))
    return f"learning rate of {' to '.join(span)}"


def _rates_apart(ours: TrialRecording, theirs: TrialRecording) -> int | None:
    """The first step whose learning rate is not the one that the script itself had; None without one."""
    pairs = [(mine["rate"], other["own rate"]) for mine, other in zip(ours.steps, theirs.steps, strict=False)]
    unlike = (at for at, pair in enumerate(pairs) if not math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12))
    return next(unlike, None)


def _distance(ours: TrialRecording, theirs: TrialRecording, at: int) -> float | None:
    """How far weights are apart after a step, as a part of how far the steps have moved them; rounding left out.

    None where rounding is so large a part of the way that a mistake would hide in it.
    """
    number = theirs.steps[at]["optimizer"]
    mine, other, start = ours.arrays[f"w{at}"], theirs.arrays[f"w{at}"], theirs.arrays[f"s{number}"]
    if mine.shape != other.shape or other.shape != start.shape:
        return float("inf")
    clear = np.ones(other.shape, dtype=bool)
    for before in range(at + 1):
        size = np.abs(theirs.arrays[f"g{before}"])
        if theirs.steps[before]["optimizer"] == number and size.shape == clear.shape:
            clear &= (size == 0) | (size > _NOISE * size.max(initial=0))
    rounding = 2**-22 * (at + 1) * float(np.linalg.norm(other[clear]))
    apart = max(0.0, float(np.linalg.norm((mine - other)[clear])) - rounding)
    moved = float(np.linalg.norm((other - start)[clear]))
    if not apart and rounding >= _HIDES * moved:
        return None
    return apart / moved if moved else float("inf")


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runs:
    scripts: Scripts
    arguments: list[str]
    steps: int
    timeout_s: float
    directory: Path

    def run(self, what: str, name: str, ranks: int, *, batches: str = "", dropout: bool = True) -> list[TrialRecording]:
        """What each rank recorded.

        Args:
            what: is run, for a reader.
            name: of its directory.
            ranks: of the ported script; 0: the script itself, in one process.
            batches: name of the recording that it is given.
            dropout: see ``WantedTrial``.
        Raises:
            _Ended: with its last lines.
        """
        script = str(Path(self.scripts.path))
        source = self.directory / f"{name}.py"
        source.write_bytes(self.scripts.after if ranks else self.scripts.before)
        wanted = WantedTrial(str(self.directory / name), self.steps, batches and str(self.directory / batches), dropout,
                             draws=2 * ranks + bool(batches), reading_s=self.timeout_s / 4)  # fmt: skip
        environment = {
            **os.environ,
            trial.VARIABLE: wanted.variable(),
            "PYTHONPATH": os.pathsep.join([str(_STACKS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if not ranks and self.scripts.asks_ddp:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port)}  # fmt: skip
        python = [sys.executable, "-P", "-m"]
        launch = [*python, "hvdkit.cli", "launch", "-n", str(ranks), "--no-tag", "--"] if ranks else []
        command = [*python, "hvdkit.observe.trial", str(source), script, *self.arguments]
        try:
            done = subprocess.run(
                [*launch, *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, timeout=self.timeout_s, check=False,
            )  # fmt: skip
            output, ended = done.stdout, f"ended with exit status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            output, ended = late.stdout or b"", f"did not take {self.steps} steps within {self.timeout_s:g} s"
        if ended:
            last = [one for one in output.decode(errors="replace").splitlines() if one.strip()][-_LAST_LINES:]
            raise _Ended("\n".join([f"Failed: {what} {ended}.", *(f"  | {one}" for one in last)]))
        return [trial.read(self.directory / name, rank) for rank in range(max(1, ranks))]
