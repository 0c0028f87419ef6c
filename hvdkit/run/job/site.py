"""Reads what a site wants said in its batch scripts: TOML files here, or one of the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hvdkit.common.files import is_file, text
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job.limits import WALLTIME
from hvdkit.run.job.model import Queue, Site
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
    return Site(name=file.stem, **_checked(values, f"Site file {file}: key ", Site))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "a list of single lines": ("directives setup source", lambda value: _is_list(value) and all(map(_is_line, value))),
    "true or false": ("whole_nodes account_required by_name", lambda value: isinstance(value, bool)),
    "a number above 0": (
        "depth cpus_per_node gpus_per_node min_nodes max_nodes",
        lambda value: type(value) is int and value > 0,
    ),
    f"one of {', '.join(SYSTEMS)}": ("system", lambda value: value in list(SYSTEMS)),
    f"one of auto, {', '.join(LAUNCHERS)}": ("launcher", lambda value: value in ["auto", *LAUNCHERS]),
    "a line that begins with #! and ends in bash, such as '#!/bin/bash -l'": (
        "shell",
        lambda value: _is_line(value) and value.startswith("#!") and "bash" in value,
    ),
    "HH:MM:SS": ("max_walltime", lambda value: _is_line(value) and WALLTIME.fullmatch(value) is not None),
    "a list of tables": ("queues", lambda value: _is_list(value) and all(isinstance(one, dict) for one in value)),
    "a single line": (
        "queue constraint cpu_bind select retired name partition qos",
        lambda value: _is_line(value),
    ),
}
"""What the keys of a site file may hold, in words and as a test."""


def _checked(values: Mapping[str, Any], where: str, kind: type[Site] | type[Queue]) -> dict[str, Any]:
    known = {field.name: field for field in fields(kind) if kind is Queue or field.name != "name"}
    for key in values:
        if key not in known:
            raise InvalidArgumentError(f"{where}{key!r} is not one of {', '.join(known)}.")
    for key, field in known.items():
        if field.default is MISSING and key not in values:
            given = f"one of {', '.join(SYSTEMS)}" if key == "system" else "the name of the queue"
            raise InvalidArgumentError(f"{where}{key!r} is missing; give {given}.")
    return {key: _value(key, value, where) for key, value in values.items()}


def _value(key: str, value: Any, where: str) -> Any:
    ((expected, right),) = ((said, test) for said, (keys, test) in _KINDS.items() if key in keys.split())
    if not right(value):
        raise InvalidArgumentError(f"{where}{key!r} must be {expected}, got {value!r}.")
    if key == "queues":
        return tuple(
            Queue(**_checked(one, f"{where}{key!r}, number {n}: key ", Queue)) for n, one in enumerate(value, 1)
        )
    return tuple(value) if isinstance(value, list) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and "\n" not in value and "\r" not in value
