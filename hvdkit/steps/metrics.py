"""Metrics averaged over the ranks: exact whatever number of samples each rank saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdkit.core.communicator import Communicator
from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks
from hvdkit.steps import agreement


def sums_and_counts(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """This rank's metrics as (sum, count) by name, in the order of the names.

    Args:
        metrics: by name, a number (count 1) or a pair (sum, count).
    Raises:
        InvalidArgumentError: a value that is neither, or a negative count.
    """
    pairs = {}
    for name, value in sorted(metrics.items()):
        try:
            total, count = value if isinstance(value, (tuple, list)) else (value, 1)
            pairs[name] = float(total), float(count)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"metric {name!r} must be a number or a pair (sum, count), got {value!r}."
            ) from None
        if not pairs[name][1] >= 0:
            raise InvalidArgumentError(f"metric {name!r} must have a count >= 0, got {pairs[name][1]}.")
    return pairs


def require_same_names(ranks: Communicator, names: Iterable[str]) -> None:
    """Raise an AgreementError on every rank unless all give the same names of metrics; a collective."""
    mine = sorted(names)
    tables = ranks.allgather(agreement.digest_table(mine), "hvdkit.metric_names")
    difference = agreement.first_difference(tables)
    if difference is not None:
        raise AgreementError(
            f"the ranks average different metrics ({name_ranks(difference.groups[0])} against the rest); "
            f"this rank gives {', '.join(mine) or 'none'}; give the same names on every rank."
        )


def average(ranks: Communicator | None, metrics: Mapping[str, Any], size: int) -> dict[str, float]:
    """The mean of each metric over all ranks, the inside of each framework's ``average_metrics``; a collective.

    Args:
        ranks: None where this process is the only one.
        metrics: see ``sums_and_counts``.
        size: number of ranks, for the message.
    Returns:
        Sum of sums / sum of counts by name.
    Raises:
        InvalidArgumentError: a bad value, or a total count of 0.
        AgreementError: the ranks give different names; on every rank.
    """
    pairs = sums_and_counts(metrics)
    totals = np.array(list(pairs.values()), dtype=np.float64).reshape(len(pairs), 2)
    if ranks is not None:
        require_same_names(ranks, pairs)
        totals = ranks.allreduce(totals, "hvdkit.metrics") if pairs else totals
    means = {}
    for name, (total, count) in zip(pairs, totals.tolist(), strict=True):
        if count == 0:
            raise InvalidArgumentError(f"metric {name!r} has a total count of 0 over all {size} ranks.")
        means[name] = total / count
    return means
