"""What costs a job time: the one form in which every tool says it, weighed by the time lost and not by counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvdkit.common.units import duration_text, share_text

WORTH_SAYING = 0.02
"""Share of the step's time (of the job's, for what happens once) below which a cause gets no advice."""
SENTENCES = {
    "input-everywhere": (
        "Every rank waits for its input.",
        "Load ahead of the computation: more workers, prefetching, a cache of decoded data, files nearer to the ranks.",
    ),
    "random-late": (
        "Now one rank is late, now another.",
        "Even out what a step has to do (samples of one length together), and keep other programs off the ranks' cores "
        "(hvdkit doctor --job, --bind core).",
    ),
    "first-step": (
        "The first step takes longer than the others.",
        "Leave it out of measurements: compilation, allocation and the first read weigh less the longer the job. Keep "
        "shapes the same, and a cache of what is compiled.",
    ),
    "setup": (
        "NCCL is set up before the first collective.",
        "It weighs less the longer the job: leave it out of measurements. NCCL_DEBUG=INFO says what it looks for, and "
        "NCCL_SOCKET_IFNAME names the network at once.",
    ),
    "late": (
        "Tensors wait until the last rank has announced them; this recording does not say which rank that is.",
        "Record which one and why with hvdkit launch --explain-job, or which one alone with --timeline FILE --skew.",
    ),
    "large-tensors": (
        "Large tensors are reduced.",
        "Send less often (backward_passes_per_step, a larger batch), or over a faster network.",
    ),
    "small-tensors": (
        "Data goes in small exchanges.",
        "Reduce tensors as groups (num_groups=1 in Horovod's DistributedOptimizer), so that they are fused, and leave "
        "HOROVOD_FUSION_THRESHOLD as it is.",
    ),
    "sparse": (
        "Sparse gradients are gathered from all ranks.",
        "Where a batch touches much of the embedding, reduce it as a dense tensor (sparse_as_dense=True), or look up "
        "fewer rows.",
    ),
    "sync_batch_norm": (
        "BatchNorm takes its statistics from all ranks (sync_batch_norm), {each}.",
        "Leave sync_batch_norm out where the batch of each rank is large enough, or use GroupNorm, which needs none.",
    ),
    "metrics": (
        "Numbers are averaged one by one, {each}, after the gradients.",
        "Average metrics less often (hk.average_metrics at the end of an epoch), or all of them as one tensor.",
    ),
    "shard_state": (
        "Weights are sent from the ranks that updated them (shard_state=True).",
        "They are half the bytes of an allreduce, in every step: leave shard_state out where each rank has the memory "
        "(hvdkit plan memory), or look at the network.",
    ),
    "names": (
        "Tensors get new names in every step, so the ranks negotiate all of them anew.",
        "Give each tensor the same name in every step (name= of Horovod's calls).",
    ),
    "cache": (
        "Tensors are negotiated anew in every step, outside the response cache.",
        "Keep names and shapes of tensors the same in every step, or raise HOROVOD_CACHE_CAPACITY (default 1024) above "
        "the number of tensors.",
    ),
    "cycle": (
        "Tensors wait for the next cycle of Horovod.",
        "A shorter HOROVOD_CYCLE_TIME (in ms, default 1), and a free core for Horovod's own thread.",
    ),
}
"""What is said of a cause that several recordings show, and what to do: the same whoever sees it."""
WHY_LATE = "hvdkit launch --explain-job records whether that is input, computation or the host."
HOW_MUCH_IS_HIDDEN = "hvdkit timeline merge says how much of it the backward pass hides."
ADVICE = {
    "input": "Look at the input of {who}: file system, size of the shard, number of workers, prefetching. Reading "
    "ahead can hide that other ranks are as slow.",
    "compute": "See whether there is more to compute on {who} (size of the batch, length of the samples, work of its "
    "own) or a slower core or device (hvdkit doctor --job).",
    "host": "Compare that host with another one (hvdkit doctor --job there): clock rate, memory, devices, other jobs.",
    "cores": "See what else runs on that host and on those cores: another job, more threads than cores, two ranks "
    "bound to one core (hvdkit doctor --job; --bind core, --threads).",
    "affinity": "Give each rank cores of its own: hvdkit launch --bind core or --bind none, and no taskset or numactl.",
    "blocked": "Look for what {who} may wait for within a step: a lock or the GIL that another thread holds, a disk, a "
    "network, a device (py-spy dump shows it).",
    "between": "Look at what is done between two steps on {who} alone (saving, evaluation, logging): do it less often, "
    "at the same steps on all ranks, or in another thread or process.",
    "late": "Look at the input of {who}, and at the device. Batches that come from no DataLoader are not seen: put "
    "record_steps (hvdkit.torch) around them, and it is told.",
    "gc": "Collect less often or between epochs: gc.freeze() after the model is built, a higher gc.set_threshold, "
    "gc.disable() with gc.collect() once in a while on all ranks at the same step.",
    "fsync": "Write to a faster or local disk, less often, or in another thread; os.fsync waits until the disk has it.",
    "saving": "Save less often, to a faster disk, or in another thread (hvdkit.torch's "
    "Checkpoints(asynchronous=True)); the other ranks wait meanwhile.",
    "evaluation": "Evaluate less often or on fewer samples, and on all ranks at once, each on a part of the samples.",
    "shard_state": SENTENCES["shard_state"][1],
    "pause": "Look at what is done there (saving, evaluation, logging): do it less often, on fewer samples, or in "
    "another thread.",
    "stall": "Look for what is done there (saving, evaluation, logging), or what stops a rank at once: a shared file "
    "system, a scheduler, a device that is shared.",
    "growth": "Look for what grows with the steps: a list that is never emptied, a graph that is kept (loss without "
    "float()), new shapes or functions, a log that is read again, memory that is swapped, a clock that sinks.",
    "first-steps": "It weighs less the longer the job: a cache that fills, files that are read for the first time, "
    "compilation; leave these steps out of measurements.",
    "exchange": "Look at the network at these times: other jobs, a link that is down, connections made anew.",
}
"""What to do about ranks that come late, by what they do (``lateness.DOING``), and about patterns of all ranks."""
_ONCE = frozenset({"setup", "first-step", "first-steps"})
"""Kinds that happen once in a job, however long it is."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that costs time.

    Attributes:
        kind: a word for programs, such as "input", the same in every tool that can see the cause.
        lost_s: seconds that it costs, per step where ``per_step``, else in the whole job.
        share: the part of the time of the steps (of the job) that it costs, 0 to 1.
        what: one sentence without the cost: who and what, such as "Rank 3 waits for its input."
        evidence: the file and the number that say so.
        advice: what to do, an imperative sentence.
        per_step: whether ``lost_s`` is of each step; else it is of the whole job.
        ranks: those that cause it; empty where it is all of them or none in particular.
        at_most: whether less is lost where the backward pass hides a part, which the recording does not show.
        alone_s: what it saves to mend this one alone, where that is much less than ``lost_s``, its saving once the
            causes before it are mended: a straggler that a slower one hides.
    """

    kind: str
    lost_s: float
    share: float
    what: str
    evidence: str
    advice: str
    per_step: bool = True
    ranks: tuple[int, ...] = ()
    alone_s: float | None = None
    at_most: bool = False

    @property
    def recurs(self) -> bool:
        """Whether it costs a longer job more."""
        return self.kind not in _ONCE

    @property
    def alone_share(self) -> float:
        """The share that it saves to mend this one alone."""
        return self.share if self.alone_s is None or not self.lost_s else self.share * self.alone_s / self.lost_s

    def sentence(self) -> str:
        """The cause and its cost in a line."""
        often = " per step" if self.per_step else " in all" if self.recurs else " once"
        before = ""
        if self.alone_s is not None:
            alone = duration_text(1e6 * self.alone_s) if self.alone_s >= 0.05 * self.lost_s else "nothing"
            before = f" once what comes before it is mended, and {alone} until then"
        costs = "It costs at most" if self.at_most else "It costs"
        return f"{self.what} {costs} {duration_text(1e6 * self.lost_s)}{often} ({share_text(self.share)}){before}."


def many_small(times: float) -> tuple[str, str]:
    """What is said of small exchanges that are counted, and what to do; ``times``: so many in a step."""
    return f"Many small tensors are exchanged, {times:.3g} times per step.", SENTENCES["small-tensors"][1]


def by_cost(causes: Iterable[Cause]) -> list[Cause]:
    """The causes that are worth a sentence, the one that saves most by itself first."""
    return sorted((cause for cause in causes if cause.share >= WORTH_SAYING), key=lambda cause: -cause.alone_share)


def verdict(causes: Iterable[Cause], otherwise: str) -> list[str]:
    """What a tool says first: each cause with its evidence and what to do, or ``otherwise`` where none is worth it."""
    lines: list[str] = []
    for cause in by_cost(causes):
        begin = "" if lines else "Verdict: "
        lines += [f"{begin}{cause.sentence()}", f"  seen: {cause.evidence}", f"  try: {cause.advice}"]
    return lines or [f"Verdict: {otherwise}"]
