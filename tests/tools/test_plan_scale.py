"""``hvdkit plan scale`` as it is typed, and the published figures that docs/plan.md compares with."""

import importlib.util
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
from emulate_results import from_sizes
from plan_scale_measured import results

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.measure.plan.scale import GROWTH

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured")
    for n in (2, 3):
        json_files.write(path / f"net{n}.json", results(n, trials=10))
        json_files.write(path / f"host{n}.json", results(n, hosts=1, trials=10))
    json_files.write(path / "plan.json", from_sizes([4_000_000] * 25))
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")


def predicted(*arguments):
    return cli.run(["plan", "scale", *arguments])


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
    assert predicted(*HOST, "--at", "8", "--alpha-us", "5") == 2
    assert "--bandwidth-gbit is missing" in capsys.readouterr().err
    assert answer(capsys, *HOST, "--at", "4", "--ppn", "4")["rows"][0]["hosts"] == 1


def test_a_slow_host_stays_slow_behind_a_fast_network(capsys):
    """Ranks of a host that wait for cores do not become fast because there is a second host."""
    for n in (2, 3, 4):
        json_files.write(Path(f"slow{n}.json"), results(n, hosts=1, trials=10, alpha=5e-3, beta=80e-9))
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
    assert predicted(*HOST, *WORK, *network, "--at", "4,8") == 0
    assert re.search(r"^    8      1 +- +- +- +- +-$", capsys.readouterr().out, re.MULTILINE)
    assert predicted(*HOST, *WORK, *network, "--at", "8,64") == 2
    assert "wait for its 4 cores" in capsys.readouterr().err


def test_what_no_formula_describes_is_not_extended(capsys):
    def scattered(rng, times):
        return times * 10 ** rng.uniform(-1.2, 1.2)

    for n in (2, 3):
        json_files.write(Path(f"wild{n}.json"), results(n, hosts=1, trials=10, spoil=scattered))
    assert predicted("--fit", "wild2.json", "wild3.json", *WORK, "--at", "3") == 2
    assert "off what the best formula says" in capsys.readouterr().err


def test_more_ranks_than_cores_are_told(capsys):
    json_files.write(Path("crowd6.json"), results(6, hosts=1, trials=10))
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
    [(["--fp16-allreduce"], True), (["--no-overlap"], False), (["--fusion-threshold-mb", "0"], False),
     (["--alpha-us", "0", "--bandwidth-gbit", "100"], True), (["--alpha-us", "9", "--bandwidth-gbit", "0.1"], False)],
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
        (("--alpha-us", "1", "--bandwidth-gbit", "1"), "--plan"),
        (("--alpha-us", "1", "--bandwidth-gbit", "1", "--parameters", "7X"), "7B"),
        (("--fit", "host2.json", "--alpha-us", "2"), "--bandwidth-gbit is missing"),
        (("--fit", "net2.json", "--plot", "a.png"), "--step-ms"),
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
    assert predicted(*NET, *WORK, "--at", "2,8,64", "--plot", "a.svg") == 0
    assert "<svg" in Path("a.svg").read_text()


def test_a_plot_that_cannot_be_is_refused_before_the_files_are_read(capsys):
    Path("other.json").write_text("{}")
    assert predicted("--fit", "other.json", *WORK, "--plot", "a.gif") == 2
    assert "a.gif" in capsys.readouterr().err


def test_no_path_or_host_is_in_the_output(capsys, folder):
    assert predicted(*NET, *WORK, "--json") == 0
    assert str(folder) not in capsys.readouterr().out


# The published figures


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_plan_scale", ROOT / "benchmarks" / "plan_scale.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published(benchmark):
    return {(one.model, one.ranks): one for one in benchmark.published()}


def test_what_was_published_lies_in_its_interval_around_the_prediction(published):
    assert len(published) == 17
    for one in published.values():
        assert one.low <= one.published <= one.high, one
        assert one.low < one.predicted < one.high < 1
    errors = [100 * abs(one.predicted - one.published) for one in published.values()]
    assert statistics.median(errors) < 4 and max(errors) < 19


def test_what_a_step_grows_by_is_what_was_published(published):
    """And no more: the median and the extremes of the published steps over the predicted ones, per doubling."""
    found = []
    for one in published.values():
        without = one.predicted * (1 + GROWTH.value * math.log2(one.ranks))
        found.append((without / one.published - 1) / math.log2(one.ranks))
    assert statistics.median(found) == pytest.approx(GROWTH.value, rel=0.05)
    assert (min(found), max(found)) == pytest.approx((GROWTH.low, GROWTH.high), rel=0.05)
    assert GROWTH.low <= min(found) and max(found) <= GROWTH.high


def test_beyond_what_was_measured_they_hold_the_published_error(capsys):
    found = answer(capsys, *NET, *WORK, "--at", "1,3,4")
    one, inside, beyond = found["rows"]
    assert one["efficiency"] == {"value": 1, "low": None, "high": None}
    assert inside["efficiency"]["low"] > 0.9 * inside["efficiency"]["value"]
    apart = math.log2(4 / 3)  # three ranks were measured
    plain = 0.3 + beyond["exposed_s"]["value"] + beyond["straggler_s"]["value"]
    assert beyond["step_s"]["value"] == pytest.approx(plain * (1 + GROWTH.value * apart))
    assert beyond["step_s"]["high"] >= plain * (1 + GROWTH.high * apart)
    assert beyond["step_s"]["high"] == pytest.approx(0.3 / beyond["efficiency"]["low"])
    assert any("Not measured: 4 ranks." in note for note in found["notes"])
    assert predicted(*NET, *WORK, "--at", "3,4") == 0
    table = capsys.readouterr().out.partition("Prediction with 95% intervals")[2].splitlines()
    assert all(line.count("[") == 5 for line in table[2:4])
    given = ("--alpha-us", "10", "--bandwidth-gbit", "25", "--ppn", "4", *WORK)
    assert predicted(*given, "--at", "64") == 0
    assert capsys.readouterr().out.count("[") == 2  # of the step and the efficiency


def test_vgg_16_is_bound_by_its_bytes(published):
    """Each server sends and receives 2 * 511/512 * 553 MB over 25 Gbit/s: 353 ms beside 489 ms of computation."""
    assert published["VGG-16", 512].communication_s >= 2 * 511 / 512 * 138_357_544 * 4 * 8 / 25e9


def test_the_page_says_what_is_computed(published, benchmark):
    page = (ROOT / "docs" / "plan.md").read_text()
    assert all(benchmark.row_of(one) in page for one in published.values())


def test_a_size_that_cannot_be_refuses_its_row_alone(capsys):
    network = ("--alpha-us", "10", "--bandwidth-gbit", "25", "--ppn", "8", *WORK)
    found = answer(capsys, *network, "--at", "4,16,10000001")
    assert [row["efficiency"] is None for row in found["rows"]] == [True, False, True]
    assert any(note.startswith("No number for 4 ranks: 4 ranks fit on one host of 8") for note in found["notes"])
    assert any("1000000" in note for note in found["notes"])
    assert [row["ranks"] for row in answer(capsys, *HOST, *WORK, "--at", "3,512")["rows"]] == [3, 512]


# Fewer bytes ------------------------------------------------------------------------------------------------------

WIDE = from_sizes([4 * (4096 * 800 + 800), 4 * (4096 * 4096 + 4096)])  # benchmarks/compression.py, as backward has it
SLOW = ("--alpha-us", "50", "--bandwidth-gbit", "1", "--step-ms", "50")


@pytest.fixture
def wide(tmp_path):
    json_files.write(tmp_path / "wide.json", WIDE)
    return str(tmp_path / "wide.json")


def compressed(capsys, *arguments):
    return answer(capsys, *arguments)["compressed"]


MEASURED = {"none": 0.733, "fp16": 0.465, "bf16": 0.392, "int8": 0.250}
"""Over Gloo, 2 hosts of 1 Gbit/s: docs/slow_networks.md."""


def test_what_fewer_bytes_give_is_within_a_quarter_of_what_was_measured(wide, capsys):
    (row,) = compressed(capsys, *SLOW, "--plan", wide, "--at", "2")
    for name, measured in MEASURED.items():
        told = row["steps_s"]["bf16" if name == "fp16" else name]
        assert told == pytest.approx(measured, rel=0.25), name
        assert (
            f'| `"{name}"` | {1e3 * measured:.0f} | {1e3 * told:.0f} | {100 * (told / measured - 1):+.1f} % |'
            in (ROOT / "docs" / "plan.md").read_text()
        )


def test_packing_is_in_the_step_and_named(wide, capsys):
    (row,) = compressed(capsys, *SLOW, "--plan", wide, "--at", "2", "--no-overlap", "--fusion-threshold-mb", "0")
    numbers = WIDE.nbytes / 4
    assert row["packing_s"] == pytest.approx({"none": 0, "bf16": 0.75e-9 * numbers, "int8": 2e-9 * numbers})
    growth = 1 + GROWTH.value
    sent = {"none": 4, "bf16": 2, "int8": 260 / 256}  # on two ranks each byte crosses a link once
    for name, number in sent.items():
        whole = 0.050 + row["packing_s"][name] + 8e-9 * number * numbers
        assert row["steps_s"][name] == pytest.approx(growth * whole, rel=0.02)
    assert row["shortest"] == "int8" and row["faster"] == pytest.approx(row["steps_s"]["none"] / row["steps_s"]["int8"])
    assert predicted(*SLOW, "--plan", wide, "--at", "2") == 0
    out = capsys.readouterr().out
    assert f"{2e-6 * numbers:.1f} ms of int8" in out and "another guarantee" in out and "int8, 2." in out


def test_none_is_the_step_of_the_first_table(capsys):
    found = answer(capsys, *NET, *WORK, "--at", "2,4,64")
    for row, told in zip(found["compressed"], found["rows"], strict=True):
        assert row["steps_s"]["none"] == pytest.approx(told["step_s"]["value"])
        assert row["efficiency"]["none"] == pytest.approx(told["efficiency"]["value"])


def test_every_h_shares_one_exchange_among_h_steps(wide, capsys):
    once, rarely = (
        compressed(capsys, *SLOW, "--plan", wide, "--at", "2", "--no-overlap", "--every", every)[0]
        for every in ("1", "30")
    )
    assert once["steps_s"]["every"] == pytest.approx(once["steps_s"]["none"])
    growth = 1 + GROWTH.value
    exchange = once["steps_s"]["every"] / growth - 0.050
    assert rarely["steps_s"]["every"] == pytest.approx(growth * (0.050 + exchange / 30)) and rarely["every"] == 30


def test_on_a_fast_network_compression_is_not_the_shortest(wide, capsys):
    fast = ("--alpha-us", "5", "--bandwidth-gbit", "400", "--step-ms", "85", "--plan", wide, "--at", "2")
    assert compressed(capsys, *fast)[0]["shortest"] == "none"


def test_many_ranks_pay_for_the_messages_of_int8(wide, capsys):
    slow, far = compressed(capsys, *SLOW, "--plan", wide, "--at", "2,1024")
    assert slow["shortest"] == "int8" and far["shortest"] == "bf16"


def test_one_host_and_a_step_without_computation_have_no_such_line(capsys):
    assert compressed(capsys, *HOST, *WORK, "--at", "2") == []
    assert compressed(capsys, *NET, "--at", "4") == []
