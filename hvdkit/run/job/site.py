"""Reads what a site wants said in its batch scripts: TOML files here, or one of the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hvdkit.common.files import is_file, text
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job.model import Site
from hvdkit.run.job.systems import SYSTEMS
from hvdkit.run.launch.plan import LAUNCHERS

SITES = Path(__file__).parent / "sites"
"""The files that come with hvdkit."""


def known() -> list[str]:
    """The names of the sites that come with hvdkit."""
    return sorted(file.stem for file in SITES.glob("*.toml"))


def find(system: str | None, site: str | None) -> Site:
    """The site of ``--system`` and ``--site``.

    Args:
        system: a name of ``SYSTEMS``, None for that of the site.
        site: a name of ``known()`` or the path of a TOML file; None for the plain form of the system.
    Raises:
        InvalidArgumentError: neither is given, they contradict each other, or the file is bad.
    """
    if site is None and system is None:
        raise InvalidArgumentError(
            f"Which batch system? Give --system ({', '.join(SYSTEMS)}) or --site ({', '.join(known())}, or a file)."
        )
    found = read(_file(site or str(system)))
    if system is not None and found.system != system:
        raise InvalidArgumentError(f"Site {found.name} has {found.system}, and --system says {system}; leave one out.")
    return found


def _file(site: str) -> Path:
    if site in known():
        return SITES / f"{site}.toml"
    if not is_file(Path(site)):
        raise InvalidArgumentError(
            f"Site {site!r} is neither one of {', '.join(known())} nor a file; give one of them, or the path of a TOML "
            "file of your own."
        )
    return Path(site)


def read(file: Path) -> Site:
    """One site file.

    Raises:
        InvalidArgumentError: it cannot be read, or a key is unknown, missing or of the wrong kind.
    """
    try:
        values = tomllib.loads(text(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if nested else getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(f"Site file {file} cannot be read: {reason}.") from error
    return Site(name=file.stem, **_checked(values, file))


def _checked(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    kinds = {field.name: field for field in fields(Site) if field.name != "name"}
    for key in values:
        if key not in kinds:
            raise InvalidArgumentError(f"Site file {file}: key {key!r} is not one of {', '.join(kinds)}.")
    for key, field in kinds.items():
        if field.default is MISSING and key not in values:
            raise InvalidArgumentError(f"Site file {file}: key {key!r} is missing; give one of {', '.join(SYSTEMS)}.")
    return {key: _value(key, value, file) for key, value in values.items()}


def _value(key: str, value: Any, file: Path) -> Any:
    if key in ("directives", "setup"):
        expected = "a list of single lines"
        right = isinstance(value, list) and all(isinstance(line, str) and _one_line(line) for line in value)
        value = tuple(value) if isinstance(value, list) else value
    elif key in ("whole_nodes", "account_required"):
        expected, right = "true or false", isinstance(value, bool)
    elif key == "depth":
        expected, right = "a number above 0", type(value) is int and value > 0
    elif key in ("system", "launcher"):
        choices = list(SYSTEMS) if key == "system" else ["auto", *LAUNCHERS]
        expected, right = f"one of {', '.join(choices)}", value in choices
    elif key == "shell":
        expected = "a line that begins with #! and ends in bash, such as '#!/bin/bash -l'"
        right = isinstance(value, str) and _one_line(value) and value.startswith("#!") and "bash" in value
    else:
        expected, right = "a single line", isinstance(value, str) and _one_line(value)
    if not right:
        got = list(value) if isinstance(value, tuple) else value
        raise InvalidArgumentError(f"Site file {file}: key {key!r} must be {expected}, got {got!r}.")
    return value


def _one_line(text: str) -> bool:
    return "\n" not in text and "\r" not in text
