"""Ranks for messages; the standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, runs folded: "rank 3", "ranks 0-2, 5".

    Args:
        ranks: in increasing order, at least one.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
