"""What an emulation's results are turned into: a table and a plot."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from emulate_results import from_sizes, made, results, sample
from msgspec import structs
from rich.console import Console

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.measure.emulate import analysis as shown
from hvdkit.measure.emulate.analysis import analyse

TUTORIAL = {2600: 0.02, 33024: 0.021, 131584: 0.023, 803840: 0.03}
HOSTILE = "<script>alert(1)</script>[red]|\x1b[31m\u202e"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def saved():
    json_files.write(Path("results.json"), made(TUTORIAL, trials=12, noise=0.1))


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
    assert "allreduce, engine ring, 4 ranks, 12 trials" in out
    (cells,) = [re.split(r"  +", line.strip()) for line in out.splitlines() if line.strip().startswith("803840")]
    assert cells[1] == "12" and re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", cells[2])
    assert cells[3] != "-" and cells[4:6] == ["-", "-"] and len(cells) == 11
    assert "a step is the sum of its delays" in out and re.search(r"\n +step +12 +9\d\.", out)
    assert "Rank 0 takes longest most often (100%), rank 1 comes last most often (100%)." in out
    assert "p99 needs 100, p99.9 needs 1000; some size has 12" in out


def test_a_compressed_run_has_one_column_beside_none_and_a_ratio(capsys):
    whole = made(TUTORIAL, trials=12, noise=0.1)
    half = [structs.replace(one, slowest_s=one.slowest_s / 2) for one in whole.samples]
    asked = structs.replace(whole.asked, compression="int8")
    json_files.write(Path("results.json"), structs.replace(whole, asked=asked, compressed=half))
    out = show(capsys)
    assert "p50 int8" in out and "With int8 a step takes 0.5 times as long as with none." in out
    (cells,) = [re.split(r"  +", line.strip()) for line in out.splitlines() if line.strip().startswith("803840")]
    none, int8 = (float(cell.split()[0]) for cell in cells[2:4])
    assert len(cells) == 12 and int8 == pytest.approx(none / 2, rel=1e-3)
    value = json.loads(show(capsys, "--json"))
    assert value["step"]["compressed_s"]["value"] == pytest.approx(value["step"]["p50_s"]["value"] / 2)
    assert value["overall"]["compressed_s"]["low"] is not None


def test_json_is_the_analysis(capsys, saved):
    value = json.loads(show(capsys, "--json"))
    assert [row["size"] for row in value["rows"]] == list(TUTORIAL) and value["overall"]["size"] is None
    assert 0 < value["cdf_band"] < 1


def test_names_from_a_file_cannot_reach_the_terminal(capsys):
    console = Console(force_terminal=True, color_system="truecolor", width=250, file=io.StringIO())
    shown.page(hostile(), analyse(hostile())).show(console)
    shown.plan_page(hostile().plan).show(console)
    printed = console.file.getvalue()
    assert "\x1b[31m" not in printed and "\u202e" not in printed
    assert "[red]" in printed and "in trial 0: 9000 ms, longest on rank 0." in printed


def test_another_file_is_refused(capsys):
    Path("results.json").write_text("{}")
    assert "results.json" in show(capsys, status=1)


# Plots


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def curves(path):
    """Texts of an SVG file."""
    return [text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip()]  # noqa: S314


def test_the_plot_shows_each_size_and_all_with_their_band(capsys, saved, matplotlib):
    show(capsys, "--plot", "cdf.svg")
    words = curves("cdf.svg")
    assert "delay of the slowest rank (ms)" in words and "95% band (DKW)" in words and "all collectives" in words
    assert "804 kB" in words and "2.60 kB" in words
    show(capsys, "--plot", "again.svg")
    assert Path("cdf.svg").read_bytes() == Path("again.svg").read_bytes()
    show(capsys, "--plot", "cdf.png")
    assert Path("cdf.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_one_sample_can_be_drawn(matplotlib):
    one = results(from_sizes([40]), [sample(0, 0, 40, [0.0, 0.0])])
    shown.draw(Path("a.png"), one, analyse(one))
    assert Path("a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "cdf.gif"], "expected .svg, .png or .pdf"),
        (["--plot", "no/where.svg"], "does not exist or cannot be written to"),
        (["--plot", "results.svg"], "is named for two things"),
    ],
    ids=str,
)
def test_a_plot_that_cannot_be_is_refused_before_anything_is_written(capsys, saved, words, said):
    Path("results.svg").symlink_to("results.json")
    before = Path("results.json").read_bytes()
    assert said in show(capsys, *words, status=2)
    assert Path("results.json").read_bytes() == before
