"""Templates to text: everything is escaped, and what a page may run or apply is named by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.common.files import replacing
from hvdkit.errors import of_extra

with of_extra("report", "HTML reports and SVG plots need the package jinja2"):
    import jinja2


def environment(package: str) -> jinja2.Environment:
    """Where a package's templates are found, and after them those that all pages share (``drawing.html.j2``).

    Args:
        package: with a folder ``templates``, such as "hvdkit.read.timeline".
    """
    loaders = [jinja2.PackageLoader(package), jinja2.PackageLoader("hvdkit.common")]
    return jinja2.Environment(loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined)


def resource(package: str, name: str) -> str:
    """The text of a file in a package's folder ``templates``."""
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Fact:
    """One number of the summary of a page."""

    label: str
    value: str
    note: str = ""


def page(package: str, style: str, **content: Any) -> str:
    """An HTML page that needs nothing else: ``report.html.j2`` of the package, which extends ``page.html.j2``.

    Args:
        package: as in ``environment``.
        style: the style sheet; a Content-Security-Policy allows it by its hash.
        content: title, subtitle, facts, notes, and what the template names. It is escaped.
    """
    template = environment(package).get_template("report.html.j2")
    return template.render(version=hvdkit.__version__, style=style, style_hash=content_hash(style), **content)


def write(path: Path, make: Callable[[], str], *sources: Path) -> None:
    """Write a page to a file, completely or not at all.

    Args:
        path: the file.
        make: makes the text.
        sources: what is read meanwhile, which ``path`` must not be.
    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    with replacing(path, *sources) as file:
        file.write(make().encode("utf-8", "replace"))


def content_hash(text: str) -> str:
    """A script or style sheet as a Content-Security-Policy names it (W3C CSP Level 3, section 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
