import json
import re

import numpy as np
import pytest
from timeline_files import ATPESC, allreduce, metadata, write

from hvdkit.cli import run
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.read.timeline.difference import Only, check_ratio, compare


def training(path, seed, collective, steps=40, negotiate=200, fused=False, outlier=None):
    """``collective``: tensor to the typical microseconds of its collective."""
    rng = np.random.default_rng(seed)
    events, now = metadata(collective), 1000
    for _ in range(steps):
        for pid, typical in enumerate(collective.values(), start=1):
            waited, took = (int(mean * rng.lognormal(0, 0.2)) for mean in (negotiate, typical))
            took = outlier if outlier and not events[-1].get("ts") else took
            events += allreduce(pid, now, waited, took, memcpy=5 if fused else None)
            now += 2000 + waited + took
    return write(path, events)


def test_the_phase_that_became_slower_comes_first_and_alone(tmp_path):
    a = training(tmp_path / "a.json", 1, {"small": 100, "large": 1000})
    b = training(tmp_path / "b.json", 2, {"small": 100, "large": 2000})
    found = compare(a, b)
    first = found.changes[0]
    assert (first.tensor, first.phase, first.count_a, first.count_b) == ("large", "collective", 40, 40)
    assert first.significant
    assert first.ratio == pytest.approx(2, rel=0.2)
    assert first.explains == pytest.approx(40 * 1000, rel=0.3)
    assert [change for change in found.changes if change.significant] == [first]
    assert found.slower(1.5) == [first]
    assert found.slower(3) == []
    assert found.slower(1.5, at_least=5000) == []


def test_the_faster_direction_explains_less_time_and_is_never_slower(tmp_path):
    a = training(tmp_path / "a.json", 1, {"t": 2000})
    b = training(tmp_path / "b.json", 2, {"t": 1000}, steps=80)
    found = compare(a, b)
    assert found.changes[0].explains == pytest.approx(-80 * 1000, rel=0.3)
    assert found.changes[0].significant
    assert found.slower(1) == []


def test_chance_among_many_comparisons_is_not_called_a_change(tmp_path):
    names = {f"t{number}": 500 for number in range(100)}
    a, b = training(tmp_path / "a.json", 3, names, steps=12), training(tmp_path / "b.json", 4, names, steps=12)
    found = compare(a, b)
    assert len(found.changes) == 200
    assert [change for change in found.changes if change.significant] == []
    alone = training(tmp_path / "c.json", 3, names, steps=12)
    assert all(change.p_value == 1 and change.explains == 0 for change in compare(a, alone).changes)


def test_p_values_are_those_of_the_rank_test_times_the_correction(tmp_path):
    from scipy.stats import mannwhitneyu

    a = training(tmp_path / "a.json", 5, {"t": 500})
    b = training(tmp_path / "b.json", 6, {"t": 560}, negotiate=210)
    changes = compare(a, b).changes
    phases = ("NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE")
    raw = sorted(mannwhitneyu(durations(a, phase), durations(b, phase)).pvalue for phase in phases)
    harmonic = 1 + 1 / 2
    expected = [min(1, raw[0] * 2 * harmonic, raw[1] * harmonic), min(1, raw[1] * harmonic)]
    assert sorted(change.p_value for change in changes) == pytest.approx(expected)


def durations(path, name):
    events = json.loads(path.read_text())
    starts = [index for index, event in enumerate(events) if event.get("name") == name]
    return [events[index + 1]["ts"] - events[index]["ts"] for index in starts]


def test_what_the_first_operation_takes_is_told_apart_and_ranked_by_nothing(tmp_path, capsys):
    a = training(tmp_path / "a.json", 7, {"t": 1000}, steps=200)
    b = training(tmp_path / "b.json", 7, {"t": 1000}, steps=200, outlier=500_000)
    (first,) = (change for change in compare(a, b).changes if change.phase == "collective")
    assert not first.significant and abs(first.explains) < 10_000
    assert first.once == pytest.approx(500_000, rel=0.01)
    assert first.ratio == pytest.approx(1, abs=0.01)
    assert run(["timeline", "diff", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Verdict: Nothing differs by more than chance in 2 comparisons of phases.\n")
    assert "once, in first operations: at most +499 ms, collective of t" in out


def test_what_is_in_one_only_is_told_and_not_tested(tmp_path):
    a = training(tmp_path / "a.json", 1, {"both": 100, "gone": 100}, fused=True)
    b = training(tmp_path / "b.json", 2, {"both": 100, "new": 100}, steps=30)
    found = compare(a, b)
    assert (found.only_a, found.only_b) == ((Only("gone", "ALLREDUCE", 40),), (Only("new", "ALLREDUCE", 30),))
    (copied,) = [change for change in found.changes if change.phase == "memcpy in"]
    assert (copied.count_a, copied.count_b, copied.median_b, copied.ratio, copied.p_value) == (40, 0, None, None, None)
    assert copied.explains == -39 * 5 and copied.once == -5


def test_the_whole_counts_fused_exchanges_once(tmp_path):
    events = metadata(["x", "y"]) + allreduce(1, 100, 10, 50) + allreduce(2, 100, 10, 50) + allreduce(1, 500, 10, 20)
    path = write(tmp_path / "a.json", events)
    whole = compare(path, path).a
    assert (whole.operations, whole.communication, whole.duration) == (3, 70, 431)


def test_the_real_recording_does_not_differ_from_itself(capsys):
    assert run(["timeline", "diff", str(ATPESC), str(ATPESC), "--fail-above", "1"]) == 0
    out = capsys.readouterr().out
    assert "explains" not in out
    assert "1304 operations in 27.9 s" in out


def test_the_command_fails_only_when_asked_to(tmp_path, capsys):
    a = training(tmp_path / "a.json", 1, {"t<1>": 1000})
    b = training(tmp_path / "b.json", 2, {"t<1>": 2000})
    assert run(["timeline", "diff", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"Verdict: The collective of t<1> takes longer in B: \+\d\d\.\d ms in all, the median 2\.\d+ ms", out
    )
    assert re.search(r"^collective +t<1> +\+\d\d\.\d ms ", out, re.MULTILINE)
    assert run(["timeline", "diff", str(a), str(b), "--fail-above", "1.5"]) == 1
    assert "slower than 1.5x: collective of t<1>" in capsys.readouterr().out
    assert run(["timeline", "diff", str(a), str(b), "--fail-above", "1.5", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["changes"][0]["significant"] is True
    assert values["changes"][0]["median_a_s"] == pytest.approx(1e-3, rel=0.2), "seconds"
    assert (values["kind"], values["only_a"]) == ("timeline-diff", [])
    assert values["slower"][0]["phase"] == "collective"
    assert run(["timeline", "diff", str(b), str(a), "--fail-above", "1.5"]) == 0
    assert run(["timeline", "diff", str(a), str(b), "--fail-above", "0.5"]) == 2
    assert run(["timeline", "diff", str(a), str(tmp_path / "missing.json")]) == 2


def test_a_file_without_operations(tmp_path):
    empty = write(tmp_path / "e.json", metadata(["x"]))
    with pytest.raises(DataError, match="no complete operation"):
        compare(ATPESC, empty)


@pytest.mark.parametrize("ratio", [0.99, float("nan"), float("inf")])
def test_a_ratio_that_cannot_be(ratio):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        check_ratio(ratio)
