"""Causes: what is worth a sentence, and how it is said."""

from __future__ import annotations

from hvdkit.read.causes import Cause, dearest_first


def _cause(kind: str, share: float, **other: object) -> Cause:
    return Cause(kind, 0.02 * share, share, f"It is {kind}.", "file: 1", "Mend it.", **other)  # type: ignore[arg-type]


def test_the_dearest_comes_first_and_what_costs_little_is_not_said() -> None:
    found = dearest_first([_cause("small", 0.019), _cause("input", 0.3), _cause("late", 0.5)])

    assert [cause.kind for cause in found] == ["late", "input"]


def test_a_cause_says_its_cost_per_step_or_once() -> None:
    assert _cause("input", 0.5).sentence() == "It is input. It costs 10.0 ms per step (50%)."
    assert _cause("setup", 0.5, per_step=False).sentence().endswith("It costs 10.0 ms once (50%).")
