"""What was asked for and where it ran, as pairs of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.common.json_files import Part, plain


def flat(values: Part | Mapping[str, Any]) -> dict[str, str]:
    """Names and values as text; what is inside an entry is named after it: ``packages torch``. Lists are left out."""
    found: dict[str, str] = {}
    for name, value in (plain(values) if isinstance(values, Part) else values).items():
        if isinstance(value, Mapping):
            found.update({f"{name} {inner}": text for inner, text in flat(value).items()})
        elif not isinstance(value, list | tuple):
            found[name] = "none" if value is None else str(value)
    return found
