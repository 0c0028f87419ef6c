"""Two profiles side by side: what each routine and purpose took, by the median over the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.read.mpi_profile import measures, traffic
from hvdkit.read.mpi_profile.model import Profile
from hvdkit.read.mpi_profile.traffic import PURPOSES


@dataclass(frozen=True, slots=True)
class Side:
    """One routine and purpose in one profile, medians over its ranks.

    Attributes:
        calls, seconds: of a rank; 0 where no rank called it.
        bytes: of a rank, None where it is not known.
    """

    calls: float
    seconds: float
    bytes: float | None


@dataclass(frozen=True, slots=True)
class ComparedRoutine:
    """The same in both.

    Attributes:
        routine, purpose: see ``traffic``.
        a, b: each profile.
        ratio: seconds of B over those of A; None where A has none.
    """

    routine: str
    purpose: str
    a: Side
    b: Side
    ratio: float | None


def compare(a: Profile, b: Profile) -> list[ComparedRoutine]:
    """Every routine and purpose of either, those whose time differs most first."""
    sides = _sides(a), _sides(b)
    none = Side(0, 0.0, None)
    found = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(key, none) for side in sides)
        ratio = second.seconds / first.seconds if first.seconds > 0 else None
        found.append(ComparedRoutine(*key, first, second, ratio))
    return sorted(
        found, key=lambda one: (-abs(one.b.seconds - one.a.seconds), one.routine, PURPOSES.index(one.purpose))
    )


def notes(a: Profile, b: Profile) -> list[str]:
    """What makes them hard to compare, full sentences."""
    found = []
    if a.size != b.size:
        found.append(f"A is of {a.size} ranks and B of {b.size}.")
    if a.source != b.source:
        found.append(f"A was recorded by {a.source} and B by {b.source}: what each counts as bytes can differ.")
    if a.library and b.library and a.library != b.library:
        found.append(f"A ran with {a.library} and B with {b.library}.")
    for name, profile in (("A", a), ("B", b)):
        if profile.missing:
            found.append(f"{name}: {missing_text(profile)}")
    seconds = [_elapsed(profile) for profile in (a, b)]
    if seconds[0] and seconds[1] and not 2 / 3 < seconds[1] / seconds[0] < 3 / 2:
        found.append(f"A ran for {seconds[0]:.1f} s and B for {seconds[1]:.1f} s: compare shares rather than sums.")
    return found


def missing_text(profile: Profile) -> str:
    """Which ranks have no record, a full sentence; "" when all have."""
    missing: Sequence[int] = profile.missing
    if not missing:
        return ""
    names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"{len(missing)} of {profile.size} ranks left no record: {names}."


def _elapsed(profile: Profile) -> float:
    seconds = [rank.seconds for rank in profile.ranks if rank.seconds is not None]
    return statistics.median(seconds) if seconds else 0.0


def _sides(profile: Profile) -> dict[tuple[str, str], Side]:
    ranks = traffic.of_profile(profile)
    found = {}
    for routine, purpose in dict.fromkeys((row.routine, purpose) for one in ranks for row, purpose in one.calls):
        totals = [measures.total(one.of(purpose, routine)) for one in ranks]
        sizes = [one.bytes for one in totals if one.bytes is not None]
        found[routine, purpose] = Side(
            statistics.median(one.calls for one in totals),
            statistics.median(one.seconds for one in totals),
            statistics.median(sizes) if sizes else None,
        )
    return found
