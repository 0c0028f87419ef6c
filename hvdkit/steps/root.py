"""What the root does for everybody: its result, or its error, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.errors import HvdkitError


def on_root(is_root: bool, action: Callable[[], Any], broadcast_object: Callable[[Any], Any]) -> Any:
    """Run ``action`` on the root and give every rank its result or its error, so that none waits for a failed one.

    Args:
        is_root: whether this rank is the root.
        action: what only the root does.
        broadcast_object: gives every rank the root's object; a collective.
    Raises:
        HvdkitError: the one that the action raised, on every rank.
    """
    outcome: Any = None
    if is_root:
        try:
            outcome = action()
        except HvdkitError as error:
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, HvdkitError):
        raise outcome
    return outcome
