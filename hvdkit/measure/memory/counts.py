"""Large numbers as people write them."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import click

MOST = 10**18
"""More is a typing error, and no number that a table can show."""
_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def count(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """A click callback for a whole number such as 25557032, 1e12 or 7B.

    Raises:
        click.BadParameter: no number, none that is whole, or none from 1 to ``MOST``.
    """
    if text is None:
        return None
    factor = _FACTORS.get(text[-1:].lower(), 1)
    try:
        value = Decimal(text if factor == 1 else text[:-1]) * factor
    except InvalidOperation:
        value = Decimal("nan")
    if not (value.is_finite() and 1 <= value <= MOST and value == int(value)):
        raise click.BadParameter(f"expected a whole number from 1 to 1e18 like 25557032, 1e12 or 7B, got {text!r}")
    return int(value)
