"""Two recordings compared: which phase of which tensor takes longer, how sure that is and how much time it explains.

Times are microseconds here, and seconds in JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.extras import require_scipy
from hvdkit.common.json_files import Document, Part
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.read.timeline.columns import TimelineColumns, collect
from hvdkit.read.timeline.measures import covered, union
from hvdkit.read.timeline.model import GROUPS
from hvdkit.read.timeline.reader import read

SIGNIFICANCE = 0.05
"""Share of false changes that is accepted among those called significant."""
CORRECTION = "Mann-Whitney U, false discovery rate of 5% by Benjamini and Yekutieli"
"""How it is decided that a change is no chance."""


@dataclass(frozen=True)
class PhaseChange:
    """One phase of one tensor in both recordings.

    Attributes:
        tensor, kind, phase: what is compared; phase is one of model.GROUPS.
        count_a, count_b: how many operations of each recording have the phase; 0 where it is in one only.
        median_a, median_b: half of the operations took longer; None where it is not in that recording.
        p95_a, p95_b: one in twenty took longer; None likewise.
        ratio: median_b / median_a; None where one is missing or median_a is 0.
        p_value: that B is neither slower nor faster than A as a rule, corrected for all comparisons; None where a
            recording has too few operations to tell.
        explains: (mean_b - mean_a) * count_b without the first operation of the tensor, the time by which B is longer
            on account of it; where the phase is in one recording only, all of its time there. Tensors of one fused
            exchange each carry the time of all of it. Rare long operations count here, and not in the medians and the
            p-value.
        once: by which the first operation of the tensor is longer in B: set-up and compilation, which do not recur.
    """

    tensor: str
    kind: str
    phase: str
    count_a: int
    count_b: int
    median_a: float | None
    median_b: float | None
    p95_a: float | None
    p95_b: float | None
    ratio: float | None
    p_value: float | None
    explains: float
    once: float

    also: ClassVar[tuple[str, ...]] = ("significant",)
    """Properties that JSON has, too."""

    @property
    def significant(self) -> bool:
        """Whether the change is more than chance, with SIGNIFICANCE."""
        return self.p_value is not None and self.p_value < SIGNIFICANCE


@dataclass(frozen=True)
class Whole:
    """A recording as a whole.

    Attributes:
        path: the file.
        operations: complete ones.
        duration: from the first of them to the last.
        communication: time in which at least one collective ran.
    """

    path: str
    operations: int
    duration: float
    communication: float


class Only(Part, frozen=True):
    """What is in one recording only.

    Attributes:
        tensor, kind: which.
        operations: how many.
    """

    tensor: str
    kind: str
    operations: int


class TimelineDifference(Document, frozen=True, rename={"slower_than_limit": "slower"}):
    """What takes longer in recording B than in A.

    Attributes:
        a, b: each as a whole.
        changes: every phase of every tensor that is in both, by the size of ``explains``, the largest first.
        only_a, only_b: what is in one recording only.
        slower_than_limit: significant changes above --fail-above.
        test: how it is decided that a change is no chance.
    """

    kind = "timeline-diff"
    written_by = "hvdkit timeline diff --json"
    times = frozenset(["duration", "communication", "median_a", "median_b", "p95_a", "p95_b", "explains", "once"])
    unit_s = 1e-6

    a: Whole
    b: Whole
    changes: tuple[PhaseChange, ...]
    only_a: tuple[Only, ...]
    only_b: tuple[Only, ...]
    slower_than_limit: tuple[PhaseChange, ...] = ()
    test: str = CORRECTION

    def slower(self, ratio: float, at_least: float = 10.0) -> list[PhaseChange]:
        """Significant changes for the worse.

        Args:
            ratio: of the medians, above which a change counts; 1.2 is "more than 20 % slower".
            at_least: microseconds by which the median has to grow, since Horovod writes whole microseconds.
        """
        return [
            change
            for change in self.changes
            if change.significant
            and change.median_a is not None
            and change.median_b is not None
            and change.median_b > ratio * change.median_a
            and change.median_b - change.median_a >= at_least
        ]


def compare(a: str | Path, b: str | Path) -> TimelineDifference:
    """Compare two recordings of the same training, tensor by tensor and phase by phase.

    Each phase of each tensor is compared by the Mann-Whitney U test, which asks nothing of the distribution of times,
    and all p-values are corrected together for their number; the correction holds however the tests depend on each
    other, as those of fused tensors do. The operations of one tensor are taken as independent: a disturbance that
    lasts for several steps makes p-values too small.

    Args:
        a, b: timeline files; A is what was before, B what is now.
    Raises:
        DataNotFoundError, DataError: no such file, or no operation in it.
        MissingFrameworkError: SciPy is not installed.
    Source: Mann and Whitney, Annals of Mathematical Statistics 18 (1947); Benjamini and Yekutieli, Annals of Statistics
        29 (2001), theorem 1.3.
    """
    require_scipy("two timelines are compared")
    columns_a, columns_b = _collect(a), _collect(b)
    rows_a, rows_b = _rows(columns_a), _rows(columns_b)
    changes = [
        change
        for name in rows_a
        if name in rows_b
        for change in _changes(name, columns_a.durations[rows_a[name]], columns_b.durations[rows_b[name]])
    ]
    return TimelineDifference(
        a=_whole(a, columns_a),
        b=_whole(b, columns_b),
        changes=tuple(sorted(_corrected(changes), key=lambda change: -abs(change.explains))),
        only_a=tuple(Only(*name, len(rows)) for name, rows in rows_a.items() if name not in rows_b),
        only_b=tuple(Only(*name, len(rows)) for name, rows in rows_b.items() if name not in rows_a),
    )


def check_ratio(ratio: float) -> float:
    """The ratio of ``TimelineDifference.slower`` if it is one.

    Raises:
        InvalidArgumentError: below 1, or not finite.
    """
    if not (1 <= ratio < math.inf):
        raise InvalidArgumentError(f"the ratio to fail above must be at least 1, got {ratio:g}; 1.2 is 20% slower.")
    return ratio


def _collect(path: str | Path) -> TimelineColumns:
    columns = collect(read(path))
    if not len(columns.tensor):
        raise DataError(
            f"no complete operation in {str(path)!r}; give a file that Horovod wrote with HOROVOD_TIMELINE."
        )
    return columns


def _rows(columns: TimelineColumns) -> dict[tuple[str, str], NDArray[np.intp]]:
    """The rows of each tensor under each kind of collective."""
    names = [(tensor.name, tensor.kind) for tensor in columns.tensors]
    return dict(zip(names, columns.rows_by_tensor(), strict=True))


def _whole(path: str | Path, columns: TimelineColumns) -> Whole:
    begin, end = columns.begin.min(), columns.end.max()
    exchanges = union(columns.exchange[:, 0], columns.exchange[:, 1])
    communication = covered(exchanges, np.array([begin]), np.array([end]))[0] if len(exchanges[0]) else 0.0
    return Whole(str(path), len(columns.tensor), float(end - begin), float(communication))


def _changes(name: tuple[str, str], a: NDArray[np.float32], b: NDArray[np.float32]) -> list[PhaseChange]:
    found = []
    for number, phase in enumerate(GROUPS):
        in_a, in_b = (column[~np.isnan(column)].astype(np.float64) for column in (a[:, number], b[:, number]))
        if not len(in_a) and not len(in_b):
            continue
        (median_a, p95_a), (median_b, p95_b) = _typical(in_a), _typical(in_b)
        ratio = median_b / median_a if median_a and median_b is not None else None
        rest_a, rest_b = (column[~np.isnan(column)].astype(np.float64) for column in (a[1:, number], b[1:, number]))
        mean_a, mean_b = (rest.mean() if len(rest) else 0.0 for rest in (rest_a, rest_b))
        explains = mean_b * len(rest_b) - mean_a * (len(rest_b) or len(rest_a))
        once = float(np.nan_to_num(b[0, number]) - np.nan_to_num(a[0, number]))
        found.append(
            PhaseChange(
                *name, phase, count_a=len(in_a), count_b=len(in_b), median_a=median_a, median_b=median_b, p95_a=p95_a,
                p95_b=p95_b, ratio=ratio, p_value=_p_value(in_a, in_b), explains=float(explains), once=once,
            )
        )  # fmt: skip
    return found


def _typical(values: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Median and 95th percentile."""
    if not len(values):
        return None, None
    median, p95 = np.percentile(values, (50, 95))
    return float(median), float(p95)


def _p_value(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    from scipy.stats import mannwhitneyu

    if min(len(a), len(b)) < 2:
        return None
    value = float(mannwhitneyu(a, b).pvalue)
    return 1.0 if math.isnan(value) else value


def _corrected(changes: list[PhaseChange]) -> list[PhaseChange]:
    from scipy.stats import false_discovery_control

    tested = [index for index, change in enumerate(changes) if change.p_value is not None]
    values = [change.p_value for change in changes if change.p_value is not None]
    corrected = list(changes)
    if values:
        for index, value in zip(tested, false_discovery_control(values, method="by"), strict=True):
            corrected[index] = replace(changes[index], p_value=float(value))
    return corrected
