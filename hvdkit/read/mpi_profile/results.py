"""A profile as the JSON that ``schema.json`` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hvdkit.read.mpi_profile import findings, measures
from hvdkit.read.mpi_profile.comparison import Compared, missing_text
from hvdkit.read.mpi_profile.model import Profile
from hvdkit.read.mpi_profile.traffic import Traffic

VERSION = 1


_GUESSED = (
    "These files have sizes alone, by which Horovod's negotiation is told from data; its responses, one more broadcast "
    "for each gather, are counted as data."
)


def notes(profile: Profile, shown: Traffic) -> list[str]:
    """What a reader should know, full sentences."""
    missing = missing_text(profile)
    guessed = shown.horovod and not shown.certain
    return [*([missing] if missing else []), *([_GUESSED] if guessed else []), *profile.notes, findings.NOT_SEEN]


def as_json(profile: Profile, traffic: Sequence[Traffic], shown: Traffic) -> dict[str, Any]:
    """The profile with all that is said of it.

    Args:
        traffic: of every rank.
        shown: of the rank that routines, sizes and findings are about.
    """
    return {
        "hvdkit": "mpi-profile",
        "version": VERSION,
        "source": profile.source,
        "library": profile.library,
        "size": profile.size,
        "missing": list(profile.missing),
        "mpi_seconds": None if not profile.mpi_seconds else _spread(measures.spread(dict(profile.mpi_seconds))),
        "shown_rank": shown.rank.rank,
        "routines": [
            {"routine": one.name, **_total(one.total), "ranks": _spread(one.seconds)}
            for one in measures.routines(profile, shown)
        ],
        "sizes": [_size(one) for one in measures.sizes(profile, shown)],
        "traffic": {
            "certain": shown.certain,
            "horovod": shown.horovod,
            **{purpose: _total(one) for purpose, one in measures.purposes(shown).items()},
        },
        "ranks": [_rank(one) for one in traffic],
        "findings": [asdict(finding) for finding in findings.find(profile, shown)],
        "notes": notes(profile, shown),
    }


def compared_as_json(compared: Sequence[Compared], remarks: Sequence[str]) -> dict[str, Any]:
    """A comparison; A and B are medians over the ranks."""
    return {
        "hvdkit": "mpi-profile comparison",
        "version": VERSION,
        "notes": list(remarks),
        "compared": [asdict(one) for one in compared],
    }


def _total(total: measures.Total) -> dict[str, Any]:
    return {**asdict(total), "average_bytes": total.average_bytes}


def _spread(spread: measures.Spread) -> dict[str, Any]:
    return asdict(spread)


def _size(one: measures.Sizes) -> dict[str, Any]:
    values = asdict(one)
    del values["total"]
    return {**values, **_total(one.total)}


def _rank(traffic: Traffic) -> dict[str, Any]:
    rank = traffic.rank
    return {
        "rank": rank.rank,
        "state": rank.state,
        "seconds": rank.seconds,
        "mpi_seconds": rank.mpi_seconds,
        "calls": [{**asdict(row), "purpose": purpose} for row, purpose in traffic.calls],
    }
