"""Packages that come with an extra of hvdkit, and may not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdkit.errors import MissingFrameworkError


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
