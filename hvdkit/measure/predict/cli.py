"""``hvdkit predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common import json_files
from hvdkit.common import plot as drawing
from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, FILE, PATH, large_count, number, numbers_of_ranks
from hvdkit.common.units import bytes_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.check import split
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.predict import formulas, model, prediction, stragglers, tables
from hvdkit.measure.predict.model import CostModel
from hvdkit.measure.predict.overlap import Fusion, gradients
from hvdkit.measure.predict.stragglers import Delays

_DOUBLING = tuple(2**power for power in range(11))
_MIB = 2**20
_TENSORS = 100
"""About as many weights as Inception V3 and ResNet-101 have, which docs/predict.md compares with."""


@click.command()
@click.option(
    "--fit",
    type=FILE,
    multiple=True,
    metavar="FILE...",
    help="Files of `hvdkit emulate --json`. One host, several hosts, or both; two numbers of ranks or more.",
)
@click.argument("more", nargs=-1, type=FILE, metavar="")
@click.option(
    "--at",
    callback=numbers_of_ranks,
    metavar="N,...",
    help="Numbers of ranks.  [default: 1, 2, 4 ... 1024, as far as the measurements reach]",
)
@click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks per host.  [default: as measured]")
@click.option(
    "--step-ms",
    type=float,
    callback=number(0, above=True),
    metavar="MS",
    help="Forward, backward and update in one process; without it only communication is predicted.",
)
@click.option(
    "--backward-share",
    type=float,
    default=prediction.BACKWARD_SHARE,
    callback=number(0, above=True, most=1),
    metavar="S",
    show_default=False,
    help="Share of backward in --step-ms.  [default: 2/3]",
)
@click.option(
    "--plan",
    type=FILE,
    metavar="FILE",
    help="Gradients, as `hvdkit emulate sizes -o` wrote them.  [default: the plan in the first --fit file]",
)
@click.option(
    "--parameters",
    callback=large_count,
    metavar="P",
    help=f"In place of --plan: how many a model has, such as 25557032 or 7B, in {_TENSORS} equal float32 gradients.",
)
@click.option(
    "--algorithm",
    type=click.Choice([model.LIBRARY, *formulas.ALGORITHMS]),
    help="Allreduce algorithm of the model  [default: as measured]",
)
@click.option(
    "--alpha-us",
    type=float,
    callback=number(0),
    metavar="US",
    help="Latency of the network (alpha): microseconds per message.",
)
@click.option(
    "--bandwidth-gbit",
    "--beta-gbit",
    type=float,
    callback=number(0, above=True),
    metavar="G",
    help="Bandwidth of one host's link, in Gbit/s.",
)
@click.option(
    "--faster-links",
    type=float,
    callback=number(0, above=True),
    metavar="X",
    help="Predict for a network with X times the bandwidth.",
)
@click.option("--fp16-allreduce", "--fp16", "fp16", is_flag=True, help="Predict for gradients sent in half precision.")
@click.option(
    "--accumulate", type=AT_LEAST_1, default=1, metavar="K", help="Predict for K backward passes before each exchange."
)
@click.option(
    "--fusion-threshold-mb",
    type=float,
    default=128,
    callback=number(0),
    metavar="MIB",
    help="Horovod's fusion buffer in MiB, 0 for none.",
)
@click.option(
    "--cycle-time-ms",
    "--cycle-ms",
    "cycle_ms",
    type=float,
    default=1,
    callback=number(0),
    metavar="MS",
    help="Horovod's cycle time.",
)
@click.option("--no-overlap", is_flag=True, help="Predict without overlap: communication starts after backward.")
@click.option("--seed", type=AT_LEAST_0, default=0, help="Random seed of the bootstrap.")
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each number of ranks, in seconds.")
@click.option("--json", "form", flag_value="json", help="Print JSON, in seconds.")
@click.option("--plot", "figure", type=PATH, metavar="FILE", help="Draw the efficiency, too: .png, .svg or .pdf.")
def predict(**given: Any) -> int:
    """Predict the time of a training step on more ranks than you have.

    A model of alpha (latency of a message), beta (time per byte) and gamma (time per sum) is fitted to measurements of
    `hvdkit emulate` on a few ranks. The step also counts what overlaps with backward, and the wait for the slowest
    rank. Measurements within one host say nothing about a network: beyond one host its latency and bandwidth have to
    be measured or given.

    \b
    Examples:
      hvdkit predict --fit two.json three.json --at 4,8,512 --step-ms 120 --plan model.json
      hvdkit predict --fit host.json --alpha-us 5 --bandwidth-gbit 100 --at 64 --step-ms 120 --fp16
      hvdkit predict --alpha-us 10 --bandwidth-gbit 25 --ppn 4 --at 512 --step-ms 489 --parameters 138M

    Exit status: 0 success, 1 a file cannot be used, 2 for bad usage.
    """
    if given["figure"] is not None and given["step_ms"] is None:
        raise click.UsageError("--plot draws the efficiency, which needs --step-ms")
    if given["figure"] is not None:
        drawing.check(given["figure"])
    files = [json_files.read(path, EmulateResults) for path in (*given["fit"], *given["more"])]
    costs = _model(files, given)
    grads = _plan(files, given["plan"], given["parameters"])
    delays = stragglers.measured(files)
    work = prediction.Workload(
        gradients(grads, given["fp16"]),
        None if given["step_ms"] is None else given["step_ms"] / 1000,
        given["backward_share"],
        Fusion(given["fusion_threshold_mb"] * _MIB, given["cycle_ms"] / 1000),
        given["accumulate"],
        not given["no_overlap"],
    )
    ranks = given["at"] or _reachable(costs, given["algorithm"])
    rows = prediction.predict(costs, delays, work, ranks, given["algorithm"], given["seed"])
    if all(row.refused for row in rows):
        raise InvalidArgumentError(f"nothing can be predicted. {rows[0].refused}")
    notes = [*costs.notes, *_notes(grads, delays, costs, rows, given)]
    asked = {name: value for name, value in given.items() if name not in ("fit", "more", "plan", "form", "figure")}
    if given["figure"] is not None:
        tables.draw(given["figure"], rows)
    found = tables.predicted(costs, rows, asked, notes)
    tables.page(costs, rows, notes).print(given["form"], found)
    return 0


def _model(files: list[EmulateResults], given: dict[str, Any]) -> CostModel:
    alpha_us, gbit = given["alpha_us"], given["bandwidth_gbit"]
    alpha_s = None if alpha_us is None else alpha_us * 1e-6
    rate = None if gbit is None else gbit * 1e9 / 8
    if files:
        costs = model.fit(files, ppn=given["ppn"], seed=given["seed"]).with_network(alpha_s, rate)
    elif alpha_s is None or rate is None:
        raise InvalidArgumentError(
            "there is nothing to predict from: give --fit with files of 'hvdkit emulate --json', or a network with "
            "both --alpha-us and --bandwidth-gbit."
        )
    else:
        costs = model.given(alpha_s, rate, given["ppn"] or 1)
    return costs if given["faster_links"] is None else costs.with_faster_links(given["faster_links"])


def _plan(files: list[EmulateResults], path: Path | None, parameters: int | None) -> ReplayPlan:
    if path is not None and parameters is not None:
        raise InvalidArgumentError("--plan and --parameters both say which gradients there are; give one of them.")
    if parameters is not None:
        sizes = [elements for elements in split(parameters, _TENSORS) if elements]
        return ReplayPlan(tuple(Collective(f"layer{at}", elements) for at, elements in enumerate(sizes, start=1)))
    if path is not None:
        return json_files.read(path, ReplayPlan)
    if not files:
        raise InvalidArgumentError(
            "without --fit the gradients have to be named: --plan FILE of 'hvdkit emulate sizes', or --parameters."
        )
    return files[0].plan


def _reachable(costs: CostModel, algorithm: str | None) -> tuple[int, ...]:
    """1, 2, 4 ... as far as the model answers."""
    found = []
    for n in _DOUBLING:
        try:
            costs.draws_s(1, n, algorithm)
        except InvalidArgumentError:
            continue
        found.append(n)
    return tuple(found)


def _notes(
    plan: ReplayPlan, delays: Delays, costs: CostModel, rows: list[prediction.PredictionRow], given: dict[str, Any]
) -> list[str]:
    """Sentences below the prediction: what is missing, assumed or not measured."""
    own = given["plan"] or given["parameters"]
    measured = "" if own else ", the plan that was measured; --plan or --parameters name those of a model"
    notes = [*dict.fromkeys(f"No number for {row.ranks} ranks: {row.refused}" for row in rows if row.refused)]
    notes += [f"Gradients: {len(plan.collectives)} of {bytes_text(plan.nbytes)} in all{measured}."]  # fmt: skip
    if given["step_ms"] is None:
        notes.append("Without --step-ms nothing is known of computation: all gradients are taken to be ready at once.")
    elif not any(one.gap_s for one in plan.collectives):
        notes.append("The plan has no computation gaps: each gradient is taken to need the same share of backward.")
    if costs.network is not None and not costs.network.residuals:
        notes.append("The network is as given, not measured: the intervals know nothing of how far off it may be.")
    guessed = [str(row.ranks) for row in rows if row.step is not None and not costs.measured(row.ranks)]
    if guessed:
        notes.append(
            f"Not measured: {', '.join(guessed)} ranks. The intervals of their step and efficiency hold the error of "
            "published figures: 5 to 19 points too high, steps up to "
            f"{prediction.OPTIMISM} times as long (docs/predict.md)."
        )
    if delays.ranks == 0:
        notes.append("No delays were measured: stragglers count as 0, so that the efficiency is an upper bound.")
    elif any(row.extrapolated for row in rows):
        beyond = (
            "an extrapolation of their tail" if delays.has_tail else "too few for a tail, so that the longest counts"
        )
        notes.append(
            f"*: the slowest of so many ranks is expected beyond all {len(delays.skews)} skews that were measured on "
            f"{delays.ranks} ranks: {beyond}."
        )
    if delays.injected:
        notes.append(
            "Delays were injected when it was measured (--straggler, --delay): the stragglers are made up, too."
        )
    if given["at"] is None and rows and rows[-1].ranks < _DOUBLING[-1]:
        notes.append(
            f"Beyond {rows[-1].ranks} ranks a network is needed that was not measured: give --alpha-us and "
            "--bandwidth-gbit, or measure between hosts."
        )
    return notes
