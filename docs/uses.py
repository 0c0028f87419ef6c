"""Where the repository uses each public name of an adapter, in programs that `make test` runs."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")


def public(adapter: str) -> list[str]:
    """The names in ``__all__`` of an adapter."""
    for node in ast.parse((ROOT / "hvdkit" / adapter / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"hvdkit.{adapter} has no __all__")


@cache
def _programs(adapter: str) -> dict[str, list[str]]:
    """The lines of the adapter's examples, and then of the tests on ranks that name the adapter, by file."""
    examples = [
        path for path in sorted(ROOT.glob("examples/*/*.py")) if f"import hvdkit.{adapter} " in path.read_text()
    ]
    starts = re.compile(rf'import hvdkit\.{adapter} as hk|on_ranks\([^)]*"{adapter}|ON = "{adapter}')
    tests = [
        path
        for path in sorted(ROOT.glob("tests/parallel/*.py"))
        if adapter in path.stem or starts.search(path.read_text())
    ]
    return {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in (*examples, *tests)}


def uses(adapter: str, name: str) -> list[str]:
    """At most two places, ``file:line``, an example before a test; a class that a function returns has none."""
    pattern = re.compile(rf"\b(?:hk|hvdkit\.{adapter})\.{name}\b")
    places = (
        next((f"{file}:{number}" for number, line in enumerate(lines, 1) if pattern.search(line)), None)
        for file, lines in _programs(adapter).items()
    )
    return [place for place in places if place][:2]
