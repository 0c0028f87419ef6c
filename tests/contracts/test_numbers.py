"""Numbers for people are written in one form: shares by ``common.units``."""

import ast
import re
from pathlib import Path

import pytest

import hvdkit
from hvdkit.common import units

PACKAGE = Path(hvdkit.__file__).parent
UNITS = PACKAGE / "common" / "units.py"


def strays(source):
    """The lines that write a percentage by hand: ``{x:.0f}%``, ``{x:.1%}``, and ``5 %`` in what is printed."""
    tree = ast.parse(source)
    docstrings = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for before, after in zip(node.values, node.values[1:], strict=False):
                by_hand = isinstance(after, ast.Constant) and re.match(r" ?%", str(after.value))
                if isinstance(before, ast.FormattedValue) and by_hand:
                    yield node.lineno
        elif isinstance(node, ast.FormattedValue):
            if node.format_spec is not None and ast.unparse(node.format_spec).rstrip("'\"").endswith("%"):
                yield node.lineno
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and re.search(r"[0-9] %", str(node.value)):
            yield node.lineno


@pytest.mark.parametrize("written", ["f'{share:.0f}%'", "f'{share} % of it'", "f'{share:>6.1%}'", "print('50 %')"])
def test_a_percentage_by_hand_is_found(written):
    assert list(strays(written))
    assert not list(strays("def f():\n    'More than 5 %.'\n    return f'{share_text(x)} of 95%', f'{now:%H:%M}'"))


def test_no_tool_writes_a_percentage_by_hand():
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != UNITS}
    found = {path: text for path, text in sources.items() if "%" in text}
    assert len(found) > 50
    assert [f"{path}:{line}" for path, text in found.items() for line in strays(text)] == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.duration_text(0.5), "0.50 us"),
        (units.duration_text(1_500), "1.50 ms"),
        (units.duration_text(2.5e6), "2.50 s"),
        (units.bytes_text(999), "999 B"),
        (units.bytes_text(1_500), "1.50 kB"),
        (units.bytes_text(2.5e9), "2.50 GB"),
        (units.share_text(0.9999), "99.9%"),
        (units.change_text(-0.25), "-25%"),
        (units.number_text(12345), "12345"),
        (units.number_text(0.00012345), "1.23e-04"),
    ],
)
def test_a_number_has_its_unit(written, expected):
    assert written == expected
