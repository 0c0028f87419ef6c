"""What an emulation's results are turned into: tables, Markdown, CSV, plots, an HTML report."""

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from emulate_results import from_sizes, made, results, sample
from rich.console import Console

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import outputs, tables
from hvdkit.measure.emulate import results as files
from hvdkit.measure.emulate.analysis import analyse
from hvdkit.measure.emulate.results import EmulateResults

TUTORIAL = {2600: 0.02, 33024: 0.021, 131584: 0.023, 803840: 0.03}
HOSTILE = "<script>alert(1)</script>[red]|\x1b[31m\u202e"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def saved():
    files.write(Path("results.json"), made(TUTORIAL, trials=12, noise=0.1), None)


def hostile():
    steps = from_sizes([40], names=[HOSTILE], source=HOSTILE)
    samples = [sample(t, 0, 40, [0.1, 0.1 + 0.001 * t] if t else [9.0, 0.1]) for t in range(20)]
    return results(steps, samples, ranks=2, notes=[HOSTILE])


def show(capsys, *words, status=0):
    assert cli.run(["emulate", "show", "results.json", *words]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


# Text


def test_a_reader_sees_sizes_percentiles_and_notes(capsys, saved):
    out = show(capsys)
    assert "allreduce by ring, engine ring, 4 ranks, 12 trials" in out
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    cells, parts = [row for row in rows if row[0] == "803840"]
    assert cells[1] == "12" and re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", cells[2])
    assert cells[3] != "-" and cells[4:6] == ["-", "-"]
    assert len(parts) == 5 and "algbw" in out
    assert (
        "A whole step" in out
        and "Each rank's own time" in out
        and "p99 needs 100, p99.9 needs 1000; some size has 12" in out
    )


def test_markdown_has_the_same_tables(capsys, saved):
    out = show(capsys, "--markdown")
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert any(row.startswith("| 803840 |") for row in rows) and "| ---: |" in out
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (8, 7, 6) for row in rows)


def test_csv_has_a_line_for_each_size_and_one_for_all(capsys, saved):
    rows = list(csv.DictReader(io.StringIO(show(capsys, "--csv"))))
    assert [row["size"] for row in rows] == ["2600", "33024", "131584", "803840", ""]
    assert rows[0]["samples"] == "12" and rows[0]["slowest_p99"] == "" and float(rows[0]["slowest_p90"]) > 0.018
    assert float(rows[3]["busbw"]) == pytest.approx(1.5 * float(rows[3]["algbw"]))


def test_every_sample_can_be_had_as_csv(capsys, saved):
    rows = list(csv.DictReader(io.StringIO(show(capsys, "--samples"))))
    assert len(rows) == 48 and rows[5]["trial"] == "1" and rows[5]["name"] == "size33024"
    assert float(rows[5]["slowest_s"]) == max(float(rows[5][f"rank{rank}_s"]) for rank in range(4))


def test_json_is_the_analysis(capsys, saved):
    value = json.loads(show(capsys, "--json"))
    assert [row["size"] for row in value["rows"]] == list(TUTORIAL) and value["overall"]["size"] is None
    assert value["outlier_rule"] and 0 < value["cdf_band"] < 1


def test_names_from_a_file_cannot_reach_the_terminal(capsys):
    console = Console(force_terminal=True, color_system="truecolor", width=250, file=io.StringIO())
    tables.page(analyse(hostile())).show(console)
    tables.plan_page(hostile().plan).show(console)
    printed = console.file.getvalue()
    assert "\x1b[31m" not in printed and "\u202e" not in printed
    assert "[red]" in printed and "Outliers: 1" in printed


def test_markdown_shows_names_as_they_are():
    shown = tables.page(analyse(hostile())).markdown()
    assert "\\<script\\>" in shown and "\n| 0 |" in shown


def test_another_file_is_refused(capsys):
    Path("results.json").write_text("{}")
    assert "results.json" in show(capsys, status=1)


# Plots


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def written(found, **asked):
    outputs.write_all(found, analyse(found), asked)


def curves(path):
    """Texts of an SVG file."""
    return [text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip()]  # noqa: S314


def test_plots_are_drawn_as_svg_and_png(capsys, saved, matplotlib):
    show(capsys, "--plot", "cdf.svg", "--size-plot", "sizes.png")
    words = curves("cdf.svg")
    assert "delay of the slowest rank (ms)" in words and "95% band (DKW)" in words and "all collectives" in words
    assert "804 kB" in words and "2.60 kB" in words
    assert Path("sizes.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_plot_by_size_has_logarithmic_axes(capsys, saved, matplotlib):
    show(capsys, "--size-plot", "sizes.svg")
    words = curves("sizes.svg")
    assert "size of the collective" in words and "delay of the slowest rank (ms)" in words
    assert {"10 kB", "100 kB", "1 MB"} <= set(words)


def test_the_same_results_give_the_same_plot(saved, matplotlib):
    found = json_files.read(Path("results.json"), EmulateResults)
    written(found, plot=Path("a.svg"))
    written(found, plot=Path("b.svg"))
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_one_sample_can_be_drawn(matplotlib):
    one = results(from_sizes([40]), [sample(0, 0, 40, [0.0, 0.0])])
    written(one, plot=Path("a.png"), size_plot=Path("b.svg"))
    assert Path("a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "cdf.gif"], "expected .svg, .png or .pdf"),
        (["--plot", "cdf"], "expected .svg, .png or .pdf"),
        (["--size-plot", "no/where.svg"], "does not exist or cannot be written to"),
        (["--report", "."], "is a directory"),
        (["--size-plot", "./good.svg"], "is named for two things"),
        (["--report", "results.json"], "is named for two things"),
    ],
    ids=str,
)
def test_outputs_that_cannot_be_are_refused_before_anything_is_written(capsys, saved, words, said):
    err = show(capsys, "--plot", "good.svg", *words, status=2)
    assert said in err and not Path("good.svg").exists()


@pytest.mark.parametrize(
    ("missing", "output"), [("matplotlib", "plot"), ("jinja2", "report"), ("matplotlib", "report")]
)
def test_what_is_missing_is_named_with_the_command_that_helps(saved, missing, output):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nfrom hvdkit.cli import run\n"
        f"sys.exit(run(['emulate', 'show', 'results.json', '--{output}', 'out.svg']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'hvdkit[report]'" in done.stderr and "Traceback" not in done.stderr


# The report


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.policy, self.images, self.words, self.style = [], "", [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag == "img":
            self.images.append(attributes)
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert "href" not in attributes

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "style":
            self.style += data
            self.tags.append("")
        else:
            self.words.append(data)


@pytest.fixture
def page(matplotlib):
    pytest.importorskip("jinja2")

    def render(found):
        written(found, report=Path("report.html"))
        return Page(Path("report.html").read_text())

    return render


def test_the_report_needs_nothing_else(page):
    found = page(made(TUTORIAL, trials=12, noise=0.1))
    assert "script" not in found.tags and "link" not in found.tags
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in found.policy and "default-src 'none'" in found.policy
    assert [image["src"].partition(",")[0] for image in found.images] == ["data:image/svg+xml;base64"] * 2
    assert all(image["alt"] for image in found.images)


def test_the_report_holds_the_numbers(page):
    words = "\n".join(page(made(TUTORIAL, trials=12, noise=0.1)).words)
    for said in (
        "803840",
        "Distribution of the delays",
        "Delay by size",
        "p99 needs 100, p99.9 needs 1000",
        "engine",
        "12",
    ):
        assert said in words


def test_what_came_from_a_file_is_text_on_the_page(page):
    found = page(hostile())
    text = Path("report.html").read_text()
    assert "script" not in found.tags and "\x1b" not in text and "\u202e" not in text
    assert "<script>alert(1)</script>" in "".join(found.words)


def test_an_old_report_stays_when_the_new_one_fails(monkeypatch, matplotlib):
    pytest.importorskip("jinja2")
    from hvdkit.measure.emulate import report

    def fail(*_):
        raise InvalidArgumentError("no")

    Path("report.html").write_text("old")
    monkeypatch.setattr(report, "render_report", fail)
    with pytest.raises(InvalidArgumentError):
        written(made(TUTORIAL), report=Path("report.html"))
    assert Path("report.html").read_text() == "old" and sorted(Path().iterdir()) == [Path("report.html")]


def test_nothing_is_written_where_nothing_is_asked_for():
    written(made(TUTORIAL))
    assert list(Path().iterdir()) == []
