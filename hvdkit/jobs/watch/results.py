"""What there is to say of a run at one moment: the same for a terminal and a program."""

from __future__ import annotations

from typing import ClassVar

from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.jobs.watch.history import HistoryReport, Run


class RankNow(Part, frozen=True):
    """One rank in the last window.

    Attributes:
        rank: its number.
        own_s: seconds of a step in which it did not wait for other ranks.
        step_s, input_s, compute_s, wait_s: seconds of a step, and what of them went to its input, its computation, and
            waiting for others; None where nobody said so.
        rss: bytes of memory of the process.
        device: bytes of memory of its accelerator.
    """

    rank: Whole
    own_s: Seconds | None
    step_s: Seconds | None
    input_s: Seconds | None
    compute_s: Seconds | None
    wait_s: Seconds | None
    rss: Seconds | None
    device: Seconds | None


class Watched(Document, frozen=True):
    """A training as its monitor's files show it.

    Attributes:
        path: of the history.
        state: "running", "ended", or "silent" where nothing came for much longer than a window takes: it hangs, or
            was killed.
        at: when it was looked at, in seconds since 1970.
        started: when the newest job began, in seconds since 1970.
        updated: when it last wrote, in seconds since 1970.
        jobs: how many have taken part in this training.
        world_size: ranks of the newest one.
        step: steps that are done.
        steps: of the whole training; None where it is not known.
        epoch: the one that it is in, from 0 on.
        epochs: of the whole training.
        left_s: seconds that it will take yet.
        step_s: seconds per step of late, with what lies between steps.
        samples_per_s: samples per second, of all ranks.
        logs: what the training logged, means over the ranks in the last window.
        grad_norm: norm of the mean gradient.
        ranks: the slowest first; of many ranks, some.
        checkpoint_step: of the newest checkpoint.
        checkpoint_time: when it was written, in seconds since 1970.
        reports: all, the oldest first.
    """

    kind: ClassVar[str] = "watch"
    written_by: ClassVar[str] = "hvdkit watch --json"
    times = frozenset(["cost"])

    path: str
    state: str
    at: Seconds
    started: Seconds
    updated: Seconds
    jobs: Positive
    world_size: Positive
    step: Whole
    steps: Whole | None
    epoch: Whole | None
    epochs: Whole | None
    left_s: Seconds | None
    step_s: Seconds | None
    samples_per_s: float | None
    logs: dict[str, float | None]
    grad_norm: float | None
    ranks: tuple[RankNow, ...]
    checkpoint_step: Whole | None
    checkpoint_time: Seconds | None
    reports: tuple[HistoryReport, ...]

    @property
    def share(self) -> float | None:
        """What of the training is done, 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def usual_s(self) -> float | None:
        """Median over the ranks of the time that is their own; of two ranks that of the faster one."""
        known = sorted(rank.own_s for rank in self.ranks if rank.own_s is not None)
        return known[(len(known) - 1) // 2] if known else None

    def behind(self, rank: RankNow) -> float:
        """How many times as long as the median this rank takes; 1 where it is not known."""
        return rank.own_s / self.usual_s if rank.own_s is not None and self.usual_s else 1.0


def look(run: Run, path: str, now: float) -> Watched:
    """What there is to say of a run.

    Args:
        run: what its files say.
        path: of the history.
        now: seconds since 1970.
    """
    last = run.windows[-1] if run.windows else None
    return Watched(
        path=path, state=run.state(now), at=now, started=run.start.time, updated=run.updated, jobs=run.jobs,
        world_size=run.start.world_size, step=run.step, steps=run.start.steps,
        epoch=last.epoch if last else None, epochs=run.start.epochs, left_s=run.left(), step_s=run.pace(),
        samples_per_s=last.samples_per_s if last else None, logs=last.logs if last else {},
        grad_norm=last.grad_norm if last else None, ranks=_ranks(run),
        checkpoint_step=run.checkpoint.step if run.checkpoint else None,
        checkpoint_time=run.checkpoint.time if run.checkpoint else None,
        reports=tuple(run.reports),
    )  # fmt: skip


def _ranks(run: Run) -> tuple[RankNow, ...]:
    """Each rank with the time that is its own, the slowest first."""
    ranks = run.ranks
    if ranks is None:
        return ()
    rows = []
    numbers = ranks.rank or range(len(ranks.step))
    values = zip(ranks.step, ranks.input, ranks.compute, ranks.wait, ranks.rss, ranks.device, strict=True)
    for rank, (step, input_, compute, wait, *memory) in zip(numbers, values, strict=True):
        if compute is not None:
            own = (input_ or 0.0) + compute
        else:
            own = step if step is None or wait is None else max(0.0, step - wait)
        rows.append(RankNow(rank, own, step, input_, compute, wait, *memory))
    return tuple(sorted(rows, key=lambda rank: (-(rank.own_s or 0.0), rank.rank)))
