"""Two traces compared."""

import json

import pytest
from trace_files import data, event, gloo, step, write

from hvdkit.cli import run
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.trace import compare


def training(path, multiply, steps=5, extra=()):
    """Each step: 2 ms loading, ``multiply[i]`` ms of aten::mm, twice 3 ms aten::add, an allreduce of 10 ms."""
    events = []
    for number in range(steps):
        at = 100 * number
        length = multiply[number % len(multiply)]
        events += [step(number + 3, at, 100), data(at, 2), event("aten::mm", at + 2, length)]
        events += [event("aten::add", at + 70, 3), event("aten::add", at + 74, 3), gloo(at + 80, 10)]
        events += [event(name, at + 95, 1) for name in extra]
    return write(path, *events)


def test_what_became_slower_is_first_and_clear(tmp_path):
    found = compare(
        training(tmp_path / "a.json", [20, 22]), training(tmp_path / "b.json", [30, 33], steps=4, extra=["new"])
    )
    first, second = found.operators[:2]
    assert (first.name, first.clear, first.calls_a, first.calls_b) == ("aten::mm", True, 1, 1)
    assert (first.mean_a, first.mean_b) == (pytest.approx(20.8), pytest.approx(31.5))
    assert first.explains == pytest.approx(10.7)
    assert (second.name, second.mean_a, second.calls_a, second.explains) == ("new", 0, 0, pytest.approx(1))
    assert (found.steps_a, found.steps_b) == (5, 4)
    parts = {part.name: part for part in found.parts}
    assert parts["computation"].explains == pytest.approx(11.7) and parts["computation"].clear
    assert parts["exposed"].explains == pytest.approx(0) and not parts["exposed"].clear
    assert parts["data"].mean_a == pytest.approx(2)
    add = next(change for change in found.operators if change.name == "aten::add")
    assert add.calls_a == 2 and add.mean_a == pytest.approx(6)


@pytest.mark.parametrize(("a", "b", "steps"), [([20, 31], [30, 33], 5), ([20, 22], [30, 33], 3)])
def test_steps_that_overlap_or_are_few_are_not_clear(tmp_path, a, b, steps):
    found = compare(training(tmp_path / "a.json", a), training(tmp_path / "b.json", b, steps))
    assert found.operators[0].name == "aten::mm" and not found.operators[0].clear


def test_the_same_trace_twice_differs_in_nothing(tmp_path):
    path = training(tmp_path / "a.json", [20])
    found = compare(path, path)
    assert all(change.explains == 0 and not change.clear for change in (*found.operators, *found.parts))


def test_traces_without_steps(tmp_path):
    found = compare(
        write(tmp_path / "a.json", event("aten::mm", 0, 10)), write(tmp_path / "b.json", event("aten::mm", 0, 12))
    )
    assert found.operators[0].explains == pytest.approx(2) and found.steps_a == 1


def test_a_directory_with_several_traces_is_refused(tmp_path):
    path = training(tmp_path / "a.json", [20])
    assert compare(tmp_path, path).operators
    training(tmp_path / "b.json", [20])
    with pytest.raises(InvalidArgumentError, match="holds 2 traces"):
        compare(tmp_path, path)


def test_the_command(tmp_path, capsys):
    a, b = training(tmp_path / "a.json", [20, 22]), training(tmp_path / "b.json", [30, 33])
    assert run(["trace", "diff", str(a), str(b)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("aten::mm"))
    assert "+10.4" in line and not line.rstrip().endswith("?")
    few = training(tmp_path / "few.json", [90], steps=1)
    assert run(["trace", "diff", str(a), str(few)]) == 0
    out = capsys.readouterr().out
    assert "(?): fewer than 4 steps on a side" in out and ": 1 step (3)," in out
    assert run(["trace", "diff", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operators"][0]["name"] == "aten::mm"
    assert run(["trace", "diff", str(a)]) == 2
    assert run(["trace", "diff", str(a), str(tmp_path / "none.json")]) == 2
