"""What the root does for everybody, or all do alike: the result, or the error of whoever failed, on every rank."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.errors import AgreementError, HvdkitError, RootError
from hvdkit.steps.ranks import name_ranks


def on_root(is_root: bool, action: Callable[[], Any], broadcast_object: Callable[[Any], Any]) -> Any:
    """Run ``action`` on the root and give every rank its result or its error, so that none waits for a failed one.

    Args:
        is_root: whether this rank is the root.
        action: what only the root does; its result can be pickled.
        broadcast_object: gives every rank the root's object; a collective, which pickles before it sends.
    Raises:
        HvdkitError: the one that the action raised, on every rank.
        RootError: on the other ranks, when it raised any other. The root raises that one itself.
        KeyboardInterrupt, SystemExit: on every rank, so that a job ends as its root does.
    """
    if not is_root:
        result, failure = broadcast_object(None)
        if failure is not None:
            raise failure
        return result
    try:
        result = action()
    except BaseException as error:
        _tell(error, broadcast_object)
        raise
    try:
        broadcast_object((result, None))
    except Exception as error:  # it cannot be pickled, and nothing was sent; or the connection is lost
        _tell(error, broadcast_object)
        raise
    return result


def _tell(error: BaseException, broadcast_object: Callable[[Any], Any]) -> None:
    with contextlib.suppress(Exception):  # a lost connection's error would hide the first one
        broadcast_object((None, _for_others(error)))


def _for_others(error: BaseException) -> BaseException:
    """What the other ranks raise: nothing that pickle or another rank may not know."""
    if type(error).__module__ == HvdkitError.__module__:
        return error
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, SystemExit):
        return SystemExit(error.code if isinstance(error.code, int | str | None) else 1)
    told = "".join(traceback.format_exception_only(error)).strip()
    return RootError(f"the root failed at what it does for every rank: {told} (its own traceback says where).")


def stop_together(said: Sequence[str | None], failure: Exception | None) -> None:
    """Raise this rank's failure, or an AgreementError that tells of the others'.

    Args:
        said: what failed on each rank, by rank; None where nothing did.
        failure: this rank's.
    """
    if failure is not None:
        raise failure
    failed = [rank for rank, text in enumerate(said) if text is not None]
    if failed:
        raise AgreementError(f"{name_ranks(failed)} failed, and the others stop with it: {said[failed[0]]}")
