"""What a step waits for when its last rank has its gradients: the steps' times and the timeline on one clock.

A timeline alone knows neither what the backward pass hides, nor how long a tensor waits until Horovod takes it up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.allreduce import COMPRESSIONS, NUMBER_BYTES
from hvdkit.common.units import bytes_text, duration_text, share_text, shortened
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import SENTENCES, Cause, many_small
from hvdkit.read.spans import covered, union
from hvdkit.read.timeline.columns import NORMS, SHARED, TimelineColumns, exchanges
from hvdkit.read.timeline.results import TimelineSummary, outside_cache

KINDS = frozenset({"small-tensors", "large-tensors", "negotiation", "metrics", "shard_state", "sparse", NORMS})
"""What is told here."""
_LEAST_STEPS = 10
_LEAST = 0.07
"""Share of a step from which on data that moves is a cause; healthy jobs move theirs, too."""
_LEAST_WAIT, _LEAST_WAIT_US = 0.1, 1500.0
"""Share of a step, and microseconds, from which on waiting for Horovod is one: a cycle is a millisecond by default."""
_MANY = 8
"""Small exchanges in a step from which on waiting for each of them is on account of their number."""
_PAYS = 0.05
"""Share of a step from which on compression, or a stronger one, is worth its rounding."""
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
    rows = (columns.begin >= begun[0]) & (columns.begin < ended[-1])
    shared = np.array([tensor.role == SHARED for tensor in columns.tensors])[columns.tensor]
    # What Horovod broadcasts is never in its response cache.
    count, step, anew = len(begun), float((ended - begun).mean()), _anew(columns, rows & ~shared)
    factor = _without_recording(steps, inside, ended - ready)
    whole = float(np.median(steps[:, 2] - steps[:, 0])) / float(np.median(ended - begun))
    found: list[Cause] = []

    def add(kind: str, lost: float, said: tuple[str, str], seen: str) -> None:
        what, advice = said
        evidence = f"{place.name}: {seen}"
        found.append(Cause(kind, factor * lost / 1e6, factor * lost / step / whole, what, evidence, advice))

    # Sparse gradients, which are gathered, statistics of BatchNorm, and numbers that are averaged one by one after the
    # gradients: each moment after the last rank was ready is on account of the operation that ends next.
    order = np.flatnonzero(rows)[np.argsort(columns.end[rows], kind="stable")]
    at = np.clip(np.searchsorted(begun, columns.begin[order], side="right") - 1, 0, count - 1)
    before = np.concatenate([[-np.inf], columns.end[order][:-1]])
    spent = np.maximum(0.0, np.minimum(columns.end[order], last[at]) - np.maximum(before, ready[at]))
    gathered = np.array([tensor.kind == "ALLGATHER" and not tensor.role for tensor in columns.tensors])[
        columns.tensor[order]
    ]
    norms = np.array([tensor.role == NORMS for tensor in columns.tensors])[columns.tensor[order]]
    words = np.array([tensor.name.endswith(".word") for tensor in columns.tensors])[columns.tensor[order]]
    numbers = ~gathered & ~norms & ~words & (columns.bytes[order] <= NUMBER_BYTES) & (columns.begin[order] >= ready[at])
    numbers &= columns.begin[order] >= before  # one after the other: gradients are announced together
    left = 1.0
    kinds = {"sparse": gathered, NORMS: norms, "metrics": numbers, "shard_state": shared[order]}
    for kind, chosen in kinds.items():
        lost = float(spent[chosen].sum()) / count
        if lost < _LEAST * step or (kind == "metrics" and anew):
            continue
        left = max(0.0, left - count * lost / (float((last - ready).sum()) or 1.0))
        name = columns.tensors[int(columns.tensor[order[chosen]][int(spent[chosen].argmax())])].name
        each = f"{chosen.sum() / count:.3g} times per step"
        what, advice = SENTENCES[kind]
        seen = f"{each}, such as {shortened(name, 40)}; {duration_text(lost)} of a step after its last rank was ready."
        add(kind, lost, (what.format(each=each), advice), seen)

    # What is left of the time after the last rank was ready: data moves, or ranks wait for Horovod to move it.
    moved = left * float(covered(union(*columns.exchange.T), ready, last).mean())
    waiting = left * float((last - ready).mean()) - moved
    every = exchanges(columns, rows)
    little, times = every.little, every.times
    many = float(little.sum()) / count
    large = moved * float(times[~little].sum() / (times.sum() or 1.0))
    small = moved - large
    if many >= _MANY:
        small, waiting = (small, waiting) if anew else (small + waiting, 0.0)
        if small >= _LEAST * step:
            seen = (
                f"{many:.0f} exchanges of at most 64 KB in a step; {duration_text(small)} of them after its last rank "
            )
            add("small-tensors", small, many_small(many), f"{seen}was ready.")
    if waiting >= max(_LEAST_WAIT * step, _LEAST_WAIT_US):
        seen = f"{duration_text(waiting)} of a step after its last rank was ready, and no data moves yet."
        add("negotiation", waiting, SENTENCES[anew or "cycle"], seen)
    if large >= _LEAST * step:
        what = f"Large tensors are reduced{_largest(columns, rows)}, and the backward pass does not hide it."
        size = bytes_text(float(np.nansum(every.bytes[~little])) / count)
        seen = f"{size} in a step; {duration_text(large)} of them after its last rank was ready."
        add("large-tensors", large, (what, SENTENCES["large-tensors"][1]), seen)
    return found


def compression(summary: TimelineSummary, lost_s: float, step_s: float) -> str:
    """What fewer bytes would save of an exchange between hosts, a sentence and a blank; "" where that is too little.

    Of the time of data that moves, float32 gradients take less in proportion to their bytes, and packing comes on top.
    What the backward pass hides today is taken to be as long then, so that no more is promised than comes.

    ``lost_s`` of each step of ``step_s`` seconds is from its last rank's gradients until all ranks have the mean.
    """
    steps, batches = summary.steps, summary.batches
    if steps is None or steps.communication is None or batches is None or not steps.bytes:
        return ""
    wide = sum(
        tensor.bytes or 0
        for tensor in summary.tensors
        if (tensor.kind, tensor.dtype) == ("ALLREDUCE", "float32") and 2 * tensor.count > steps.count
    )
    moving = 1e-6 * steps.communication.total / steps.communication.count * batches.large_share
    moved = min(lost_s, moving) * min(1.0, wide / steps.bytes)
    found, best = list[str](), 0.0
    for name, how in COMPRESSIONS.items():
        saved = moved * (1 - how.number / 4) - how.packing_s * wide / 4
        if saved - best >= _PAYS * step_s:
            found.append(f'"{name}" by {duration_text(1e6 * saved)} ({share_text(saved / step_s)})')
            best = saved
    return f"distribute(compression=) would shorten a step: {', '.join(found)}. " if found else ""


def _without_recording(steps: Floats, inside: NDArray[np.bool_], waited: Floats) -> float:
    """How much longer the exchange is in steps that the timeline does not hold: writing it takes time, too."""
    others = (steps[:, 2] - steps[:, 1])[~inside]
    if len(others) < _LEAST_STEPS or not waited.mean() > 0:
        return 1.0
    usual = [np.minimum(seconds, np.quantile(seconds, 0.9)).mean() for seconds in (others, waited)]  # without stalls
    return float(np.clip(usual[0] / usual[1], 0.1, 3.0))


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
