"""``hvdkit predict`` as it is typed, and the published figures that docs/predict.md compares with."""

import csv
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
from emulate_results import from_sizes
from predict_measured import results

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.measure.emulate import results as files
from hvdkit.measure.predict.prediction import OPTIMISM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured")
    for n in (2, 3):
        files.write(path / f"net{n}.json", results(n, trials=10))
        files.write(path / f"host{n}.json", results(n, hosts=1, trials=10))
    json_files.write(path / "plan.json", from_sizes([4_000_000] * 25))
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")


def predicted(*arguments):
    return cli.run(["predict", *arguments])


def answer(capsys, *arguments):
    assert predicted(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


NET = ("--fit", "net2.json", "net3.json")
HOST = ("--fit", "host2.json", "host3.json")
WORK = ("--plan", "plan.json", "--step-ms", "300")


def test_a_table_says_model_rows_and_remarks(capsys):
    assert predicted(*NET, *WORK, "--at", "4,512") == 0
    out = capsys.readouterr().out
    assert "Between hosts: ring, overhead" in out and "alpha" in out and "ns/byte" in out
    assert "efficiency" in out and re.search(r"^  512  ", out, re.MULTILINE)
    assert "25 of 100 MB in all" in out and "same share of backward" in out


def test_json_has_estimates_in_seconds(capsys):
    found = answer(capsys, *NET, *WORK, "--at", "1,4,512")
    assert [row["ranks"] for row in found["rows"]] == [1, 4, 512]
    assert (
        found["rows"][0]["efficiency"]["value"] == 1
        and found["rows"][0]["step_s"]["value"] == 0.3 == found["assumed"]["step_s"]
    )
    last = found["rows"][-1]
    assert last["efficiency"]["low"] < last["efficiency"]["value"] < last["efficiency"]["high"] < 1
    assert last["hosts"] == 512 and last["extrapolated"]
    assert set(found["model"]["levels"]["network"]["parameters"]) == {"overhead_s", "alpha_s", "beta_s_per_byte"}
    assert found["model"]["levels"]["host"] is None and found["confidence"] == 0.95


def test_the_same_measurements_give_the_same_numbers(capsys):
    assert answer(capsys, *NET, *WORK, "--at", "8") == answer(capsys, *NET, *WORK, "--at", "8")


def test_csv_and_markdown(capsys):
    assert predicted(*NET, *WORK, "--at", "4,512", "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["ranks"] for row in rows] == ["4", "512"]
    assert float(rows[1]["efficiency_low"]) < float(rows[1]["efficiency"]) < float(rows[0]["efficiency"])
    assert predicted(*NET, *WORK, "--at", "4", "--markdown") == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| ranks | hosts |"))
    assert lines[0].startswith("Between hosts: ") and lines[first + 2].startswith("| 4 | 4 |")


def test_without_a_step_only_communication(capsys):
    found = answer(capsys, *NET, "--at", "4")
    assert found["rows"][0]["communication_s"]["value"] > 0 and found["rows"][0]["efficiency"] is None
    assert any("--step-ms" in note for note in found["notes"])


def test_by_default_it_goes_as_far_as_the_measurements_reach(capsys):
    assert [row["ranks"] for row in answer(capsys, *NET)["rows"]] == [2**power for power in range(11)]
    inside = answer(capsys, *HOST)
    assert [row["ranks"] for row in inside["rows"]] == [1, 2]
    assert any("Beyond 2 ranks a network is needed" in note for note in inside["notes"])


def test_a_host_is_not_a_network(capsys):
    assert predicted(*HOST, *WORK, "--at", "512") == 2
    said = capsys.readouterr().err
    assert "says nothing about a network" in said and "--alpha-us and --bandwidth-gbit" in said and "--ppn" in said
    assert "Traceback" not in said
    with_network = ("--alpha-us", "5", "--bandwidth-gbit", "25")
    found = answer(capsys, *HOST, *WORK, "--at", "512", *with_network)
    assert any("as given, not measured" in note for note in found["notes"])
    assert found == answer(capsys, *HOST, *WORK, "--at", "512", "--alpha-us", "5", "--beta-gbit", "25")
    assert predicted(*HOST, "--at", "8", "--alpha-us", "5") == 2
    assert "--bandwidth-gbit is missing" in capsys.readouterr().err
    assert answer(capsys, *HOST, "--at", "4", "--ppn", "4")["rows"][0]["hosts"] == 1


def test_a_slow_host_stays_slow_behind_a_fast_network(capsys):
    """Ranks of a host that wait for cores do not become fast because there is a second host."""
    for n in (2, 3, 4):
        files.write(Path(f"slow{n}.json"), results(n, hosts=1, trials=10, alpha=5e-3, beta=80e-9))
    found = answer(capsys, "--fit", *(f"slow{n}.json" for n in (2, 3, 4)), *WORK, "--at", "2,3,4,5,8,256",
                   "--alpha-us", "5", "--bandwidth-gbit", "100")  # fmt: skip
    values = [row["efficiency"]["value"] for row in found["rows"]]
    assert values == sorted(values, reverse=True) and values[2] < 0.1
    times = [row["communication_s"]["value"] for row in found["rows"]]
    assert times == sorted(times)


def test_where_the_model_does_not_hold_there_is_no_number(capsys):
    """The hosts that were measured have 4 cores and held 3 ranks."""
    network = ("--alpha-us", "5", "--bandwidth-gbit", "25", "--ppn", "8")
    found = answer(capsys, *HOST, *WORK, *network, "--at", "4,8,64")
    known = [row["communication_s"] is not None for row in found["rows"]]
    assert known == [True, False, False] and found["rows"][1]["efficiency"] is None
    assert any("8 ranks of a host wait for its 4 cores" in note for note in found["notes"])
    assert predicted(*HOST, *WORK, *network, "--at", "4,8", "--plot", "some.svg") == 0
    assert re.search(r"^    8      1 +- +- +- +- +-$", capsys.readouterr().out, re.MULTILINE)
    assert predicted(*HOST, *WORK, *network, "--at", "8,64") == 2
    assert "wait for its 4 cores" in capsys.readouterr().err


def test_what_no_formula_describes_is_not_extended(capsys):
    def scattered(rng, times):
        return times * 10 ** rng.uniform(-1.2, 1.2)

    for n in (2, 3):
        files.write(Path(f"wild{n}.json"), results(n, hosts=1, trials=10, spoil=scattered))
    assert predicted("--fit", "wild2.json", "wild3.json", *WORK, "--at", "3") == 2
    assert "off what the best formula says" in capsys.readouterr().err


def test_more_ranks_than_cores_are_told(capsys):
    files.write(Path("crowd6.json"), results(6, hosts=1, trials=10))
    found = answer(capsys, "--fit", "host2.json", "crowd6.json", *WORK, "--at", "2")
    assert any("6 ranks on 4 cores" in note for note in found["notes"])


def test_parameters_stand_for_a_plan(capsys):
    link = ("--alpha-us", "10", "--bandwidth-gbit", "25", "--step-ms", "300", "--at", "64")
    short = answer(capsys, "--parameters", "25M", *link)
    assert any("100 of 100 MB in all." in note for note in short["notes"])
    json_files.write(Path("own.json"), from_sizes([1_000_000] * 100))
    assert answer(capsys, "--plan", "own.json", *link)["rows"] == short["rows"]
    assert answer(capsys, "--parameters", "7", *link)["notes"][0].startswith("Gradients: 7 of 28 B")
    assert predicted("--parameters", "25M", "--plan", "own.json", *link) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_network_alone_is_enough(capsys):
    found = answer(
        capsys, "--alpha-us", "10", "--bandwidth-gbit", "8", "--ppn", "4", *WORK, "--at", "512", "--no-overlap"
    )
    bytes_s = 2 * 511 / 512 * 100_000_000 / 1e9
    assert found["rows"][0]["communication_s"]["value"] == pytest.approx(bytes_s + 1022 * 10e-6)
    assert found["rows"][0]["hosts"] == 128


@pytest.mark.parametrize(
    ("flags", "better"),
    [(["--fp16"], True), (["--faster-links", "4"], True), (["--accumulate", "4"], True), (["--no-overlap"], False),
     (["--alpha-us", "0"], True), (["--bandwidth-gbit", "0.1"], False), (["--fusion-threshold-mb", "0"], False)],
    ids=str,
)  # fmt: skip
def test_what_ifs_move_the_efficiency_the_right_way(capsys, flags, better):
    base, changed = (answer(capsys, *NET, *WORK, "--at", "64", *more)["rows"][0] for more in ([], flags))
    assert (changed["efficiency"]["value"] > base["efficiency"]["value"]) == better


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to predict from"),
        (("--fit", "net2.json", "--at", "0"), "whole numbers above 0"),
        (("--fit", "net2.json", "--at", "a"), "whole numbers above 0"),
        (("--fit", "nowhere.json"), "nowhere.json"),
        (("--fit", "net2.json", "--step-ms", "-1"), "above 0"),
        (("--fit", "net2.json", "--step-ms", "nan"), "above 0"),
        (("--fit", "net2.json", "--backward-share", "2"), "at most 1"),
        (("--fit", "host2.json", "--faster-links", "2"), "about the network"),
        (("--alpha-us", "1", "--bandwidth-gbit", "1"), "--plan"),
        (("--alpha-us", "1", "--bandwidth-gbit", "1", "--parameters", "7X"), "7B"),
        (("--fit", "net2.json", "--plot", "a.png"), "--step-ms"),
        (("--fit", "net2.json", "--step-ms", "9", "--plot", "a.gif"), ".svg"),
        (("--fit", "net2.json", "--at", "10000001"), "1000000"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_a_sentence(capsys, arguments, said):
    assert predicted(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize("option", ["--fit", "--plan"])
def test_other_files_are_refused(capsys, option):
    Path("other.json").write_text("{}")
    assert predicted("--fit", "net2.json", "--plan", "plan.json", option, "other.json") == 1
    assert "other.json" in capsys.readouterr().err


def test_a_plot_is_drawn(capsys):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.SVG", "c.pdf"):
        assert predicted(*NET, *WORK, "--at", "2,8,64", "--plot", name) == 0
    assert "<svg" in Path("a.svg").read_text()
    assert Path("a.svg").read_bytes() == Path("b.SVG").read_bytes()
    assert Path("c.pdf").read_bytes().startswith(b"%PDF")


def test_a_plot_that_cannot_be_is_refused_before_the_files_are_read(capsys):
    Path("other.json").write_text("{}")
    assert predicted("--fit", "other.json", *WORK, "--plot", "a.gif") == 2
    assert "a.gif" in capsys.readouterr().err


def test_no_path_or_host_is_in_the_output(capsys, folder):
    assert predicted(*NET, *WORK, "--json") == 0
    assert str(folder) not in capsys.readouterr().out


# The published figures


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("benchmark_predict", ROOT / "benchmarks" / "predict.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {(one.model, one.ranks): one for one in module.published()}


def test_the_published_efficiency_lies_between_full_and_no_overlap(published):
    assert len(published) == 9
    for one in published.values():
        if one.ranks == 512:
            assert one.apart < one.published < one.overlapped


def test_the_intervals_hold_what_was_published(published):
    """And are no wider than that asks for."""
    errors = [one.overlapped / one.published for one in published.values()]
    assert max(errors) <= OPTIMISM <= 1.01 * max(errors) and min(errors) > 1
    points = [100 * (one.overlapped - one.published) for one in published.values()]
    assert (round(min(points)), round(max(points))) == (5, 19)


def test_beyond_what_was_measured_they_hold_the_published_error(capsys):
    found = answer(capsys, *NET, *WORK, "--at", "1,3,4")
    one, inside, beyond = found["rows"]
    assert one["efficiency"] == {"value": 1, "low": None, "high": None}
    assert inside["efficiency"]["low"] > 0.9 * inside["efficiency"]["value"]
    assert beyond["efficiency"]["low"] <= beyond["efficiency"]["value"] / OPTIMISM
    assert beyond["step_s"]["high"] >= beyond["step_s"]["value"] * OPTIMISM
    assert beyond["step_s"]["high"] == pytest.approx(0.3 / beyond["efficiency"]["low"])
    assert any("Not measured: 4 ranks." in note for note in found["notes"])
    assert predicted(*NET, *WORK, "--at", "3,4") == 0
    table = capsys.readouterr().out.partition("Prediction with 95% intervals")[2].splitlines()
    assert all(line.count("[") == 5 for line in table[2:4])
    given = ("--alpha-us", "10", "--bandwidth-gbit", "25", "--ppn", "4", *WORK)
    assert predicted(*given, "--at", "64") == 0
    said = capsys.readouterr().out
    assert "95%" not in said and "Prediction with intervals from published errors alone" in said
    assert said.count("[") == 2


def test_vgg_16_is_bound_by_its_bytes(published):
    """Each server sends and receives 2 * 511/512 * 553 MB over 25 Gbit/s: 353 ms beside 489 ms of computation."""
    one = published["VGG-16", 512]
    assert one.communication_s >= 2 * 511 / 512 * 138_357_544 * 4 * 8 / 25e9
    assert 0.54 <= one.apart < one.overlapped <= 1.0


def test_the_page_says_what_is_computed(published):
    page = (ROOT / "docs" / "predict.md").read_text()
    for one in published.values():
        row = f"| {one.model} | {one.ranks} | {100 * one.published:.0f} % | {100 * one.overlapped:.1f} % | " \
              f"{100 * (one.overlapped - one.published):+.1f} | {100 * one.apart:.1f} %"  # fmt: skip
        assert row in page
