"""``hvdkit bench show --plot`` and ``hvdkit bench report``: what is drawn, and that a page is inert and complete."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_machine import Machine, run_bench, saved, use

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.measure.bench import plots
from hvdkit.measure.bench.analysis import analyse
from hvdkit.measure.bench.results import ScalingResults

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "a\u202eb\u2028c"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A directory with results.json of 1, 2, 4 and 8 ranks on 4 cores, with recorded steps and a timeline."""
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("recorded")
    machine = Machine(lambda n: 0.010 * (0.1 + 0.9 / n) if n < 8 else 0.02, noise=0.005)
    machine.marks = True
    with pytest.MonkeyPatch.context() as patch:
        use(directory, patch, machine)
        assert run_bench("--timeline", ranks="1,2,4,8") == 0
    return directory


@pytest.fixture
def measured(recorded, tmp_path, monkeypatch):
    """A copy of it, in which the test runs."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def analysis():
    return analyse(json_files.read(Path("results.json"), ScalingResults))


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


def drawn(draw):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, analysis())
    return axes


def test_points_lie_where_the_numbers_are_with_the_whole_interval(measured):
    points, _, (bars,) = drawn(plots.efficiency).containers[0].lines
    rows = saved()["summary"]["rows"]
    assert points.get_xdata().tolist() == [1, 2, 4, 8]
    assert points.get_ydata() == pytest.approx([row["efficiency"]["value"] for row in rows])
    for bar, row in zip(bars.get_segments(), rows, strict=True):
        assert bar[:, 1] == pytest.approx([row["efficiency"]["low"], row["efficiency"]["high"]])


def test_the_ideal_speedup_is_the_number_of_ranks(measured):
    (ideal,) = [line for line in drawn(plots.speedup).lines if line.get_label() == "ideal"]
    assert ideal.get_xdata().tolist() == ideal.get_ydata().tolist() == [1, 2, 4, 8]


@pytest.mark.parametrize("draw", [plots.speedup, plots.efficiency])
def test_more_ranks_than_cores_are_marked(measured, draw):
    axes = drawn(draw)
    (crowded,) = [line for line in axes.lines if line.get_label() == "* more ranks than cores"]
    assert crowded.get_xdata().tolist() == [8]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8*"]


def test_the_parts_of_a_bar_are_as_long_as_the_step(measured):
    bars = {}
    for part in drawn(plots.parts).patches:
        bars.setdefault(part.get_y(), []).append(part.get_width())
    lengths = [sum(widths) for _, widths in sorted(bars.items())]
    assert lengths == pytest.approx([1000 * row["step_s"] for row in saved()["summary"]["rows"]], rel=1e-3)


# Plots


def test_the_svg_is_a_document_of_its_own(measured):
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.svg"]) == 0
    root = ElementTree.fromstring(Path("scaling.svg").read_text())  # noqa: S314
    assert root.tag == f"{SVG}svg"
    texts = {"".join(element.itertext()) for element in root.iter(f"{SVG}text")}
    assert {"ideal", "Efficiency", "Speed-up compared with 1 rank", "8*"} <= texts
    linked = [text for element in root.iter() for name, text in element.attrib.items() if "href" in name]
    assert all(text.startswith("#") for text in linked)


@pytest.mark.parametrize(("ending", "begin"), [(".png", b"\x89PNG\r\n\x1a\n"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_same_results_give_the_same_file(measured, ending, begin):
    contents = []
    for name in ("a", "b"):
        assert cli.run(["bench", "show", "results.json", "--plot", f"{name}{ending}"]) == 0
        contents.append(Path(f"{name}{ending}").read_bytes())
    assert contents[0] == contents[1] and contents[0].startswith(begin)
    assert len(contents[0]) > 10_000, "an empty surface compresses to less"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["show", "results.json", "--plot", "scaling.txt"], 2, "expected .svg, .png or .pdf"),
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
    assert sum(tag == "img" for tag, _ in found.elements) == 3


def test_nothing_on_the_page_loads_or_runs(measured):
    found = page()
    assert not found.tags & {"script", "link", "iframe", "object", "a"}
    assert all(e["src"].startswith("data:image/svg+xml;base64,") for tag, e in found.elements if tag == "img")
    policy = next(e["content"] for _, e in found.elements if e.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    rest = "base-uri 'none'; form-action 'none'"
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; {rest}"
    assert not any(name.startswith("on") or name in ("style", "href") for _, e in found.elements for name in e)
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
    assert "script" not in found.tags
    assert all(e["src"].startswith("data:") for tag, e in found.elements if tag == "img")
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
        ("matplotlib", ["report", "results.json", "-o", "r.html"], "pip install 'hvdkit[report]'"),
        ("matplotlib", ["show", "results.json", "--plot", "r.svg"], "pip install 'hvdkit[report]'"),
    ],
)
def test_without_a_package_the_error_names_what_to_install(measured, missing, words, said):
    code = f"import sys; sys.modules[{missing!r}] = None; from hvdkit.cli import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "bench", *words], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(Path().glob("r.*"))
