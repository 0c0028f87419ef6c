"""docs/json.md says what the code writes, since it is made from the classes.

``python tests/contracts/test_json.py`` writes it.
"""

import importlib
import inspect
import pkgutil
import re
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import inspect as types

from hvdkit.common.json_files import Document, name_in_seconds

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
ROOMS = ("prepare", "run", "measure", "read", "synthetic")
HEAD = """# The JSON of hvdkit

Made by `python tests/contracts/test_json.py` from the classes that write and read it; a test compares both.

Every JSON object that hvdkit prints (`--json`) or keeps in a file begins with the same three fields:

| field | type | what |
|---|---|---|
| `hvdkit` | text | the version that wrote it |
| `kind` | text | which of the kinds below |
| `schema` | whole number | version of its fields: greater when one is gone or means something else |

Times are seconds, in fields whose names end in `_s` or `seconds` or whose table says so; sizes are bytes, rates bytes
per second. Null is what is not known. What hvdkit reads is checked against these fields, and refused with the place,
what is there and what was expected. The class of a kind gives its JSON Schema:
`python -c "import msgspec; from hvdkit.measure.bench.results import Results; print(msgspec.json.schema(Results))"`.
"""


def documents():
    """Every kind of JSON, by its name."""
    for room in ROOMS:
        package = importlib.import_module(f"hvdkit.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            source = Path(importlib.util.find_spec(module.name).origin).read_text()
            if "(Document" in source:
                importlib.import_module(module.name)
    found = [kind for kind in Document.__subclasses__() if kind.__module__.startswith("hvdkit.")]
    return sorted(found, key=lambda kind: kind.kind)


def told(cls):
    """What the docstrings of a class and of those that it is made from say of its fields."""
    found = {}
    for one in reversed(cls.__mro__):
        if not one.__module__.startswith("hvdkit."):
            continue
        lines = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2].partition("\nRaises:")[0]
        for entry in re.split(r"\n(?=    \w)", lines):
            names, _, text = entry.strip().partition(": ")
            text = " ".join(text.replace("``", "`").split()).replace("|", "\\|").rstrip(".")
            found.update(dict.fromkeys(names.replace("`", "").split(", "), re.sub(r"\bNone\b", "null", text)))
    return found


def summary(cls):
    text = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("``", "`").split()))


def word(kind, nested):
    """A type in words; classes that are met are added to ``nested``."""
    if isinstance(kind, types.UnionType):
        words = [word(one, nested) for one in kind.types]
        return " or ".join(sorted(words, key=lambda one: one == "null"))
    if isinstance(kind, types.StructType | types.DataclassType):
        nested.append(kind.cls)
        return kind.cls.__name__
    if isinstance(kind, types.IntType | types.FloatType):
        limits = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
        said = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None and limit < 2**62)
        return f"{'whole number' if isinstance(kind, types.IntType) else 'number'} {said}".strip()
    if isinstance(kind, types.DictType):
        return f"object of {word(kind.value_type, nested)}, by {word(kind.key_type, nested)}"
    if isinstance(kind, types.ListType | types.VarTupleType | types.CollectionType):
        return f"array of {word(kind.item_type, nested)}"
    if isinstance(kind, types.TupleType):
        return f"array of {', '.join(word(one, nested) for one in kind.item_types)}"
    if isinstance(kind, types.StrType) and kind.pattern:
        return f"text `{kind.pattern}`".replace("|", "\\|")
    plain = {types.StrType: "text", types.BoolType: "true or false", types.NoneType: "null", types.AnyType: "any"}
    return plain[type(kind)]


def fields(cls, document, nested):
    """Name, type and meaning of every field of a class in a document."""
    info, say = types.type_info(cls), told(cls)
    for field in info.fields:
        if isinstance(field.type, types.CustomType):
            continue  # arrays are not written
        if cls is document and field.name == "found":
            yield from fields(field.type.cls, document, nested)
            continue
        timed = field.name in document.times
        name = name_in_seconds(field.encode_name) if timed else field.encode_name
        yield name, f"{word(field.type, nested)}{', seconds' if timed else ''}", say.get(field.name, "")
    for name in getattr(cls, "also", ()):
        text = inspect.getdoc(getattr(cls, name)) or ""
        timed = name in document.times
        yield name_in_seconds(name) if timed else name, "seconds" if timed else "", " ".join(text.split()).rstrip(".")


def table(cls, document, nested):
    rows = {
        name: (kind, what) for name, kind, what in fields(cls, document, nested)
    }  # beside `found`, the later counts
    lines = (f"| `{name}` | {kind} | {what} |" for name, (kind, what) in rows.items())
    return "\n".join(["| field | type | what |", "|---|---|---|", *lines])


def page():
    """The whole of docs/json.md."""
    used, parts = Counter(), {}
    for document in documents():
        nested, done = [], []
        own = table(document, document, nested)
        tables = {}
        while nested:
            one = nested.pop(0)
            if one not in done:
                done.append(one)
                tables[one] = table(one, document, nested)
        used.update(done)
        parts[document] = own, tables
    shared, text = {}, [HEAD]
    for document, (own, tables) in parts.items():
        text.append(f"\n## {document.kind}\n`{document.written_by}`. {summary(document)}\n\n{own}\n")
        for one, rows in tables.items():
            if used[one] > 1:
                shared[one] = rows
            else:
                text.append(f"\n### {one.__name__}\n{summary(one)}\n\n{rows}\n")
    text.append("\n## Parts of several kinds\n")
    for one in sorted(shared, key=lambda one: one.__name__):
        text.append(f"\n### {one.__name__}\n{summary(one)}\n\n{shared[one]}\n")
    return "".join(text)


def test_the_page_says_what_the_code_writes():
    assert PAGE.read_text() == page(), "write it with: python tests/contracts/test_json.py"


def test_kinds_have_names_of_their_own_and_fields_that_are_explained():
    kinds = documents()
    assert len(kinds) >= 25
    assert len({kind.kind for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind.written_by.startswith("hvdkit ") and kind.schema >= 1
        missing = [name for name, _, what in fields(kind, kind, []) if not what]
        assert not missing or "found" in kind.__struct_fields__, (kind.kind, missing)


def test_a_time_is_seconds():
    for kind in documents():
        nested = [kind]
        for one in nested:
            found = list(fields(one, kind, nested))
            assert not [name for name, _, _ in found if re.search(r"_(ms|us|minutes)$", name)], (kind.kind, one)
            assert len(nested) < 100


def test_every_kind_has_a_json_schema():
    for kind in documents():
        if "found" not in kind.__struct_fields__:
            assert msgspec.json.schema(kind)["$defs"]


if __name__ == "__main__":
    PAGE.write_text(page())
