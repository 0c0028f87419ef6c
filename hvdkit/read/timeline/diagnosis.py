"""Numbers to sentences: what slows the job, how much, and which setting to try. Each rule is a row of RULES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.read.timeline.results import Summary, TensorSummary

CYCLE_TIME = 1000.0
"""Microseconds of Horovod's cycle when nothing else is said (0.28.1)."""

Values = Mapping[str, object]


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong.

    Attributes:
        name: how it is called in ``--json``.
        applies: the numbers for the sentence, or None where the rule does not apply.
        sentence: what was seen, with the numbers in braces.
        advice: what to try, with the same numbers.
    """

    name: str
    applies: Callable[[Summary], Values | None]
    sentence: str
    advice: str


@dataclass(frozen=True)
class Finding:
    """A rule that applies: what was seen and which setting to try."""

    rule: str
    sentence: str
    advice: str


def diagnose(summary: Summary) -> list[Finding]:
    """All rules that apply to a summary, in the order of RULES.

    Args:
        summary: of a whole recording or of a part of it.
    """
    found = []
    for rule in RULES:
        values = rule.applies(summary)
        if values is not None:
            found.append(Finding(rule.name, rule.sentence.format(**values), rule.advice.format(**values)))
    return found


def _reductions(summary: Summary) -> TensorSummary | None:
    return next((kind for kind in summary.kinds if kind.kind in ("ALLREDUCE", "ADASUM")), None)


def _small_alone(summary: Summary) -> Values | None:
    batches, steps = summary.batches, summary.steps
    if batches is None or steps is None:
        return None
    per_step, share = batches.small / steps.count, batches.small / (batches.fused + batches.single)
    if per_step < 2 or share < 0.3:
        return None
    return {"small": batches.small, "share": share_text(share), "per_step": f"{per_step:.1f}"}


def _negotiation(summary: Summary) -> tuple[float, float, float] | None:
    """Share of negotiation in the time of reductions, its median, and the cycle time; None when it is small."""
    reductions = _reductions(summary)
    if reductions is None or "negotiate" not in reductions.phases or summary.steps is None:
        return None
    negotiate, whole = reductions.phases["negotiate"], reductions.phases["whole"]
    share = negotiate.total / whole.total if whole.total else 0.0
    cycle = summary.cycle.p50 if summary.cycle else CYCLE_TIME
    return (share, negotiate.p50, cycle) if share >= 0.5 else None


def _cycle_bound(summary: Summary) -> Values | None:
    """About one cycle is lost; not said where small tensors go alone, for which a shorter cycle is worse."""
    seen = _negotiation(summary)
    if seen is None or not 0.5 * seen[2] <= seen[1] <= 2 * seen[2] or _small_alone(summary) is not None:
        return None
    known = "measured" if summary.cycle else "Horovod's default; record with --mark-cycles to measure it"
    return {
        "share": share_text(seen[0]),
        "wait": duration_text(seen[1]),
        "cycle": f"{duration_text(seen[2])}, {known}",
        "shorter": f"{max(0.1, seen[2] / 5000):.1g}",
    }


def _waiting_for_ranks(summary: Summary) -> Values | None:
    seen = _negotiation(summary)
    if seen is None or seen[1] <= 2 * seen[2]:
        return None
    return {"share": share_text(seen[0]), "wait": duration_text(seen[1])}


def _threshold_small(summary: Summary) -> Values | None:
    batches = summary.batches
    if batches is None or batches.fill is None or batches.bytes is None or (batches.per_step or 0) < 2:
        return None
    if batches.fill.p50 < 0.75:
        return None
    return {
        "fill": share_text(batches.fill.p50),
        "threshold": bytes_text(batches.threshold),
        "per_step": f"{batches.per_step:.1f}",
        "larger": 2 * batches.threshold,
    }


def _threshold_large(summary: Summary) -> Values | None:
    batches, steps = summary.batches, summary.steps
    if batches is None or batches.per_step is None or batches.tensors is None or steps is None or steps.bytes is None:
        return None
    if batches.per_step > 1.2 or steps.bytes < 16 << 20 or batches.tensors.p50 < 4:
        return None
    return {
        "tensors": f"{batches.tensors.p50:.0f}",
        "bytes": bytes_text(steps.bytes),
        "smaller": 1 << ((steps.bytes // 4).bit_length() - 1),
    }


def _biggest(summary: Summary) -> Values | None:
    steps = summary.steps
    sizes = [tensor for tensor in summary.tensors if tensor.bytes and tensor.kind in ("ALLREDUCE", "ADASUM")]
    if steps is None or not steps.bytes or steps.tensors < 2 or not sizes:
        return None
    biggest = max(sizes, key=lambda tensor: tensor.bytes or 0)
    share = (biggest.bytes or 0) / steps.bytes
    if not 0.5 <= share <= 1 or (biggest.bytes or 0) < 1 << 20:
        return None
    return {"tensor": biggest.tensor, "bytes": bytes_text(biggest.bytes or 0), "share": share_text(share)}


def _tensor_last(summary: Summary) -> Values | None:
    steps = summary.steps
    if steps is None or steps.last is None or steps.duration is None or steps.count < 5:
        return None
    alone = steps.last.alone.p50
    if steps.last.share < 0.9 or alone < 0.1 * steps.duration.p50:
        return None
    return {
        "tensor": steps.last.tensor,
        "share": share_text(steps.last.share),
        "alone": duration_text(alone),
        "part": share_text(alone / steps.duration.p50),
    }


def _rank_last(summary: Summary) -> Values | None:
    skew = summary.skew
    cycle = summary.cycle.p50 if summary.cycle else CYCLE_TIME
    if skew is None or skew.operations < 10 or len(skew.ranks) < 2 or skew.spread.p50 < 2 * cycle:
        return None
    slow = max(skew.ranks, key=lambda rank: rank.last)
    share = slow.last / skew.operations
    if share < max(0.6, 1.5 / len(skew.ranks)):
        return None
    return {
        "rank": slow.rank,
        "share": share_text(share),
        "operations": skew.operations,
        "late": duration_text(slow.late.p50),
    }


def _cache_misses(summary: Summary) -> Values | None:
    steps = summary.steps
    if steps is None or steps.missed is None or steps.missed < 0.2:
        return None
    return {"share": share_text(steps.missed)}


def _communication_bound(summary: Summary) -> Values | None:
    steps = summary.steps
    if steps is None or steps.duration is None or steps.communication is None or steps.duration.p50 <= 0:
        return None
    share = steps.communication.p50 / steps.duration.p50
    if share < 0.5:
        return None
    return {"share": share_text(share), "time": duration_text(steps.communication.p50)}


def _gaps(summary: Summary) -> Values | None:
    steps = summary.steps
    if steps is None or steps.duration is None or steps.idle is None or steps.duration.p50 <= 0:
        return None
    share = steps.idle.p50 / steps.duration.p50
    if share < 0.5:
        return None
    step = duration_text(steps.duration.p50)
    return {"share": share_text(share), "idle": duration_text(steps.idle.p50), "step": step}


def _first_step(summary: Summary) -> Values | None:
    steps = summary.steps
    if steps is None or steps.first is None or steps.duration is None or steps.count < 5:
        return None
    times = steps.first / steps.duration.p50 if steps.duration.p50 else 0.0
    if times < 2 or steps.first - steps.duration.p50 < 50_000:
        return None
    usual = duration_text(steps.duration.p50)
    return {"first": duration_text(steps.first), "usual": usual, "times": f"{times:.1f}"}


RULES = (
    Rule(
        "small-tensors-alone",
        _small_alone,
        "{small} exchanges ({share} of all, {per_step} per step) carried a single tensor of at most 64 KB.",
        "Let more tensors wait for one another: a longer HOROVOD_CYCLE_TIME (in ms, default 1; try 5), or reduce them "
        "as groups (num_groups=1 in Horovod's DistributedOptimizer).",
    ),
    Rule(
        "cycle-bound",
        _cycle_bound,
        "Negotiation took {share} of the time of reductions, {wait} each, which is about one cycle ({cycle}).",
        "A shorter cycle: HOROVOD_CYCLE_TIME={shorter}, at the price of a busier background thread.",
    ),
    Rule(
        "waiting-for-ranks",
        _waiting_for_ranks,
        "Negotiation took {share} of the time of reductions, {wait} each, much longer than a cycle: rank 0 was waiting "
        "for other ranks to reach the same tensor.",
        "Find the slow rank: record with HOROVOD_CACHE_CAPACITY=0 (hvdkit launch --timeline FILE --skew). Then look at "
        "its data loading, its cores and its neighbours; HOROVOD_CYCLE_TIME does not help.",
    ),
    Rule(
        "fusion-threshold-small",
        _threshold_small,
        "Fused batches fill {fill} of the threshold of {threshold}, and a step needs {per_step} exchanges.",
        "A larger fusion buffer: HOROVOD_FUSION_THRESHOLD={larger} (bytes).",
    ),
    Rule(
        "fusion-threshold-large",
        _threshold_large,
        "All {tensors} tensors ({bytes}) leave in one batch per step, so that nothing is sent before the last gradient "
        "is there.",
        "A smaller fusion buffer, so that communication overlaps with the backward pass: "
        "HOROVOD_FUSION_THRESHOLD={smaller} (bytes), or a shorter HOROVOD_CYCLE_TIME.",
    ),
    Rule(
        "one-large-tensor",
        _biggest,
        "One tensor is {share} of the bytes of a step: {tensor} ({bytes}).",
        "Half the bytes with compression (fp16), or fewer exchanges (backward_passes_per_step); or a smaller layer.",
    ),
    Rule(
        "one-tensor-last",
        _tensor_last,
        "{share} of the steps end with {tensor}, {alone} ({part} of the step) after all others.",
        "What comes last cannot overlap with anything: it is usually the first layer. Fuse it with its neighbours (a "
        "longer HOROVOD_CYCLE_TIME, num_groups) or make the backward pass of that layer cheaper.",
    ),
    Rule(
        "one-rank-last",
        _rank_last,
        "Rank {rank} was the last in {share} of {operations} measured operations, {late} after the first rank.",
        "Look at rank {rank}: its host, its cores and threads (hvdkit preflight), the size of its shard of the data.",
    ),
    Rule(
        "cache-misses",
        _cache_misses,
        "{share} of the operations after the second step were not in the response cache.",
        "Unless this was recorded with HOROVOD_CACHE_CAPACITY=0 on purpose: keep names and shapes of tensors the same "
        "in every step, or raise HOROVOD_CACHE_CAPACITY (default 1024) above the number of tensors.",
    ),
    Rule(
        "communication-bound",
        _communication_bound,
        "Collectives took {share} of a step ({time}).",
        "Send less or less often (compression, backward_passes_per_step, a larger batch), or over a faster network.",
    ),
    Rule(
        "gaps",
        _gaps,
        "For {idle} of a step of {step} ({share}) no tensor was announced or reduced: the job is bound by its input or "
        "by its computation, not by Horovod.",
        "Time the data loading alone (more workers, prefetching, a cache); then threads per rank (OMP_NUM_THREADS).",
    ),
    Rule(
        "first-step",
        _first_step,
        "The first step took {first}, {times} times the usual {usual}.",
        "Compilation, allocation and the first read of the data: leave the first step out of measurements (it is left "
        "out of the step times above).",
    ),
)
"""Everything that ``diagnose`` knows, in the order in which it is said."""
