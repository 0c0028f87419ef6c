"""docs/api*.md: every public name of a binding and every class that a user holds is there, and says what it does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
SHOWN = re.compile(r"^\.\. auto(?:class|function):: ([\w.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """The classes of hvdkit by name, each with its module."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for path in sorted((ROOT / "hvdkit").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((module, node))
    return found


@pytest.fixture
def uses(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import uses

    return uses


def shown(page: str) -> set[str]:
    return set(SHOWN.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")))


def with_bases(classes, module: str, name: str) -> list[ast.ClassDef]:
    """A class and those of hvdkit that it is made from; a name that several files have is that of the same package."""
    here = [row for row in classes.get(name, ()) if row[0] == module] or [
        row for row in classes.get(name, ()) if row[0].rpartition(".")[0] == module.rpartition(".")[0]
    ]
    found = []
    for where, node in here or classes.get(name, ())[:1]:
        found.append(node)
        for base in node.bases:
            last = re.sub(r"\[.*", "", ast.unparse(base)).split(".")[-1]
            elsewhere = [row for row in classes.get(last, ()) if row[1] is not node]
            common = [row for row in elsewhere if row[0].startswith(("hvdkit.steps.", "hvdkit.observe."))] or elsewhere
            found += [one for row in common[:1] for one in with_bases(classes, row[0], last)]
        assert where.startswith("hvdkit.")
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_public_name_is_on_the_page_of_its_binding(uses, adapter):
    names = set(uses.public(adapter)) - {"Topology"}
    assert {one for one in shown(f"api_{adapter}") if "." not in one} == names
    assert "hvdkit.Topology" in shown("api")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_class_that_a_function_makes_is_on_the_page(classes, adapter):
    made = {
        f"{module}.{name}"
        for name, rows in classes.items()
        for module, node in rows
        if re.search(rf"[Mm]ade by ``hvdkit\.{adapter}\.\w+``", " ".join((ast.get_docstring(node) or "").split()))
    }
    assert len(made) >= 1
    pages = shown(f"api_{adapter}")
    assert {one for one in made if one not in pages and one.rpartition(".")[2] not in pages} == set()


@pytest.mark.parametrize("page", ["api", *(f"api_{adapter}" for adapter in ADAPTERS)])
def test_every_public_method_of_what_a_user_holds_says_what_it_does(classes, uses, page):
    package = f"hvdkit.{page.removeprefix('api_')}" if page != "api" else "hvdkit"
    methods, silent = 0, []
    for name in sorted(shown(page)):
        module, _, short = name.rpartition(".")
        if not short[0].isupper():
            continue
        held = with_bases(classes, module or f"{package}.__init__", short)
        assert held, name
        for owner in held:
            for node in owner.body:
                public = isinstance(node, ast.FunctionDef) and (
                    node.name == "__call__" or not node.name.startswith("_")
                )
                if public and uses.is_for_users(owner.name, node.name):
                    methods += 1
                    silent += [] if ast.get_docstring(node) else [f"{name}.{node.name}"]
    assert methods > 8
    assert silent == []


def test_what_is_left_out_exists(classes, uses):
    for name, methods in uses.FOR_HVDKIT.items():
        there = {one.name for _, node in classes[name] for one in node.body if isinstance(one, ast.FunctionDef)}
        assert set(methods.split()) <= there, name
