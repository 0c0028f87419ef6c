"""``hvdkit plan scale``: the time of a step on more ranks than there are, from what was measured on a few."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from hvdkit.common import json_files, plot
from hvdkit.common.allreduce import CYCLE_S, FUSION_BYTES
from hvdkit.common.commands import AT_LEAST_1, FILE, PATH, large_count, number, numbers_of_ranks
from hvdkit.common.intervals import CONFIDENCE, Estimate
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, interval_text, number_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.plan import network
from hvdkit.measure.plan.network import DRAWS, CostModel, Link, estimated
from hvdkit.measure.plan.step_time import (
    EVERY,
    WAYS,
    CompressedRow,
    Delays,
    Fusion,
    PredictedExchange,
    Workload,
    compared,
    exchange,
    gradients,
    measured,
)
from hvdkit.observe.lateness import Floats

GROWTH = Estimate(0.024, 0.0085, 0.067)
"""What each doubling of the ranks beyond those that were measured adds to a step, as a share of it: negotiation,
stragglers, other traffic, a link below its nominal rate. The median and the extremes of the 17 published efficiencies
that docs/plan.md compares with."""
_DOUBLING = tuple(2**power for power in range(11))
_MIB = 2**20
_TENSORS = 100
"""About as many weights as Inception V3 and ResNet-101 have, which docs/plan.md compares with."""


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One number of ranks. Seconds; a step is one update of the weights.

    Attributes:
        ranks, hosts: how many.
        buckets: allreduces in a step.
        communication: of all of them; as straggler, step and efficiency None where the model does not hold.
        exposed: what of it, and of waiting for it, is not hidden behind backward; None without a time of computation.
        straggler: the wait for the slowest rank.
        step: of computation, exposed communication and wait, times ``GROWTH`` where so many ranks were not measured.
        efficiency: computation / step: what of n times the speed of one process is left.
        extrapolated: the slowest of so many ranks is expected beyond all delays that were measured.
        refused: why there is no number; None where there is one.
    """

    ranks: int
    hosts: int
    buckets: int = 0
    communication: Estimate | None = None
    exposed: Estimate | None = None
    straggler: Estimate | None = None
    step: Estimate | None = None
    efficiency: Estimate | None = None
    extrapolated: bool = False
    refused: str | None = None


_TIMES = ("communication", "exposed", "straggler", "step")


class PlannedScale(Document, frozen=True):
    """A prediction; seconds and bytes.

    Attributes:
        model: what an allreduce costs: ``ppn``, and by level ("host", "network") the parameters, the
            pieces of the line through sizes, and what is left over; None for a level that is not known.
        assumed: what was given beside the measurements, by the names of the options, times in seconds.
        rows: one for each number of ranks.
        compressed: what fewer bytes would give, for each number of ranks on several hosts; empty without a time of
            computation.
        notes: what a reader should know, full sentences.
        confidence: of the intervals.
    """

    kind = "plan-scale"
    schema = 2
    written_by = "hvdkit plan scale --json"
    times = frozenset((*_TIMES, "steps", "packing"))

    model: dict[str, Any]
    assumed: dict[str, Any]
    rows: tuple[PredictionRow, ...]
    compressed: tuple[CompressedRow, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE


def predict(model: CostModel, delays: Delays, work: Workload, ranks: Sequence[int]) -> list[PredictionRow]:
    """A row for each number of ranks; without numbers, and with the reason, where the model refuses so many."""
    rows = []
    for n in ranks:
        refused = model.why_not(n)
        row = PredictionRow(n, model.hosts(n), refused=refused)
        rows.append(row if refused else _row(model, delays, work, n, np.random.default_rng([0, n])))
    return rows


def _row(model: CostModel, delays: Delays, work: Workload, n: int, rng: np.random.Generator) -> PredictionRow:
    """The prediction for ``n`` ranks with its intervals; ``rng`` resamples the delays."""
    known: dict[float, Floats] = {}

    def cost(draw: int, nbytes: float) -> float:
        if nbytes not in known:
            known[nbytes] = model.draws_s(nbytes, n)
        return float(known[nbytes][draw])

    def exchanged(draw: int) -> PredictedExchange:
        return exchange(work.gradients, work.hiding_s, work.fusion, functools.partial(cost, draw))

    exchanges = [exchanged(0)]
    alike = all(np.ptp(times) == 0 for times in known.values())  # of a network that was given
    exchanges += DRAWS * exchanges if alike else map(exchanged, range(1, 1 + DRAWS))
    waits = delays.draws_s(n, rng)
    found = PredictionRow(
        n,
        model.hosts(n),
        len(exchanges[0].buckets) if n > 1 else 0,
        communication=estimated(np.array([one.busy_s for one in exchanges])),
        straggler=estimated(waits),
        extrapolated=delays.extrapolates(n),
    )
    if work.compute_s is None:
        return found
    compute = work.compute_s
    exposed = np.array([one.exposed_s for one in exchanges]) if n > 1 else np.zeros(1 + DRAWS)
    step = estimated(compute + exposed + waits)
    if n > model.measured(n):
        low, value, high = _growth(model, n)
        ends = (step.value if end is None else end for end in (step.low, step.high))
        step = Estimate(step.value * value, *(end * factor for end, factor in zip(ends, (low, high), strict=True)))
    if step.low is not None:
        step = replace(step, low=max(step.low, compute))
    efficiency = Estimate(compute / step.value, *(end and compute / end for end in (step.high, step.low)))
    return replace(found, exposed=estimated(exposed), step=step, efficiency=efficiency)


def _growth(model: CostModel, n: int) -> list[float]:
    """By what a step of so many ranks is longer than one of those that were measured: at least, likely, at most."""
    doublings = max(0.0, math.log2(n / model.measured(n)))
    return [1 + doublings * (share or 0.0) for share in (GROWTH.low, GROWTH.value, GROWTH.high)]


_PARAMETERS = {
    "overhead_s": ("overhead", 1e6, "us"),
    "alpha_s": ("alpha", 1e6, "us"),
    "beta_s_per_byte": ("beta", 1e9, "ns/byte"),
}


def _page(
    model: CostModel, rows: Sequence[PredictionRow], compressed: Sequence[CompressedRow], notes: Sequence[str]
) -> Page:
    """The parameters of the model and a line for each number of ranks."""
    lines = [
        f"{where}: {_parameters(link)}"
        for where, link in (("Within a host", model.host), ("Between hosts", model.network))
        if link is not None
    ]
    cells = []
    for row in rows:
        times = [getattr(row, name) for name in _TIMES]
        words = [None if one is None else interval_text(one.scaled(1000)) for one in times]
        if row.extrapolated:
            words[2] = f"{words[2] or '-'}*"
        efficiency = None if row.efficiency is None else interval_text(row.efficiency)
        cells.append([row.ranks, row.hosts, *words, efficiency])
    names = ("ranks", "hosts", *(f"{name} ms" for name in _TIMES), "efficiency")
    tables = [Table("Prediction with 95% intervals, where there are any", names, cells)]
    if compressed:
        ways = [*WAYS, EVERY]
        cells = [
            [
                row.ranks,
                *(f"{number_text(1000 * row.steps[name])} ({share_text(row.efficiency[name])})" for name in ways),
                row.shortest if row.shortest == "none" else f"{row.shortest}, {row.faster:.3g} times as fast",
            ]
            for row in compressed
        ]
        titles = ["fp16, bf16" if name == "bf16" else name for name in WAYS]
        names = ("ranks", *titles, f"every={compressed[0].every}", "shortest compression")
        tables.append(Table("A step in ms (efficiency), by compression=", names, cells))
    return Page([*lines, *tables], notes)


def _parameters(link: Link) -> str:
    told = link.parameters()
    words = [
        f"{name} {interval_text(told[key].scaled(factor))} {unit}"
        for key, (name, factor, unit) in _PARAMETERS.items()
        if key in told
    ]
    return f"{link.algorithm}, {', '.join(words)}"


def _draw(axes: Any, rows: Sequence[PredictionRow]) -> None:
    known = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    ranks = [n for n, _ in known]
    axes.fill_between(
        ranks,
        [one.value if one.low is None else one.low for _, one in known],
        [one.value if one.high is None else one.high for _, one in known],
        alpha=0.25,
        label="interval",
    )
    axes.plot(ranks, [one.value for _, one in known], marker="o", label="predicted")
    axes.set(xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.legend()


@click.command()
@click.option("--fit", type=FILE, multiple=True, metavar="FILE...",
              help="Files of `hvdkit emulate --json`. One host, several hosts, or both; two numbers of ranks or more.",
              )  # fmt: skip
@click.argument("more", nargs=-1, type=FILE, metavar="")
@click.option("--at", callback=numbers_of_ranks, metavar="N,...",
              help="Numbers of ranks.  [default: 1, 2, 4 ... 1024, as far as the measurements reach]")  # fmt: skip
@click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks per host.  [default: as measured]")
@click.option("--step-ms", type=float, callback=number(0, above=True), metavar="MS",
              help="Forward, backward and update in one process; without it only communication is predicted.",
              )  # fmt: skip
@click.option("--plan", type=FILE, metavar="FILE",
              help="Gradients, as `hvdkit emulate sizes -o` wrote them.  [default: the plan in the first --fit file]",
              )  # fmt: skip
@click.option("--parameters", callback=large_count, metavar="P",
              help=f"In place of --plan: how many a model has, such as 25557032 or 7B, in {_TENSORS} equal float32 "
              "gradients.")  # fmt: skip
@click.option("--alpha-us", type=float, callback=number(0), metavar="US",
              help="Latency of the network (alpha): microseconds per message.")  # fmt: skip
@click.option("--bandwidth-gbit", type=float, callback=number(0, above=True), metavar="G",
              help="Bandwidth of one host's link, in Gbit/s.")  # fmt: skip
@click.option("--fp16-allreduce", "fp16", is_flag=True, help="Predict for gradients sent in half precision.")
@click.option("--every", type=AT_LEAST_1, default=30, metavar="H",
              help="For the table of fewer bytes: weights are averaged once in H steps.")  # fmt: skip
@click.option("--fusion-threshold-mb", type=float, default=FUSION_BYTES >> 20, callback=number(0), metavar="MIB",
              help="Horovod's fusion buffer in MiB, 0 for none.")  # fmt: skip
@click.option("--cycle-time-ms", type=float, default=round(1e3 * CYCLE_S), callback=number(0), metavar="MS",
              help="Horovod's cycle time.")  # fmt: skip
@click.option("--no-overlap", is_flag=True, help="Predict without overlap: communication starts after backward.")
@click.option("--json", "form", flag_value="json", help="Print JSON, in seconds.")
@click.option("--plot", "figure", type=PATH, metavar="FILE", help="Draw the efficiency, too: .png, .svg or .pdf.")
def scale(**given: Any) -> int:
    """Predict the time of a training step on more ranks than you have.

    A model of alpha (latency of a message) and beta (time per byte) of a ring is fitted to measurements of `hvdkit
    emulate` on a few ranks. The step also counts what overlaps with backward, and the wait for the slowest
    rank. Measurements within one host say nothing about a network: beyond one host its latency and bandwidth have to
    be measured or given. With --step-ms a second table says what fewer bytes would give on several hosts:
    distribute(compression=...), and distribute(every=H), which has another guarantee.

    \b
    Examples:
      hvdkit plan scale --fit two.json three.json --at 4,8,512 --step-ms 120 --plan model.json
      hvdkit plan scale --fit host.json --alpha-us 5 --bandwidth-gbit 100 --at 64 --step-ms 120 --fp16-allreduce
      hvdkit plan scale --alpha-us 10 --bandwidth-gbit 25 --ppn 4 --at 512 --step-ms 489 --parameters 138M

    Exit status: 0 success, 1 a file cannot be used, 2 for bad usage, or when no number of ranks can be predicted.
    """
    if given["figure"] is not None:
        if given["step_ms"] is None:
            raise click.UsageError("--plot draws the efficiency, which needs --step-ms")
        plot.check(given["figure"])
    files = [json_files.read(path, EmulateResults) for path in (*given["fit"], *given["more"])]
    costs = _model(files, given)
    replayed = _plan(files, given["plan"], given["parameters"])
    delays = measured(files)
    work = Workload(
        gradients(replayed, 2 if given["fp16"] else math.inf),
        None if given["step_ms"] is None else given["step_ms"] / 1000,
        Fusion(given["fusion_threshold_mb"] * _MIB, given["cycle_time_ms"] / 1000),
        not given["no_overlap"],
    )
    rows = predict(costs, delays, work, given["at"] or _DOUBLING)
    if given["at"] is None:
        rows = [row for row in rows if row.refused is None]
    if all(row.refused for row in rows):
        raise InvalidArgumentError(f"nothing can be predicted. {rows[0].refused if rows else ''}")
    compressed = [
        compared(costs, delays, replayed, work, row.ranks, given["every"], _growth(costs, row.ranks)[1])
        for row in rows
        if row.step is not None and row.hosts > 1
    ]
    notes = [*costs.notes, *_notes(replayed, delays, costs, rows, compressed, given)]
    asked = {name: value for name, value in given.items() if name not in ("fit", "more", "plan", "form", "figure")}
    for unit, seconds in (("_ms", 1e-3), ("_us", 1e-6)):
        asked = json_files.in_seconds(asked, frozenset(name for name in asked if name.endswith(unit)), seconds)
    if given["figure"] is not None:
        plot.write(given["figure"], lambda axes: _draw(axes, rows), size=(6, 4))
    levels = {network.HOST: costs.host, network.NETWORK: costs.network}
    model = {
        "ppn": costs.ppn,
        "levels": {name: None if level is None else level.as_json() for name, level in levels.items()},
    }
    found = PlannedScale(model, asked, tuple(rows), tuple(compressed), tuple(notes))
    _page(costs, rows, compressed, notes).print(given["form"], found)
    return 0


def _model(files: list[EmulateResults], given: dict[str, Any]) -> CostModel:
    alpha_us, gbit = given["alpha_us"], given["bandwidth_gbit"]
    if (alpha_us is None) != (gbit is None):
        missing = "--bandwidth-gbit" if gbit is None else "--alpha-us"
        raise InvalidArgumentError(f"of a network's two numbers {missing} is missing: give both.")
    if not files and alpha_us is None:
        raise InvalidArgumentError(
            "there is nothing to predict from: give --fit with files of 'hvdkit emulate --json', or a network with "
            "both --alpha-us and --bandwidth-gbit."
        )
    costs = network.fit(files, ppn=given["ppn"]) if files else CostModel(ppn=given["ppn"] or 1)
    return costs if alpha_us is None else costs.with_network(alpha_us * 1e-6, gbit * 1e9 / 8)


def _plan(files: list[EmulateResults], path: Path | None, parameters: int | None) -> ReplayPlan:
    if path is not None and parameters is not None:
        raise InvalidArgumentError("--plan and --parameters both say which gradients there are; give one of them.")
    if parameters is not None:
        ends = [parameters * part // _TENSORS for part in range(_TENSORS + 1)]
        sizes = [end - start for start, end in itertools.pairwise(ends) if end > start]
        return ReplayPlan(tuple(Collective(f"layer{at}", elements) for at, elements in enumerate(sizes, start=1)))
    if path is not None:
        return json_files.read(path, ReplayPlan)
    if not files:
        raise InvalidArgumentError(
            "without --fit the gradients have to be named: --plan FILE of 'hvdkit emulate sizes', or --parameters."
        )
    return files[0].plan


def _notes(
    replayed: ReplayPlan,
    delays: Delays,
    costs: CostModel,
    rows: Sequence[PredictionRow],
    compressed: Sequence[CompressedRow],
    given: dict[str, Any],
) -> list[str]:
    """Sentences below the prediction: what is missing, assumed or not measured."""
    own = given["plan"] or given["parameters"]
    origin = "" if own else ", the plan that was measured; --plan or --parameters name those of a model"
    notes = [*dict.fromkeys(f"No number for {row.ranks} ranks: {row.refused}" for row in rows if row.refused)]
    notes.append(f"Gradients: {len(replayed.collectives)} of {bytes_text(replayed.nbytes)} in all{origin}.")
    if given["step_ms"] is None:
        notes.append("Without --step-ms nothing is known of computation: all gradients are taken to be ready at once.")
    elif not any(one.gap_s for one in replayed.collectives):
        notes.append("The plan has no computation gaps: each gradient is taken to need the same share of backward.")
    if costs.network is not None and costs.network.ranks == 0:
        notes.append(
            "The network is as given, not measured: communication knows nothing of how far off it may be. Clusters of "
            "one nominal bandwidth have been published with 45 to 80% on 128 ranks (docs/plan.md); measure 2 hosts."
        )
    guessed = [str(row.ranks) for row in rows if row.step is not None and row.ranks > costs.measured(row.ranks)]
    if guessed:
        low, value, high = (share_text(share or 0.0) for share in (GROWTH.low, GROWTH.value, GROWTH.high))
        notes.append(
            f"Not measured: {', '.join(guessed)} ranks. Steps are {value} longer for each doubling of the ranks "
            f"beyond the measured ones, from {low} to {high}, as published trainings were (docs/plan.md)."
        )
    if delays.ranks == 0:
        notes.append("No delays were measured: stragglers count as 0.")
    elif any(row.extrapolated for row in rows):
        notes.append(
            f"*: the slowest of so many ranks is expected beyond all {len(delays.skews)} skews that were measured on "
            f"{delays.ranks} ranks, of which the longest counts."
        )
    if delays.injected:
        notes.append(
            "Delays were injected when it was measured (--straggler, --delay): the stragglers are made up, too."
        )
    if given["at"] is None and rows[-1].ranks < _DOUBLING[-1]:
        notes.append(
            f"Beyond {rows[-1].ranks} ranks a network is needed that was not measured: give --alpha-us and "
            "--bandwidth-gbit, or measure between hosts."
        )
    if compressed:
        ms = {name: number_text(1000 * seconds) for name, seconds in compressed[0].packing.items()}
        every = compressed[0].every
        notes += [
            f"Packing is in each step of the second table: {ms['int8']} ms of int8 and {ms['bf16']} ms of fp16 and "
            "bf16, on a core of the host, with nothing to hide it. Compression over the memory of one host saves "
            "nothing.",
            f"every={every} is another guarantee: ranks train apart and average their weights once in {every} steps "
            "(docs/slow_networks.md). Compare what it learns, not its steps alone.",
        ]
    return notes
