"""The exceptions of hvdkit, and checks that raise them.

::

    HvdkitError
    ├── InvalidArgumentError (ValueError)       a value that cannot be right; exit 2
    ├── MissingFrameworkError (ImportError)     a framework, Horovod or a package of an extra is missing
    ├── LauncherError                           the launcher's environment is incomplete or unreadable
    │   └── TopologyMismatchError               the launcher and Horovod disagree about rank or size
    ├── AgreementError                          the ranks hold different values
    ├── RootError                               the root failed at what it does for every rank
    ├── CheckpointError                         nothing valid to load, or nothing could be written
    ├── DataError                               a data set cannot be used
    │   ├── DataNotFoundError (FileNotFoundError)   exit 2
    │   └── CorruptDataError
    ├── InstallError                            Horovod could not be built or installed
    └── LaunchError                             the processes could not be started

Every message says what was received, what was expected and the fix. ``exit_code`` is what the command line
exits with: 2 for bad usage, 1 for everything else.
"""

from __future__ import annotations

import math
import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any


class HvdkitError(Exception):
    """Base of every error that hvdkit raises on purpose."""

    exit_code = 1


class InvalidArgumentError(HvdkitError, ValueError):
    """A value that cannot be right, whatever the job; found before any work is done."""

    exit_code = 2


# Not ValueError's: from within a tf.function TensorFlow raises an error as its own class only where it finds this one.
InvalidArgumentError.__init__ = Exception.__init__  # type: ignore[method-assign]


class MissingFrameworkError(HvdkitError, ImportError):
    """A framework, Horovod or a package of an extra is not installed; the message names the command that helps."""


class LauncherError(HvdkitError):
    """The launcher's environment variables are incomplete or cannot be read."""


class TopologyMismatchError(LauncherError):
    """The launcher started one job and Horovod sees another (rank or size differ)."""


class AgreementError(HvdkitError):
    """Ranks that must hold the same values hold different ones; raised on every rank."""


class RootError(HvdkitError):
    """The root failed at what it does for every rank, with an error of its own that its traceback shows."""


class CheckpointError(HvdkitError):
    """No valid checkpoint to load, or one could not be written; earlier ones are intact."""


class DataError(HvdkitError):
    """A data set cannot be used."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A file that was named, or the files of a data set, are not where they were looked for."""

    exit_code = 2


class CorruptDataError(DataError):
    """A file of a data set is there and is not what it should be."""


class InstallError(HvdkitError):
    """Horovod could not be built or installed; the environment is as it was before."""


class LaunchError(HvdkitError):
    """The processes of a job could not be started."""


@contextmanager
def of_extra(extra: str, purpose: str, otherwise: str = "") -> Iterator[None]:
    """Around the imports of packages that come with an extra of hvdkit.

    Args:
        extra: its name in setup.cfg.
        purpose: what needs which package, the beginning of a sentence: "--plot draws with Matplotlib".
        otherwise: what else would do, the end of one: ", or draw an .svg".
    Raises:
        MissingFrameworkError: one of them cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise MissingFrameworkError(
            f"{purpose}, which is not installed; pip install 'hvdkit[{extra}]'{otherwise}."
        ) from error


def require_scipy(purpose: str) -> None:
    """Say before anything runs that SciPy is missing.

    Args:
        purpose: what needs it, the beginning of a sentence: "hvdkit plan scale fits its model".
    Raises:
        MissingFrameworkError: it is not installed.
    """
    with of_extra("analysis", f"{purpose} with SciPy"):
        import scipy  # noqa: F401


def whole(name: str, value: Any, least: int) -> int:
    """A number that a caller gives, Python's, NumPy's or a framework's, as an int.

    Raises:
        InvalidArgumentError: no integer, a bool, or less than ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise InvalidArgumentError(f"{name} must be an integer >= {least}, got {value!r}.")
    return number


def finite(name: str, value: Any, *, positive: bool = False) -> float:
    """The same as a float.

    Raises:
        InvalidArgumentError: no number, inf or nan, or with ``positive`` one that is not above 0.
    """
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several
        number = math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        raise InvalidArgumentError(f"{name} must be a {'positive, ' * positive}finite number, got {value!r}.")
    return number


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
