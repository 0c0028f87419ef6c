"""docs/json.md says what the code writes, since it is made from the classes; and what commands print is as it says.

``python tests/contracts/test_json.py`` writes it.
"""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect as types

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.common.json_files import Document, name_in_seconds

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "json.md"
ROOMS = ("prepare", "jobs", "measure", "read", "synthetic")
HEAD = """# The JSON of hvdkit

Made by `python tests/contracts/test_json.py` from the classes that write and read it; a test compares both.

Every JSON object that hvdkit prints (`--json`) or keeps in a file begins with the same three fields:

| field | type | what |
|---|---|---|
| `hvdkit` | text | the version that wrote it |
| `kind` | text | which of the kinds below |
| `schema` | whole number | version of its fields: greater when one is gone or means something else |

What a training writes itself has forms of its own, since it needs no tool: lines of JSON, such as those of
[`metrics.jsonl`](monitor.md#the-history) and the times of steps, and the manifest of a checkpoint.

Times are seconds, in fields whose names end in `_s` or `seconds` or whose table says so; sizes are bytes, rates bytes
per second. Null is what is not known. What hvdkit reads is checked against these fields, and refused with the place,
what is there and what was expected. The class of a kind gives its JSON Schema:
`python -c "import msgspec, hvdkit.measure.bench.results as r; print(msgspec.json.schema(r.ScalingResults))"`.
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
        lines = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?=    \w)", re.split(r"\n(?:Raises|Source):", lines)[0]):
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


def fields(cls, document):
    """Name, type, whether it is a time in another unit, and meaning of every field of a class in a document."""
    info, say = types.type_info(cls), told(cls)
    for field in info.fields:
        if isinstance(field.type, types.CustomType):
            continue  # arrays are not written
        if cls is document and field.name == "found":
            yield from fields(field.type.cls, document)
            continue
        timed = field.name in document.times
        name = name_in_seconds(field.encode_name) if timed else field.encode_name
        yield name, field.type, timed, say.get(field.name, "")
    for name in getattr(cls, "also", ()):
        text = inspect.getdoc(getattr(cls, name)) or ""
        timed = name in document.times
        yield name_in_seconds(name) if timed else name, None, timed, " ".join(text.split()).rstrip(".")


def table(cls, document, nested):
    rows = {}  # beside `found`, the later counts
    for name, kind, timed, what in fields(cls, document):
        said = "" if kind is None else word(kind, nested)
        said = f"{said.replace('whole number', 'number')}, seconds".removeprefix(", ") if timed else said
        rows[name] = said, what
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
                assert shared.setdefault(one, rows) == rows, f"{one} is written in several ways"
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
    assert len(kinds) >= 20
    assert len({kind.kind for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind.written_by.startswith("hvdkit ") and kind.schema >= 1
    unexplained = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == []


def test_a_time_is_seconds():
    for kind in documents():
        nested = [kind]
        for one in nested:
            found = list(fields(one, kind))
            table(one, kind, nested)
            assert not [name for name, *_ in found if re.search(r"_(ms|us|minutes)$", name)], (kind.kind, one)
            assert len(nested) < 100
    assert not re.findall("milliseconds|microseconds", PAGE.read_text())


def test_the_line_of_the_page_that_prints_a_schema_does():
    (code,) = re.findall(r'python -c "(.+)"', HEAD)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "#/$defs/ScalingResults" in done.stdout


def test_every_kind_has_a_json_schema():
    for kind in documents():
        if "found" not in kind.__struct_fields__:
            assert msgspec.json.schema(kind, schema_hook=lambda _: {"type": "array"})["$defs"]  # arrays are not written


TIMELINES = [str(one) for one in sorted((ROOT / "tests/data/timelines").glob("*.json"))]
PROFILES = [str(one) for one in sorted((ROOT / "tests/data/mpi_profiles").glob("mpi_profile.*"))]
NETWORK = ["--alpha-us", "1", "--bandwidth-gbit", "1", "--ppn", "1", "--at", "4"]
SAID = {
    "bench-summary": ["bench", "show", "bench.json", "--json"],
    "check": ["check", str(ROOT / "tests/data/check/defective/steps.py"), "--json"],
    "diff": ["diff", TIMELINES[1], TIMELINES[2], "--json"],
    "emulate-plan": ["emulate", "sizes", "--sizes", "400,800", "--json"],
    "emulate-summary": ["emulate", "show", "emulate.json", "--json"],
    "explanation": ["explain", TIMELINES[0], "--json"],
    "plan-memory": ["plan", "memory", "--parameters", "1e9", "-n", "1,4", "--json"],
    "mpi-profile": ["mpi-profile", "show", *PROFILES, "--json"],
    "plan-scale": ["plan", "scale", *NETWORK, "--plan", "sizes.json", "--step-ms", "300", "--json"],
    "plan-steps": ["plan", "steps", "--samples", "64", "--batch-size", "4", "--lr", "1", "-n", "1,2", "--json"],
    "timeline-merge": ["timeline", "merge", "timeline.json", "0.json", "-o", "merged.json", "--json"],
    "timeline-summary": ["timeline", "summary", TIMELINES[2], "--json"],
    "trace-summary": ["trace", "summary", "0.json", "1.json", "--json"],
}
"""A command line for each kind that needs neither ranks nor a build of Horovod; files are those of ``recorded``."""
TESTED_WHERE_MADE = {
    "bench-scaling", "bench-synthetic", "doctor", "doctor-job", "emulate-results", "horovod-build", "job-launch",
    "mpi-profile-rank", "test", "tuned",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with one recording of each kind."""
    import emulate_results
    import numpy as np
    import timeline_files
    import trace_files

    from hvdkit.measure.bench import results as bench
    from hvdkit.measure.bench.results import Environment, ScalingAsked

    folder = tmp_path_factory.mktemp("recorded")
    rng = np.random.default_rng(1)
    jobs = [bench.MeasuredJob(n, at, 1.0, float(4 / n + rng.random() / 50)) for n in (1, 2, 4) for at in range(5)]
    asked = ScalingAsked(("train.py",), (), (1, 2, 4), "strong", 5)
    subject = (asked, Environment("1", "3.11", "Linux", {}, 4), (), ())
    json_files.write(folder / "bench.json", bench.ScalingResults(*subject, jobs))
    json_files.write(folder / "emulate.json", emulate_results.made({400: 1e-3, 80_000: 5e-3}, noise=0.1))
    json_files.write(folder / "sizes.json", emulate_results.from_sizes([4_000_000] * 25))
    events = [*timeline_files.metadata("a", epoch=1_759_000_000_000_000), *timeline_files.allreduce(1, 1000)]
    timeline_files.write(folder / "timeline.json", events)
    for rank in (0, 1):
        steps = [trace_files.step(number, 100 * number, 90 + 5 * rank) for number in range(5)]
        inside = [trace_files.event("aten::mm", 100 * number + 1, 40 + 9 * rank) for number in range(5)]
        sums = [trace_files.gloo(100 * number + 60 + 9 * rank, 20) for number in range(5)]
        trace_files.write(folder / f"{rank}.json", *steps, *inside, *sums, rank=rank)
    return folder


def unlike(value, kind, document, place):
    """Places where a value is not what the page says of it."""
    if isinstance(kind, types.UnionType):
        parts = [unlike(value, one, document, place) for one in kind.types]
        yield from min(map(list, parts), key=len)
    elif isinstance(kind, types.StructType | types.DataclassType):
        described = {name: inner for name, inner, *_ in fields(kind.cls, document)}
        if not isinstance(value, dict) or value.keys() != described.keys():
            yield place, sorted(value.keys() ^ described.keys()) if isinstance(value, dict) else value
        else:
            for name, inner in described.items():
                yield from unlike(value[name], inner, document, f"{place}.{name}")
    elif isinstance(kind, types.DictType) and isinstance(value, dict):
        for name, one in value.items():
            yield from unlike(one, kind.value_type, document, f"{place}.{name}")
    elif isinstance(kind, types.CollectionType) and isinstance(value, list):
        for one in value:
            yield from unlike(one, kind.item_type, document, f"{place}[]")
    else:
        number = int | float
        plain = {types.StrType: str, types.BoolType: bool, types.NoneType: type(None)}
        plain |= {types.IntType: number, types.FloatType: number, types.DictType: dict}
        plain |= dict.fromkeys((types.ListType, types.VarTupleType), list)
        if not isinstance(value, plain.get(type(kind), object)):
            yield place, value


@pytest.mark.parametrize("name", SAID)
def test_a_command_prints_what_the_page_says(name, recorded, monkeypatch, capsys):
    monkeypatch.chdir(recorded)
    assert cli.run(SAID[name]) in (0, 1)
    said = json.loads(capsys.readouterr().out)
    (document,) = [one for one in documents() if one.kind == name]
    head = {field: said.pop(field) for field in list(said)[:3]}
    assert head == json_files.head(document)
    assert list(unlike(said, types.type_info(document), document, "")) == []


def test_every_kind_is_printed_in_a_test():
    assert SAID.keys() | TESTED_WHERE_MADE == {one.kind for one in documents()}


if __name__ == "__main__":
    PAGE.write_text(page())
