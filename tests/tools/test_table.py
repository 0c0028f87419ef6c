"""Tables and sentences as a terminal shows them."""

import io
import re
from collections import Counter
from pathlib import Path

import emulate_results
import plan_scale_measured
import pytest
import trace_files
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.common.table import Page, Table
from hvdkit.measure.bench import results as bench_results

DATA = Path(__file__).parents[1] / "data"
HOSTILE = "a\x1b[31m|[red]b[/red]*\u202e"


def shown(part, width=80):
    console = Console(file=io.StringIO(), width=width)
    part.show(console)
    return console.file.getvalue()


words = st.text("abc0123456789.-", min_size=1, max_size=12)
texts = st.lists(words, min_size=1, max_size=12).map(" ".join)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 14), st.integers(40, 120))
def test_no_word_is_split_or_lost(data, columns, width):
    names = [f"{data.draw(words)}{at}" for at in range(columns)]
    left = [name for name in names if data.draw(st.booleans())]
    cells = st.tuples(*(texts if name in left else words for name in names))
    rows = data.draw(st.lists(cells, min_size=1, max_size=4))
    found = Counter(shown(Table("", names, rows, left), width).split())
    assert found == Counter(" ".join([*names, *(cell for row in rows for cell in row)]).split())


def test_where_a_name_leaves_no_room_no_number_is_split():
    table = Table("", ["tensor", "count", "bytes"], [["x" * 38, 714, "4.72 MB"]], left=["tensor"])
    lines = shown(table, 40).splitlines()
    assert len(lines) == 3 and any("714" in line for line in lines)
    assert any("4.72 MB" in line for line in lines)
    assert "".join(lines).count("x") == 38, "the name is whole"


def test_an_interval_is_never_in_two_lines():
    interval = "1.92 [1.88, 1.95]"
    table = Table("Twelve", ["ranks", *(f"column {at}" for at in range(12))], [[1024, *[interval] * 12]])
    assert shown(table).count(interval) == 12
    assert shown(table, 300).count("\n") == 3


def test_what_is_not_known_is_a_dash():
    assert shown(Table("", ("ranks", "s"), [[4, None]])).split() == ["ranks", "s", "4", "-"]


def test_columns_of_which_nothing_is_known_are_left_out():
    cells = {"n": str, "half": lambda n: n / 2 if n > 1 else None, "gpu": lambda _: None}
    table = Table.of([1, 2], cells)
    assert (table.names, table.rows, table.left) == (["n", "half"], [("1", None), ("2", 1.0)], ["n"])
    assert Table.of([], cells).names == ["n", "half", "gpu"]


def test_nothing_from_a_file_is_obeyed():
    page = Page([Table(HOSTILE, (HOSTILE,), [[HOSTILE]], note=HOSTILE), HOSTILE], [HOSTILE])
    printed = shown(page, 200)
    assert "\x1b" not in printed and "\u202e" not in printed and printed.count("[red]b[/red]*") == 6


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Files of every kind that a command makes a table of, by what they are."""
    place = tmp_path_factory.mktemp("recordings")
    for number, length in enumerate((20, 30)):
        for rank in range(2):
            (place / f"trace{number}").mkdir(exist_ok=True)
            events = [one for at in range(5) for one in traced(100 * at, length + 9 * rank, at)]
            trace_files.write(place / f"trace{number}" / f"trace-{rank}-of-2.json", *events, rank=rank)
        emulated = emulate_results.made({4_000: 1e-4 * length, 40_000_000: 1e-2 * length}, noise=0.1, seed=number)
        json_files.write(place / f"emulated{number}.json", emulated)
        asked = bench_results.ScalingAsked(("train.py",), (), (1, 2, 4), "strong", 4)
        jobs = [
            bench_results.MeasuredJob(ranks, repeat, 1.0, (length + repeat) / ranks)
            for ranks in (1, 2, 4)
            for repeat in range(4)
        ]
        where = bench_results.Environment("1", "3.11", "Linux", {}, 4)
        json_files.write(place / f"bench{number}.json", bench_results.ScalingResults(asked, where, (), (), jobs))
    for ranks in (2, 4):
        json_files.write(place / f"measured{ranks}.json", plan_scale_measured.results(ranks))
    return {"R": place, "T": DATA / "timelines", "M": DATA / "mpi_profiles"}


def traced(at, length, number):
    yield trace_files.step(number + 3, at, 100)
    yield trace_files.data(at, 2)
    yield trace_files.event("aten::convolution_backward_of_a_long_name", at + 2, length)
    yield trace_files.gloo(at + 80, 10)


@pytest.mark.parametrize(
    "command",
    [
        "plan steps --samples 1281167 --batch-size 256 --lr 0.1 --epochs 90 -n 8,64,1024",
        "plan memory --parameters 7B --dtype bfloat16 --mixed --capacity-gb 80 -n 8,64",
        "emulate sizes --sizes 803840,131584,33024,2600 --gap-ms 2.5",
        "emulate show {R}/emulated0.json",
        "plan scale --alpha-us 10 --bandwidth-gbit 25 --ppn 4 --parameters 138M --step-ms 489 --at 16,512",
        "plan scale --fit {R}/measured2.json {R}/measured4.json --parameters 1M --step-ms 10 --at 8,16",
        "bench show {R}/bench0.json",
        "explain {T}/atpesc-2023-cpu-8ranks.json",
        "timeline summary {T}/atpesc-2023-cpu-8ranks.json",
        "diff {T}/atpesc-2023-cpu-8ranks.json {T}/torch-mpi-2ranks-cycles.json",
        "trace summary {R}/trace0",
        "diff {R}/trace0 {R}/trace1",
        "diff {R}/bench0.json {R}/bench1.json",
        "mpi-profile show {M}/mpi_profile.2500161.0",
        "diff {M}/mpi_profile.2500161.0 {M}/mpi_profile.2500161.0",
    ],
    ids=lambda command: " ".join(word for word in command.split()[:2] if word[0] not in "-{"),
)
def test_commands_say_the_same_in_80_and_60_columns(command, recordings, capsys, monkeypatch):
    said = {}
    for width in (300, 80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.run(command.format(**recordings).split()) == (command.startswith("plan memory"))
        said[width] = capsys.readouterr().out
    assert not re.search(r"[0-9] %", said[300]), "share_text writes shares"
    for width in (80, 60):
        whole = {word for word in said[300].split() if len(word) <= 20}  # longer names may be split
        assert whole <= {*said[width].split()}
