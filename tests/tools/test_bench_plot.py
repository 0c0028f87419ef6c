"""``hvdkit bench show --plot``: what is drawn."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_machine import Machine, run_bench, saved, use

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.measure.bench import analysis as shown
from hvdkit.measure.bench import results
from hvdkit.measure.bench.analysis import analyse

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A directory with results.json of 1, 2, 4 and 8 ranks on 4 cores, with recorded steps."""
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("recorded")
    machine = Machine(lambda n: 0.010 * (0.1 + 0.9 / n) if n < 8 else 0.02, noise=0.005)
    machine.marks = True
    with pytest.MonkeyPatch.context() as patch:
        use(directory, patch, machine)
        assert run_bench(ranks="1,2,4,8") == 0
    return directory


@pytest.fixture
def measured(recorded, tmp_path, monkeypatch):
    """A copy of it, in which the test runs."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def drawn(draw):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, analyse(json_files.read(Path("results.json"), results.ScalingResults)).rows)
    return axes


def test_points_lie_where_the_numbers_are_with_the_whole_interval(measured):
    points, _, (bars,) = drawn(shown.efficiency).containers[0].lines
    rows = saved()["summary"]["rows"]
    assert points.get_xdata().tolist() == [1, 2, 4, 8]
    assert points.get_ydata() == pytest.approx([row["efficiency"]["value"] for row in rows])
    for bar, row in zip(bars.get_segments(), rows, strict=True):
        assert bar[:, 1] == pytest.approx([row["efficiency"]["low"], row["efficiency"]["high"]])


def test_the_ideal_speedup_is_the_number_of_ranks(measured):
    (ideal,) = [line for line in drawn(shown.speedup).lines if line.get_label() == "ideal"]
    assert ideal.get_xdata().tolist() == ideal.get_ydata().tolist() == [1, 2, 4, 8]


@pytest.mark.parametrize("draw", [shown.speedup, shown.efficiency])
def test_more_ranks_than_cores_are_marked(measured, draw):
    axes = drawn(draw)
    (crowded,) = [line for line in axes.lines if line.get_label() == "* more ranks than cores"]
    assert crowded.get_xdata().tolist() == [8]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8*"]


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
        (["show", "results.json", "--plot", "results.svg"], 2, "is the input"),
        (["report", "results.json"], 2, "'hvdkit bench report' is 'hvdkit bench show' now"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_sentence_and_leave_the_file(measured, capsys, words, status, said):
    before = Path("results.json").read_bytes()
    Path("results.svg").symlink_to("results.json")
    capsys.readouterr()
    assert cli.run(["bench", *words]) == status
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    assert Path("results.json").read_bytes() == before


def test_results_without_any_job_have_no_plot(measured, capsys):
    content = saved()
    content["jobs"], content["summary"] = [], None
    Path("results.json").write_text(json.dumps(content))
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.svg"]) == 1
    assert "nothing can be drawn" in capsys.readouterr().err
    assert cli.run(["bench", "show", "results.json", "--plot", "scaling.txt"]) == 2
    assert "expected .svg, .png or .pdf" in capsys.readouterr().err


def test_without_matplotlib_the_error_names_what_to_install(measured):
    code = "import sys; sys.modules['matplotlib'] = None; from hvdkit.cli import run; sys.exit(run(sys.argv[1:]))"
    words = ["bench", "show", "results.json", "--plot", "r.svg"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'hvdkit[report]'" in done.stderr and "Traceback" not in done.stderr
    assert not list(Path().glob("r.*"))
