"""Files of ``hvdkit bench scaling`` that somebody changed, damaged or made: refused in a sentence, never obeyed."""

import json
from pathlib import Path

import pytest
from bench_machine import Machine, fitting, run_bench, saved, use

from hvdkit import cli

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
"""Clears a terminal and names its window."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = use(tmp_path, monkeypatch, Machine(lambda n: 0.01 * (0.1 + 0.9 / n), noise=0.005))
    machine.marks = True
    return machine


@pytest.fixture
def content(machine):
    """Of a good file with 1 and 2 ranks."""
    assert run_bench("--repeats", "2", ranks="1,2") == 0
    return saved()


def changed(content, place, value):
    """Write the file with another value at a place; ``None`` for a place that is gone."""
    inside = content
    for name in place[:-1]:
        inside = inside[name]
    if value is None:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    Path("changed.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("asked", "ranks"), [], "asked.ranks: expected `array` of length >= 1"),
        (("asked", "ranks"), "12", 'asked.ranks is "12": expected `array`, got `str`'),
        (("asked", "mode"), "medium", 'asked.mode is "medium": expected `str` matching'),
        (("environment", "cores"), None, "environment: object missing required field `cores`"),
        (("launches",), [1], "launches[0] is 1: expected `object`, got `int`"),
        (("launches", 0, "settings", 0, "words"), [7], "launches[0].settings[0].words[0] is 7: expected `str`"),
        (("jobs", 0, "ranks"), "1", 'jobs[0].ranks is "1": expected `int`'),
        (("jobs", 0, "ranks"), True, "jobs[0].ranks is true: expected `int`"),
        (("jobs", 0, "wall_s"), -1, "jobs[0].wall_s is -1: expected `float` >= 0.0"),
        (("jobs", 0, "steps", "step_s"), 0, "jobs[0].steps.step_s is 0: expected `float` > 0.0"),
        (("jobs", 0, "steps", "step_s"), float("nan"), "JSON is malformed: invalid character"),
        (("jobs", 0, "steps", "step_s"), 10**400, "...: number out of range"),
        (("jobs", 0, "steps", "parts"), [], "jobs[0].steps.parts: expected `object`, got `array`"),
        (("jobs", 0, "colour"), "blue", "jobs[0]: object contains unknown field `colour`"),
        (("jobs", 0, ESCAPE), "blue", "jobs[0]: object contains unknown field `"),
        (("recordings",), [], "object contains unknown field `recordings`"),
        (("environment", "packages", ESCAPE), 1, "environment.packages: expected `str`, got `int`"),
        (("kind",), "tuned", "it says that it is 'tuned'"),
        (("schema",), True, "its schema is True, expected a whole number of at least 1"),
        (("schema",), 0, "its schema is 0, expected a whole number of at least 1"),
        (("schema",), 1, "which this version does not know; use that one"),
        (("asked", "ranks"), [2, 1], "asked: ranks are 2, 1, expected them ascending"),
        (("asked", "ranks"), [1, 2, 10**300], "asked.ranks[2] is 1000"),
        (("asked", "repeats"), 1, "was not asked for"),
        (("jobs", 0, "ranks"), 77, "jobs[0] was not asked for"),
        (("jobs", 1, "repeat"), 1, "is there twice"),
    ],
    ids=lambda value: ".".join(map(ascii, value)) if isinstance(value, tuple) else ascii(value)[:20],
)
def test_a_changed_file_is_refused_where_it_is_wrong(content, capsys, place, value, said):
    changed(content, place, value)
    for words in (["show"], ["show", "--plot", "x.svg"]):
        capsys.readouterr()
        assert cli.run(["bench", words[0], "changed.json", *words[1:]]) == 1
        out, err = capsys.readouterr()
        assert "changed.json is not a file of 'hvdkit bench scaling'" in err and said in err
        assert not out and "Traceback" not in err and "\x1b" not in err and len(err.splitlines()) == 1
    assert not list(Path().glob("x.*"))


@pytest.mark.parametrize("seconds", [1e308, 1e-300], ids=str)
def test_seconds_that_nobody_measured_enter_no_ratio(content, capsys, seconds):
    for job in content["jobs"]:
        if job["ranks"] == 2:
            job["steps"]["step_s"] = seconds
    changed(content, ("notes",), [])
    capsys.readouterr()
    assert cli.run(["bench", "show", "changed.json", "--plot", "x.svg", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert [row["seconds"] is None for row in rows] == [False, True]
    assert list(found)[:3] == ["hvdkit", "kind", "schema"] and (found["kind"], found["schema"]) == ("bench-summary", 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"null", "it is no JSON object;"),
        (b"[]", "it is no JSON object;"),
        (b"{}", "it does not say what it is;"),
        (b"", "Input data was truncated;"),
        (b"\x80PNG\x00", "JSON is malformed: invalid character (byte 0);"),
        (b"[" * 100_000, "it is nested too deeply;"),
        (b'{"a":' * 100_000, "it is nested too deeply;"),
        (b'"\xff"', "; copy it again, or make it again."),
        (b"9" * 5000, "integer value out of range;"),
    ],
    ids=lambda value: ascii(value[:20]) if isinstance(value, bytes) else None,
)
def test_the_reason_is_in_words(content, capsys, text, reason):
    Path("changed.json").write_bytes(text)
    assert cli.run(["bench", "show", "changed.json"]) == 1
    err = capsys.readouterr().err
    assert reason in err and "changed.json is not a file of 'hvdkit bench scaling'" in err and err.count("\n") == 1


def test_a_summary_is_made_anew_and_not_believed(content, capsys):
    capsys.readouterr()
    assert cli.run(["bench", "show", "results.json"]) == 0
    shown = capsys.readouterr().out
    changed(content, ("summary",), "faster than light")
    assert cli.run(["bench", "show", "changed.json"]) == 0
    assert capsys.readouterr().out == shown


def test_what_a_job_printed_is_not_obeyed_by_a_terminal(machine, capsys):
    machine.fails, machine.failure = (2,), f"exited with status 3; its last lines:\nred {ESCAPE} alert"
    assert run_bench("--repeats", "2", ranks="1,2") == 0
    assert cli.run(["bench", "show", "results.json"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\x07" not in out + err
    assert out.count("owned") == 2 and err.count("owned") == 1, "shown, and shown as it is"
    assert "its last lines:\nred" in out


def test_the_next_command_that_is_named_can_be_pasted(machine, capsys):
    assert cli.run(["bench", "scaling", "-n", "1", "--repeats", "1", "-o", "a $(b).json", "--", "train.py"]) == 0
    assert "`hvdkit bench show 'a $(b).json' --plot scaling.svg`" in capsys.readouterr().err


def test_the_results_that_the_documentation_draws_can_be_read():
    assert cli.run(["bench", "show", str(Path(__file__).parents[2] / "docs/data/scaling.json")]) == 0


def test_what_is_written_can_be_read(machine):
    machine.fails, machine.interrupt_at = (1,), 4
    assert run_bench("--repeats", "3", ranks="1,2") == 130
    assert fitting(saved())
    assert cli.run(["bench", "show", "results.json"]) == 0


def test_steps_that_take_no_time_are_a_failure_and_not_infinitely_fast(machine, capsys):
    machine.seconds, machine.marks = (lambda n: 0.0), False
    assert run_bench("--repeats", "1", ranks="1,2") == 1
    assert "steps that take no time" in capsys.readouterr().err


def test_where_one_repeat_alone_is_left_that_is_said_of_this_number_of_ranks(machine, capsys):
    machine.fails = (2,)
    assert run_bench("--repeats", "2", ranks="1,2,4") == 0
    rows = saved()["summary"]["rows"]
    (alone,) = [row["ranks"] for row in rows if row["repeats"] == 1]
    out = capsys.readouterr().out
    assert f"One repeat alone counts at N = {alone}, which" in out and "there are no intervals" not in out
    assert all((row["seconds"]["low"] is None) == (row["ranks"] == alone) for row in rows)


def test_a_law_that_does_not_describe_what_was_measured_is_said(machine, capsys):
    machine.seconds = lambda n: 0.01 * n
    assert run_bench(ranks="1,2,4") == 0
    out = capsys.readouterr().out
    assert "Amdahl does not describe this: on 1 rank it is" in out or "Amdahl does not describe this: on 4 ranks" in out
    machine.seconds = lambda n: 0.01 * (0.1 + 0.9 / n)
    Path("results.json").unlink()
    assert run_bench(ranks="1,2,4") == 0
    assert "does not describe" not in capsys.readouterr().out
