"""What a step takes with gradients in fewer bytes, or with weights that are averaged once in many steps.

One number each, without intervals, from the same model of the network. Packed gradients (int8) travel as an alltoall
and an allgather, which cross each link with as many messages and bytes as the ring of their allreduce would, at most
``AT_ONCE`` numbers at a time. Packing keeps a core of the host busy, and nothing is taken to hide it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdkit.common.allreduce import COMPRESSIONS, Compression
from hvdkit.common.table import Table
from hvdkit.common.units import number_text, share_text
from hvdkit.core.compression import AT_ONCE
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.plan.network import CostModel
from hvdkit.measure.plan.step_time import Delays, Gradient, Workload, exchange, gradients, is_floating

EVERY = "every"
_WAYS = {"none": Compression(math.inf, 0.0), **COMPRESSIONS}
_TITLES = {"bf16": "fp16, bf16"}


@dataclass(frozen=True, slots=True)
class CompressedRow:
    """One number of ranks. Seconds, by the words of ``distribute(compression=)`` ("bf16": "fp16" as well) and "every".

    Attributes:
        ranks: how many.
        every: steps between two averages of the weights.
        steps: of computation, exposed communication, packing and wait, as in ``PredictionRow.step``.
        packing: of it on a core of the host; of "every" none.
        efficiency: computation / step.
        shortest: the shortest of those that average the gradients of each step.
        faster: how many steps of it are taken in the time of one of "none".
    """

    ranks: int
    every: int
    steps: dict[str, float]
    packing: dict[str, float]
    efficiency: dict[str, float]
    shortest: str
    faster: float


def compared(
    model: CostModel, delays: Delays, plan: ReplayPlan, work: Workload, n: int, every: int, growth: float = 1.0
) -> CompressedRow:
    """What each way gives on ``n`` ranks of several hosts.

    Args:
        model: what an allreduce costs.
        delays: how far apart ranks arrive.
        plan: the gradients as they are.
        work: what a rank does besides, with a time of computation.
        n: > 1.
        every: >= 1, steps between two averages of the weights, behind which nothing is computed.
        growth: of a step that has so many ranks.
    Raises:
        InvalidArgumentError: as ``CostModel.draws_s``.
    """
    cost = functools.cache(lambda nbytes: float(model.draws_s(nbytes, n)[0]))
    compute = work.compute_s or 0.0
    numbers = sum(one.elements for one in plan.collectives if is_floating(one))
    packing = {name: numbers * how.packing_s for name, how in _WAYS.items()}
    exposed = {EVERY: exchange(gradients(plan), 0.0, work.fusion, cost).exposed_s / every}
    for name, how in _WAYS.items():
        sent, fusion = gradients(plan, how.number), work.fusion
        if name == "int8":
            part = AT_ONCE * how.number
            sent, fusion = tuple(_in_parts(sent, part)), replace(fusion, threshold=part)
        exposed[name] = exchange(sent, work.hiding_s, fusion, cost).exposed_s + packing[name]
    steps = {name: growth * (compute + exposed[name] + delays.expected_s(n)) for name in (*_WAYS, EVERY)}
    shortest = min(_WAYS, key=lambda name: steps[name])
    efficiency = {name: compute / step for name, step in steps.items()}
    return CompressedRow(n, every, steps, packing, efficiency, shortest, steps["none"] / steps[shortest])


def _in_parts(sent: Iterable[Gradient], part: float) -> Iterable[Gradient]:
    for one in sent:
        count = max(1, math.ceil(one.nbytes / part))
        yield from itertools.repeat(replace(one, nbytes=one.nbytes / count), count)


def table(rows: Sequence[CompressedRow]) -> Table:
    """A line for each number of ranks, of which there is one at least."""
    ways = [*_WAYS, EVERY]
    cells = [
        [
            row.ranks,
            *(f"{number_text(1000 * row.steps[name])} ({share_text(row.efficiency[name])})" for name in ways),
            row.shortest if row.shortest == "none" else f"{row.shortest}, {row.faster:.3g} times as fast",
        ]
        for row in rows
    ]
    titles = [*(_TITLES.get(name, name) for name in _WAYS), f"every={rows[0].every}"]
    return Table("A step in ms (efficiency), by compression=", ("ranks", *titles, "shortest compression"), cells)


def notes_on(rows: Sequence[CompressedRow]) -> list[str]:
    """Sentences below the table."""
    if not rows:
        return []
    ms = {name: number_text(1000 * seconds) for name, seconds in rows[0].packing.items()}
    return [
        f"Packing is in each step of the second table: {ms['int8']} ms of int8 and {ms['bf16']} ms of fp16 and bf16, "
        "on a core of the host, with nothing to hide it. Compression over the memory of one host saves nothing.",
        f"every={rows[0].every} is another guarantee: ranks train apart and average their weights once in "
        f"{rows[0].every} steps (docs/slow_networks.md). Compare what it learns, not its steps alone.",
    ]
