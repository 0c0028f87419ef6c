"""What hvdkit says to install can be installed: extras exist, and one package's name says which."""

import ast
import configparser
import re
from pathlib import Path

import hvdkit

ROOT = Path(hvdkit.__file__).parent.parent
HINT = re.compile(r"""(?:(?:hvdkit|["']\.)\[|EXTRAS *\??= *"?)([a-z,]+)\b""")
PARTS = ("hvdkit", "docs", "examples", "jobs", "benchmarks", "README.md", "Makefile", ".ci", "setup.cfg")


def extras() -> dict[str, str]:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return dict(settings["options.extras_require"])


def texts() -> dict[Path, str]:
    """Everything that tells a user what to install."""
    below = [file for part in PARTS for file in (ROOT / part, *(ROOT / part).rglob("*")) if file.is_file()]
    return {file: file.read_text(encoding="utf-8") for file in below if file.suffix in (".py", ".md", ".cfg", "")}


def test_every_hint_names_an_extra_that_exists():
    hints = {(file.name, hint) for file, text in texts().items() for hint in HINT.findall(text)}
    assert len(hints) > 10, "the pattern of hints matches next to nothing"
    named = {name for name, needs in extras().items() if not needs.strip().startswith("hvdkit[")}  # no second name
    assert {(file, hint) for file, hint in hints if set(hint.split(",")) - named} == set()


def test_every_import_of_an_extra_names_one_that_exists():
    calls = [
        node
        for path in (ROOT / "hvdkit").rglob("*.py")
        if "of_extra(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "of_extra"
    ]
    assert len(calls) > 5, "of_extra is not found"
    assert {ast.literal_eval(call.args[0]) for call in calls} <= extras().keys()
