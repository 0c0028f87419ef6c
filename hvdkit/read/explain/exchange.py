"""What a step waits for when its last rank has its gradients: the steps' times and the timeline on one clock.

A timeline alone knows neither what of an exchange the backward pass hides, nor how long a tensor waits until Horovod
takes it up: of these two tools each sees half.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.allreduce import NUMBER_BYTES
from hvdkit.common.units import bytes_text, duration_text, share_text, shortened
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import SENTENCES, Cause, many_small
from hvdkit.read.timeline.causes import outside_cache
from hvdkit.read.timeline.columns import TimelineColumns, exchanges
from hvdkit.read.timeline.measures import covered, union

KINDS = frozenset({"small-tensors", "large-tensors", "negotiation", "metrics", "sparse"})
"""What is told here."""
_LEAST_STEPS = 10
_LEAST = 0.07
"""Share of a step from which on data that moves is a cause; healthy jobs move theirs, too."""
_LEAST_WAIT, _LEAST_WAIT_US = 0.1, 1500.0
"""Share of a step, and microseconds, from which on waiting for Horovod is one: a cycle is a millisecond by default."""
_MANY = 8
"""Small exchanges in a step from which on waiting for each of them is on account of their number."""
_ANEW = 0.2
"""Part of the operations that are negotiated anew, from which on it is their names' doing."""


def causes(columns: TimelineColumns, start: int, waits: Floats, place: Path) -> list[Cause] | None:
    """The causes in the exchange; None where too few steps are in both recordings.

    Args:
        columns: the operations of the timeline.
        start: when the timeline begins, microseconds since the epoch of Unix.
        waits: (steps, 3), of each step when it began, when its last rank had its gradients and when it was complete;
            seconds since the epoch of Unix, on the clock of the rank that wrote the timeline.
        place: the timeline, for the evidence.
    """
    steps = waits * 1e6 - start
    if not len(columns.begin):
        return None
    inside = (steps[:, 0] >= columns.begin.min() - 1e6) & (steps[:, 1] <= columns.end.max())
    begun, ready, ended = steps[inside & (steps[:, 2] >= columns.begin.min())].T
    if len(begun) < _LEAST_STEPS:
        return None
    ends = np.sort(columns.end)
    last = np.maximum(ready, ends[np.maximum(np.searchsorted(ends, ended, side="right") - 1, 0)])
    moved = covered(union(*columns.exchange.T), ready, last)
    rows = (columns.begin >= begun[0]) & (columns.begin < ended[-1])
    step = float((ended - begun).mean())
    found, left = _gathered_and_numbers(columns, np.flatnonzero(rows), np.stack([begun, ready, last]), step, place.name)
    found += _named(columns, rows, left * moved, left * (last - ready - moved), step, place.name)
    factor = _without_recording(steps, inside, ended - ready)
    whole = float(np.median(steps[:, 2] - steps[:, 0])) / float(np.median(ended - begun))
    return [replace(one, lost_s=factor * one.lost_s, share=factor * one.share / whole) for one in found]


def _without_recording(steps: Floats, inside: NDArray[np.bool_], waited: Floats) -> float:
    """How much longer or shorter the exchange is in steps that the timeline does not hold: writing it takes time, too.

    Args:
        steps: (steps, 3), as ``causes`` has them.
        inside: which of them the timeline holds.
        waited: of these, from the last rank's gradients to the end.
    """
    others = (steps[:, 2] - steps[:, 1])[~inside]
    if len(others) < _LEAST_STEPS or not waited.mean() > 0:
        return 1.0
    usual = [np.minimum(seconds, np.quantile(seconds, 0.9)).mean() for seconds in (others, waited)]  # without stalls
    return float(np.clip(usual[0] / usual[1], 0.1, 3.0))


def _gathered_and_numbers(
    columns: TimelineColumns, rows: NDArray[np.intp], steps: Floats, step: float, where: str
) -> tuple[list[Cause], float]:
    """Sparse gradients, which are gathered, and numbers that are averaged one by one after the gradients.

    Each moment after the last rank was ready is on account of the operation that ends next.

    Args:
        rows: which operations count.
        steps: (3, steps), when each began, when its last rank was ready and when its last operation ended.
    Returns:
        The causes, and the part of that time that they leave.
    """
    begun, ready, last = steps
    rows = rows[np.argsort(columns.end[rows], kind="stable")]
    at = np.clip(np.searchsorted(begun, columns.begin[rows], side="right") - 1, 0, len(begun) - 1)
    before = np.concatenate([[-np.inf], columns.end[rows][:-1]])
    spent = np.maximum(0.0, np.minimum(columns.end[rows], last[at]) - np.maximum(before, ready[at]))
    gathered = np.array([tensor.kind == "ALLGATHER" for tensor in columns.tensors])[columns.tensor[rows]]
    numbers = ~gathered & (columns.bytes[rows] <= NUMBER_BYTES) & (columns.begin[rows] >= ready[at])
    numbers &= columns.begin[rows] >= before  # one after the other: gradients are announced together
    whole, count = float((last - ready).sum()) or 1.0, len(begun)
    found, left = [], 1.0
    for kind, chosen in (("sparse", gathered), ("metrics", numbers)):
        lost = float(spent[chosen].sum()) / count
        if lost < _LEAST * step or (kind == "metrics" and _anew(columns, np.isin(np.arange(len(columns.begin)), rows))):
            continue
        left -= count * lost / whole
        names = columns.tensors[int(columns.tensor[rows[chosen]][int(spent[chosen].argmax())])].name
        each = f"{chosen.sum() / count:.3g} times per step"
        what, advice = SENTENCES[kind]
        seen = f"{where}: {each}, such as {shortened(names, 40)}; {duration_text(lost)} of a step after its last rank "
        found.append(Cause(kind, lost / 1e6, lost / step, what.format(each=each), f"{seen}was ready.", advice))
    return found, max(0.0, left)


def _named(
    columns: TimelineColumns, rows: NDArray[np.bool_], moved: Floats, waited: Floats, step: float, where: str
) -> list[Cause]:
    """Microseconds of each step in which data moved, and in which ranks waited for Horovod to move it, to causes."""
    every, count = exchanges(columns, rows), len(moved)
    little, times = every.little, every.times
    many = float(little.sum()) / count
    large = float(moved.mean() * times[~little].sum() / (times.sum() or 1.0))
    small, waiting = float(moved.mean()) - large, float(waited.mean())
    anew = _anew(columns, rows)
    found = []
    if many >= _MANY:
        small, waiting = (small, waiting) if anew else (small + waiting, 0.0)
        if small >= _LEAST * step:
            what, advice = many_small(many)
            seen = f"{where}: {many:.0f} exchanges of at most 64 KB in a step; {duration_text(small)} of them after "
            found.append(
                Cause("small-tensors", small / 1e6, small / step, what, f"{seen}its last rank was ready.", advice)
            )
    if waiting >= max(_LEAST_WAIT * step, _LEAST_WAIT_US):
        found.append(_waiting(waiting, step, anew, where))
    if large >= _LEAST * step:
        size = float(np.nansum(every.bytes[~little])) / count
        found.append(
            Cause(
                "large-tensors", large / 1e6, large / step,
                f"Large tensors are reduced{_largest(columns, rows)}, and the backward pass does not hide it.",
                f"{where}: {bytes_text(size)} in a step; {duration_text(large)} of them after its last rank was ready.",
                SENTENCES["large-tensors"][1],
            )
        )  # fmt: skip
    return found


def _largest(columns: TimelineColumns, rows: NDArray[np.bool_]) -> str:
    """The tensor that is most of the bytes, in brackets; "" where none is."""
    known = rows & ~np.isnan(columns.bytes)
    sums = np.bincount(columns.tensor[known], columns.bytes[known], minlength=1)
    share = sums.max() / (sums.sum() or 1.0)
    name = shortened(columns.tensors[int(sums.argmax())].name, 40)
    return f" ({share_text(share)} is {name})" if share >= 0.5 and len(columns.tensors) > 1 else ""


def _anew(columns: TimelineColumns, rows: NDArray[np.bool_]) -> str:
    """Why tensors are negotiated anew in every step, a word for programs; "" where they are not."""
    counts = np.bincount(columns.tensor[rows], minlength=1)
    if (counts == 1).sum() >= _ANEW * rows.sum():
        return "names"
    return "cache" if outside_cache(float(columns.missed[rows].mean()), int((counts > 0).sum())) else ""


def _waiting(waiting: float, step: float, anew: str, where: str) -> Cause:
    """Microseconds of a step in which ranks wait for Horovod, as a cause; ``anew``: why tensors are negotiated anew."""
    what, advice = SENTENCES[anew or "cycle"]
    seen = f"{where}: {duration_text(waiting)} of a step after its last rank was ready, and no data moves yet."
    return Cause("negotiation", waiting / 1e6, waiting / step, what, seen, advice)
