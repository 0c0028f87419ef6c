"""Tables and sentences as a terminal, Markdown and CSV show them."""

import csv
import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hvdkit import cli
from hvdkit.common.intervals import Estimate
from hvdkit.common.table import Page, Table, comma_separated, ends

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
def test_no_word_is_split_or_lost_and_no_line_is_too_wide(data, columns, width):
    names = [f"{data.draw(words)}{at}" for at in range(columns)]
    left = [name for name in names if data.draw(st.booleans())]
    cells = st.tuples(*(texts if name in left else words for name in names))
    rows = data.draw(st.lists(cells, min_size=1, max_size=4))
    lines = shown(Table("", names, rows, left), width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    found = Counter(" ".join(lines).split())
    again = Counter(" ".join([names[0], *(row[0] for row in rows)]).split())  # stands in each block
    expected = Counter(" ".join([*names, *(cell for row in rows for cell in row)]).split())
    assert not expected - found and set(found - expected) <= set(again)


def test_an_interval_is_never_in_two_lines():
    interval = "1.92 [1.88, 1.95]"
    table = Table("Twelve", ["ranks", *(f"column {at}" for at in range(12))], [[1024, *[interval] * 12]])
    assert shown(table).count(interval) == 12
    assert shown(table, 300).count("\n") == 3


def test_columns_that_do_not_fit_follow_under_the_first_one():
    table = Table("T", ("ranks", "a" * 40, "b" * 40), [[8, 1, 2]])
    assert [line.split() for line in shown(table).splitlines()] == [
        ["T"], ["ranks", "a" * 40], ["8", "1"], [], ["ranks", "b" * 40], ["8", "2"]
    ]  # fmt: skip


def test_what_is_not_known_is_a_dash_and_empty_in_csv():
    assert "| 4 | - |" in Table("", ("ranks", "s"), [[4, None]]).markdown()
    estimates = [Estimate(1.5), None, Estimate(2.0, 1.0, 3.0)]
    rows = list(csv.reader(io.StringIO(comma_separated(("s", "low", "high"), map(ends, estimates)))))
    assert rows == [["s", "low", "high"], ["1.5", "", ""], ["", "", ""], ["2.0", "1.0", "3.0"]]


def test_nothing_from_a_file_is_obeyed():
    page = Page([Table(HOSTILE, (HOSTILE,), [[HOSTILE]], note=HOSTILE), HOSTILE], [HOSTILE])
    printed = shown(page, 200)
    assert "\x1b" not in printed and "\u202e" not in printed and printed.count("[red]b[/red]*") == 6
    text = page.markdown()
    assert "\x1b" not in text and text.count("\\|\\[red\\]b\\[/red\\]\\*") == 6


def test_markdown_has_title_alignment_note_and_notes():
    page = Page([Table("T", ("what", "s"), [["x", 1]], left=("what",), note="N.")], ["one", "two\nlines"])
    assert page.markdown().splitlines() == [
        "**T**", "", "| what | s |", "| --- | ---: |", "| x | 1 |", "", "N.", "", "- one", "- two lines"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "plan --samples 1281167 --batch-size 256 --lr 0.1 --epochs 90 -n 8,64,1024 --parameters 25557032",
        "memory --parameters 7B --dtype bfloat16 --mixed --capacity-gb 80 -n 8,64",
        "emulate sizes --sizes 803840,131584,33024,2600 --gap-ms 2.5",
        "predict --alpha-us 10 --bandwidth-gbit 25 --ppn 4 --parameters 138M --step-ms 489 --at 16,512",
        f"timeline summary {DATA / 'timelines' / 'atpesc-2023-cpu-8ranks.json'}",
        f"mpi-profile show {DATA / 'mpi_profiles' / 'made_up.4.4711.1.mpiP'}",
    ],
)
def test_commands_say_the_same_in_80_and_60_columns(command, capsys, monkeypatch):
    said = {}
    for width in (300, 80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        cli.run(command.split())
        said[width] = capsys.readouterr().out
    assert max(map(len, said[300].splitlines())) > 80
    for width in (80, 60):
        assert set(said[300].split()) == set(said[width].split())
        tables = [line.rstrip() for line in said[width].splitlines() if line not in said[300].splitlines()]
        assert max(map(len, tables), default=0) <= width
