"""Whether a value from a file is as ``schema.json`` says: the words of JSON Schema that it uses, and no others."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from hvdkit.common.units import printable

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


@cache
def schema() -> dict[str, Any]:
    """The published schema of the results."""
    found: dict[str, Any] = json.loads(
        (resources.files("hvdkit.measure.bench") / "schema.json").read_text(encoding="utf-8")
    )
    return found


def require(value: object, rule: Mapping[str, Any], place: str = "") -> None:
    """Refuse what is not as a rule says; numbers have to be finite.

    Args:
        value: from ``json.loads``.
        rule: the schema, or a part of it.
        place: where in the file, for the sentence.
    Raises:
        ValueError: something is missing, unknown or of another kind.
    """
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    if "const" in rule or "enum" in rule:
        allowed = [rule["const"]] if "const" in rule else rule["enum"]
        if value not in allowed or isinstance(value, bool):  # True == 1, and is no version
            raise ValueError(f"{place} is none of {json.dumps(allowed)}")
        return
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    if not any(isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "boolean") for kind in kinds):
        raise ValueError(f"{place or 'the whole'} is no {' or '.join(kinds)}")
    if isinstance(value, dict):
        _require_object(value, rule, place)
    elif isinstance(value, list):
        if len(value) < rule.get("minItems", 0):
            raise ValueError(f"{place} is empty")
        for index, item in enumerate(value):
            require(item, rule["items"], f"{place}[{index}]")
    elif isinstance(value, int | float) and not _in_range(value, rule):
        raise ValueError(f"{place} is {value}")


def _in_range(value: float, rule: Mapping[str, Any]) -> bool:
    return (
        abs(value) <= sys.float_info.max  # false for what is no number, too
        and value >= rule.get("minimum", -math.inf)
        and value > rule.get("exclusiveMinimum", -math.inf)
    )


def _require_object(value: Mapping[str, object], rule: Mapping[str, Any], place: str) -> None:
    known, others = rule.get("properties", {}), rule.get("additionalProperties")
    missing = [name for name in rule.get("required", ()) if name not in value]
    if missing:
        raise ValueError(f"{place or 'it'} has no {missing[0]}")
    for name, inner in value.items():
        inside = f"{place}.{printable(name)}".lstrip(".")
        if name in known:
            require(inner, known[name], inside)
        elif isinstance(others, dict):
            require(inner, others, inside)
        else:
            raise ValueError(f"{place or 'it'} has the unknown {json.dumps(name)}")
