"""``hvdkit bench show --plot`` and ``hvdkit bench report``: what is drawn, and that a page is inert and complete."""

import base64
import hashlib
import json
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_machine import Machine, run_bench, saved, use

from hvdkit import cli
from hvdkit.common.drawing import Line, Rect, Text
from hvdkit.measure.bench import figures, plots
from hvdkit.measure.bench.analysis import analyse
from hvdkit.measure.bench.results import read

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "a\u202eb\u2028c"]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """results.json of 1, 2, 4 and 8 ranks on 4 cores, with recorded steps and a timeline."""
    machine = use(tmp_path, monkeypatch, Machine(lambda n: 0.010 * (0.1 + 0.9 / n) if n < 8 else 0.02, noise=0.005))
    machine.marks = True
    assert run_bench("--timeline", ranks="1,2,4,8") == 0
    return machine


def analysis():
    return analyse(read(Path("results.json")))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.style, self.inside = [], [], "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "style":
            self.style += data
        else:
            self.texts.append(data)

    @property
    def tags(self):
        return {tag for tag, _ in self.elements}

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page(name="report.html"):
    assert cli.run(["bench", "report", "results.json", "-o", name]) == 0
    return Page(Path(name).read_text())


# Figures


def test_points_lie_where_the_numbers_are(measured):
    figure = figures.efficiency(analysis())
    points = [mark for mark in figure.marks if isinstance(mark, Rect) and mark.tip]
    rows = saved()["summary"]["rows"]
    assert [point.tip.split(":")[0] for point in points] == ["1 rank", "2 ranks", "4 ranks", "8 ranks"]
    zero, one = (next(m.y for m in figure.marks if isinstance(m, Text) and m.text == text) - 4 for text in ("0", "1"))
    for point, row in zip(points, rows, strict=True):
        middle = point.y + point.height / 2
        assert (zero - middle) / (zero - one) == pytest.approx(row["efficiency"]["value"], abs=1e-4)


def test_error_bars_reach_from_end_to_end_of_the_interval(measured):
    figure = figures.efficiency(analysis())
    bars = [mark for mark in figure.marks if isinstance(mark, Line) and mark.style == "error" and mark.x1 == mark.x2]
    zero, one = (next(m.y for m in figure.marks if isinstance(m, Text) and m.text == text) - 4 for text in ("0", "1"))
    for bar, row in zip(bars, saved()["summary"]["rows"], strict=True):
        for y, end in ((bar.y1, "low"), (bar.y2, "high")):
            assert (zero - y) / (zero - one) == pytest.approx(row["efficiency"][end], abs=1e-4)


def test_the_ideal_speedup_is_the_number_of_ranks(measured):
    figure = figures.speedup(analysis())
    ideal = max((m for m in figure.marks if isinstance(m, Line) and m.style == "ideal"), key=lambda line: line.x2)
    ticks = {mark.text: mark.y - 4 for mark in figure.marks if isinstance(mark, Text) and mark.style == "end"}
    assert ideal.y1 == pytest.approx(ticks["1"]) and ideal.y2 == pytest.approx(ticks["8"])


def test_more_ranks_than_cores_are_marked(measured):
    for figure in (figures.speedup(analysis()), figures.efficiency(analysis())):
        styles = [mark.style for mark in figure.marks if isinstance(mark, Rect) and mark.tip]
        assert styles == ["point", "point", "point", "crowded"]
        texts = [mark.text for mark in figure.marks if isinstance(mark, Text)]
        assert "8*" in texts and "* more ranks than cores" in texts


def test_the_parts_of_a_bar_are_as_long_as_the_step(measured):
    figure = figures.parts(analysis())
    rows = saved()["summary"]["rows"]
    bars = {}
    for mark in figure.marks:
        if isinstance(mark, Rect):
            bars.setdefault(mark.y, []).append(mark.width)
    lengths = [sum(widths) for _, widths in sorted(bars.items())]
    for length, row in zip(lengths, rows, strict=True):
        assert length / max(lengths) == pytest.approx(row["step_s"] / max(one["step_s"] for one in rows), rel=1e-3)


# Plots


def test_the_svg_is_a_document_of_its_own(measured):
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.svg"]) == 0
    root = ElementTree.fromstring(Path("scaling.svg").read_text())  # noqa: S314
    assert root.tag == f"{SVG}svg"
    texts = {"".join(element.itertext()) for element in root.iter(f"{SVG}text")}
    assert {"ideal", "Efficiency", "Speed-up compared with 1 rank", "8*"} <= texts
    assert not any("href" in name for element in root.iter() for name in element.attrib)


def test_the_png_has_the_same_size_twice(measured):
    pytest.importorskip("matplotlib")
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.png"]) == 0
    content = Path("scaling.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (2 * figures.WIDTH, 2 * 2 * figures.HEIGHT)
    assert len(content) > 10_000, "an empty surface compresses to less"


def test_every_style_of_the_plots_can_be_painted(measured):
    for figure in (figures.speedup(analysis()), figures.efficiency(analysis())):
        for mark in figure.marks:
            assert not isinstance(mark, Line) or mark.style in plots._LINES
            assert not isinstance(mark, Rect) or mark.style in plots._BOXES


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["show", "results.json", "--plot", "scaling.pdf"], 2, "expected .svg or .png"),
        (["show", "results.json", "--plot", "no/such/scaling.svg"], 1, "cannot write"),
        (["report", "results.json"], 2, "-o"),
        (["report", "results.json", "-o", "results.json"], 2, "is the input"),
        (["report", "results.json", "-o", "."], 2, "is a directory"),
        (["report", "missing.json", "-o", "r.html"], 2, "does not exist"),
        (["report", "train.py", "-o", "r.html"], 1, "is not a file of 'hvdkit bench scaling'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_sentence_and_leave_the_file(measured, capsys, words, status, said):
    before = Path("results.json").read_bytes()
    capsys.readouterr()
    assert cli.run(["bench", *words]) == status
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    assert Path("results.json").read_bytes() == before
    assert not Path("r.html").exists()


def test_results_without_any_job_have_a_page_and_no_plot(measured, capsys):
    content = saved()
    content["jobs"], content["recordings"], content["summary"] = [], [], None
    Path("results.json").write_text(json.dumps(content))
    assert "No job has run yet" in page().text
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.svg"]) == 1
    assert "nothing can be drawn" in capsys.readouterr().err


# The page


def test_the_page_holds_what_was_found(measured):
    found = page()
    rows = saved()["summary"]["rows"]
    for words in ("Speed-up and efficiency", "Where a step goes", "What Horovod did meanwhile", "Amdahl", "train.py"):
        assert words in found.text
    assert f"{rows[1]['speedup']['value']:.3g} [" in found.text
    assert "More ranks than the 4 usable cores (*): 8" in found.text
    assert sum(tag == "svg" for tag, _ in found.elements) == 3


def test_nothing_on_the_page_loads_or_runs(measured):
    found = page()
    assert not found.tags & {"script", "link", "img", "iframe", "object", "a"}
    policy = next(e["content"] for _, e in found.elements if e.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not any(name.startswith("on") or name in ("style", "src", "href") for _, e in found.elements for name in e)
    assert "url(" not in found.style and "@import" not in found.style


def test_hostile_words_are_text(measured):
    content = saved()
    content["asked"]["command"] = HOSTILE
    content["environment"]["packages"] = {HOSTILE[0]: HOSTILE[1]}
    content["notes"] = HOSTILE[:3]
    content["jobs"][0]["failure"] = HOSTILE[1]
    content["launches"][0]["launcher"] = HOSTILE[0]
    content["launches"][0]["settings"] = [{"words": HOSTILE, "variables": {"A": HOSTILE[1]}, "why": HOSTILE[0]}]
    Path("results.json").write_text(json.dumps(content))
    found = page()
    assert not found.tags & {"script", "img"}
    assert HOSTILE[0] in found.text and "{{ 7 * 7 }}" in found.text and "49" not in found.texts
    assert "\u202e" not in found.text


def test_a_failed_job_is_listed_as_such(measured):
    content = saved()
    content["jobs"][2]["failure"] = "exited with status 3; its last lines:\nValueError: broken"
    Path("results.json").write_text(json.dumps(content))
    text = page().text
    assert "failed: exited with status 3" in text and "1 failed" in text


@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        ("jinja2", ["report", "results.json", "-o", "r.html"], "pip install 'hvdkit[report]'"),
        ("jinja2", ["show", "results.json", "--plot", "r.svg"], "pip install 'hvdkit[report]'"),
        ("matplotlib", ["show", "results.json", "--plot", "r.png"], "pip install 'hvdkit[report]'"),
    ],
)
def test_without_a_package_the_error_names_what_to_install(measured, missing, words, said):
    code = f"import sys; sys.modules[{missing!r}] = None; from hvdkit.cli import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "bench", *words], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(Path().glob("r.*"))
