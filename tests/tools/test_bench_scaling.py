"""``hvdkit bench scaling`` on jobs that are only numbers: what it measures, keeps, finds and says."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from bench_machine import Machine, fitting, saved, use
from bench_machine import run_bench as bench
from explain_jobs import Job, pause_of_all

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.common.intervals import Estimate
from hvdkit.common.units import interval_text
from hvdkit.errors import DataError
from hvdkit.jobs.trials import TrialJob
from hvdkit.measure.bench import results
from hvdkit.measure.bench.analysis import ScalingRow, ScalingSummary, causes, otherwise
from hvdkit.measure.bench.jobs import measure, order
from hvdkit.measure.bench.results import ScalingAsked
from hvdkit.observe.step_files import RankTimes, Step

SERIAL = 0.1


def amdahl(n):
    return 0.01 * (SERIAL + (1 - SERIAL) / n)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Have jobs run on a machine of numbers, with 4 cores, Open MPI and train.py."""
    return partial(use, tmp_path, monkeypatch)


# What it finds


def test_an_injected_serial_fraction_comes_back_within_its_interval(start):
    inside = 0
    for seed in range(20):
        start(Machine(amdahl, noise=0.01, seed=seed))
        Path("results.json").unlink(missing_ok=True)
        assert bench() == 0
        (fit,) = [fit for fit in saved()["summary"]["fits"] if fit["name"] == "Amdahl"]
        found = fit["parameters"]["serial"]
        inside += found["low"] <= SERIAL <= found["high"]
        assert found["value"] == pytest.approx(SERIAL, abs=0.05)
        assert found["high"] - found["low"] < 0.15
    assert inside >= 16


def test_an_injected_serial_fraction_of_weak_scaling_comes_back(start):
    start(Machine(lambda n: 0.01 * n / (SERIAL + (1 - SERIAL) * n), noise=0.002))
    assert bench("--weak") == 0
    (fit,) = [fit for fit in saved()["summary"]["fits"] if fit["name"] == "Gustafson"]
    assert fit["parameters"]["serial"]["value"] == pytest.approx(SERIAL, abs=0.02)
    rows = {row["ranks"]: row for row in saved()["summary"]["rows"]}
    assert rows[4]["speedup"]["value"] == pytest.approx(SERIAL + (1 - SERIAL) * 4, rel=0.02)
    assert rows[4]["efficiency"]["value"] == pytest.approx((SERIAL + (1 - SERIAL) * 4) / 4, rel=0.02)


def test_injected_contention_and_coherence_come_back(start):
    sigma, kappa = 0.05, 0.02
    start(Machine(lambda n: 0.01 * (1 + sigma * (n - 1) + kappa * n * (n - 1)) / n, noise=0.001), cores=8)
    assert bench(ranks="1,2,4,8") == 0
    (fit,) = [fit for fit in saved()["summary"]["fits"] if fit["name"] == "USL"]
    assert fit["parameters"]["sigma"]["value"] == pytest.approx(sigma, abs=0.01)
    assert fit["parameters"]["kappa"]["value"] == pytest.approx(kappa, abs=0.003)
    assert all(abs(residual) < 0.01 for residual in fit["residuals"].values())


def test_strong_scaling_counts_the_steps_that_fewer_ranks_take_more_of(start):
    machine = start(Machine(lambda n: 0.01, noise=0.001))
    machine.count = lambda n: 5 + 40 // n
    assert bench("--warmup-steps", "5") == 0
    row = saved()["summary"]["rows"][-1]
    assert row["speedup"]["value"] == pytest.approx(45 / 15, rel=0.01)


def test_warm_up_is_left_out_and_the_first_step_is_told_apart(start):
    start(Machine(lambda n: 0.01, noise=0.001))
    assert bench("--weak") == 0
    row = saved()["summary"]["rows"][0]
    assert row["step_s"] == pytest.approx(0.01, rel=0.01)
    assert row["first_step_s"] == pytest.approx(0.1, rel=0.01)
    assert 1.5 < row["startup_s"] < 4


def test_a_late_rank_is_shown_as_wait_of_the_others_and_the_parts_add_up(start, capsys):
    machine = start(Machine(lambda n: 0.010, noise=0.001))
    machine.late, machine.marks = {1: 0.006}, True
    assert bench("--weak", ranks="1,2") == 0
    row = saved()["summary"]["rows"][-1]
    assert sum(row["parts"].values()) == pytest.approx(row["step_s"], rel=0.05)
    assert row["parts"]["wait"] == pytest.approx(0.006 / 2, rel=0.01)
    assert row["parts"]["communication"] == pytest.approx(0.003, rel=0.02)
    assert row["parts"]["input"] == pytest.approx(0.001, rel=0.02)
    out = capsys.readouterr().out
    assert "Verdict: Rank 1 computes longer. It costs 6.0" in out
    (cause,) = saved()["summary"]["causes"]
    assert (cause["kind"], cause["ranks"]) == ("compute", [1])
    assert cause["lost_s"] == pytest.approx(0.006, rel=0.01)


@pytest.mark.parametrize("marks", [True, False], ids=["ready", "without ready"])
def test_the_rank_whose_input_sleeps_in_two_of_three_batches_is_named(marks):
    """Its mean over the ranks would hide it; no rank has to say when it is ready."""
    times = []
    for rank in range(2):
        steps, now = [], 0.0
        for number in range(30):
            slow = 0.020 if number % 3 else 0.0
            ready = now + (slow if rank else 0.0) + 0.005
            steps.append(Step(now, ready - 0.005, ready if marks else None, now + slow + 0.006))
            now += slow + 0.006
        times.append(RankTimes(rank, tuple(steps)))
    found = measure(times, 2, 0.0, 0)
    cause = causes([ScalingRow(2, 1, 0, False, step_s=found.step_s, causes=found.causes)])[0]
    assert (cause.kind, cause.ranks) == ("input", (1,)) and cause.what == "Rank 1 waits for its input."
    assert cause.lost_s == pytest.approx(0.020 * 2 / 3, rel=0.05)


def test_without_a_cause_the_limits_are_said():
    """An allreduce of 17 % of a step is no cause, and more than the 2 % from which on one is named."""
    job = Job()
    job.exchange = 0.0044
    found = measure(job.times(), 4, 0.0, 5)
    assert found.parts.communication / found.step_s == pytest.approx(0.17, abs=0.01) and found.causes == ()
    row = ScalingRow(4, 1, 0, False, step_s=found.step_s, causes=found.causes)
    assert "the allreduce from 20%" in otherwise(ScalingSummary("weak", results.STEPS, (row,), (), ()))


def test_a_step_lasts_until_the_next_one_on_its_slowest_rank():
    times = [RankTimes(rank, tuple(Step(at, at, None, at + 1 + rank) for at in range(0, 30, 3))) for rank in range(2)]
    assert measure(times, 2, 0.0, 1).step_s == 3


def test_a_pause_between_steps_is_no_communication():
    job = Job()
    pause_of_all(job)
    found = measure(job.times(), 4, 0.0, 5)
    assert found.parts.between == pytest.approx(1 / 50, rel=0.05)
    assert found.parts.communication == pytest.approx(0.002, rel=0.05)
    assert sum(msgspec.structs.astuple(found.parts)) == pytest.approx(found.step_s)


def test_too_few_steps_that_train_to_tell_a_cause_are_still_measured():
    """Of 12 steps 4 are a validation."""
    job = Job(steps=12)
    times = [replace(rank, steps=(*rank.steps[:8], *(replace(one, ready=None) for one in rank.steps[8:])))
             for rank in job.times()]  # fmt: skip
    found = measure(times, 4, 0.0, 2)
    assert (found.count, found.causes) == (8, None) and found.step_s == pytest.approx(0.023, rel=0.1)
    with pytest.raises(DataError, match="recorded steps that cannot be used"):
        measure(times, 4, 0.0, 10)


def test_ranks_that_do_not_say_when_they_are_ready_have_no_communication(start, capsys):
    start(Machine(amdahl))
    assert bench() == 0
    row = saved()["summary"]["rows"][-1]
    assert row["parts"]["communication"] is None
    assert "compute holds communication" in capsys.readouterr().out


def test_the_closing_line_serves_where_no_steps_are_recorded(start, capsys):
    machine = start(Machine(amdahl, noise=0.001))
    machine.silent = True
    assert bench() == 0
    assert saved()["summary"]["measure"] == "closing line"
    assert saved()["summary"]["rows"][2]["speedup"]["value"] == pytest.approx(amdahl(1) / amdahl(4), rel=0.01)
    out, err = capsys.readouterr()
    assert "by the closing line" in out
    assert err.count("write `for x, y in hk.record_steps(loader)`") == 1


# What cannot be told


def test_noise_is_said_aloud(start, capsys):
    start(Machine(lambda n: 0.01 if n == 1 else 0.006, noise=0.05))
    assert bench() == 0
    out = capsys.readouterr().out
    assert "cannot tell 2 from 4 ranks apart" in out
    assert "cannot tell 1 from 2" not in out


def test_crowded_points_are_marked_and_kept_out_of_the_fits(start, capsys):
    start(Machine(lambda n: amdahl(n) if n < 4 else 1.0, noise=0.001), cores=2)
    assert bench() == 0
    out = capsys.readouterr().out
    assert "4*" in out and "More ranks than the 2 usable cores (*): 4" in out
    (fit,) = saved()["summary"]["fits"]
    assert list(fit["residuals"]) == ["1", "2"]
    assert fit["parameters"]["serial"]["value"] == pytest.approx(SERIAL, abs=0.02)
    assert "as many parameters as points" in out


def test_one_repeat_has_no_interval(start, capsys):
    start(Machine(amdahl))
    assert bench("--repeats", "1") == 0
    assert saved()["summary"]["rows"][1]["speedup"]["low"] is None
    assert "One repeat says nothing about noise" in capsys.readouterr().out


# What it keeps


def test_one_failed_repeat_keeps_the_others_and_is_said(start, capsys):
    machine = start(Machine(amdahl))
    machine.fails = (5,)
    assert bench() == 0
    failed = [job for job in saved()["jobs"] if job["failure"]]
    assert len(saved()["jobs"]) == 15 and len(failed) == 1
    out, err = capsys.readouterr()
    assert "4 (1 failed)" in out and "ValueError: broken" in out
    assert "job 5 failed and is left out" in err


@pytest.mark.parametrize("seconds", [float("inf"), 0.0, 1e300], ids=str)
def test_a_closing_line_that_names_no_time_is_a_failure(start, capsys, seconds):
    machine = start(Machine(amdahl))
    machine.silent = True
    whole = machine.launch
    machine.launch = lambda launch: whole(launch) if launch.n != 4 else TrialJob(1.0, seconds)
    assert bench("--repeats", "2") == 1
    assert [row["repeats"] for row in saved()["summary"]["rows"]] == [2, 2, 0]
    assert "nor printed 'Hvd Procs N Total time: X second' with a time above 0" in capsys.readouterr().err
    assert fitting(saved())


def test_what_is_compared_with_another_number_than_one_rank_is_said(start, capsys):
    machine = start(Machine(amdahl))
    whole = machine.launch
    machine.launch = lambda launch: whole(launch) if launch.n != 1 else machine.failed()
    assert bench("--repeats", "2") == 1
    assert "compared with 2 ranks, not with one: no job counts on fewer" in capsys.readouterr().out
    Path("results.json").unlink()
    assert bench("--repeats", "2", ranks="2,4") == 0
    assert "compared with 2 ranks, not with one: the fewest that were asked for" in capsys.readouterr().out
    Path("results.json").unlink()
    machine.launch = whole
    assert bench("--repeats", "2") == 0
    assert "not with one" not in capsys.readouterr().out


def test_jobs_that_cannot_be_compared_with_the_others_are_said(start, capsys):
    """One rank records its steps and prints nothing, the others print the closing line and record nothing."""
    machine = start(Machine(amdahl))
    whole = machine.launch

    def launch(job):
        machine.silent = job.n > 1
        return whole(job)

    machine.launch = launch
    assert bench("--repeats", "2") == 1
    assert saved()["summary"]["measure"] == "closing line"
    assert "2 jobs recorded their steps and printed no closing line" in capsys.readouterr().out


def test_a_number_of_ranks_without_any_result_is_status_1(start):
    machine = start(Machine(amdahl))
    whole = machine.launch
    machine.launch = lambda launch: whole(launch) if launch.n != 4 else machine.failed()
    assert bench("--repeats", "2") == 1
    assert [row["repeats"] for row in saved()["summary"]["rows"]] == [2, 2, 0]


def test_a_first_round_of_failures_ends_it(start, capsys):
    machine = start(Machine(amdahl))
    machine.fails = range(1, 100)
    assert bench() == 1
    assert len(machine.ran) == 3
    assert "ValueError: broken" in capsys.readouterr().err
    machine.fails = ()
    assert bench("--repeats", "3") == 0, "a file without any result stands in the way of nothing"
    assert len(saved()["jobs"]) == 9


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(start, capsys):
    machine = start(Machine(amdahl))
    machine.interrupt_at = 7
    assert bench() == 130
    before = saved()["jobs"]
    assert len(before) == 6
    assert "the same command line goes on" in capsys.readouterr().err
    assert bench() == 0
    assert saved()["jobs"][:6] == before
    assert [(job["ranks"], job["repeat"]) for job in saved()["jobs"]] == order(
        ScalingAsked(("train.py",), ranks=(1, 2, 4))
    )
    assert len(machine.ran) == 15
    assert bench() == 0
    assert len(machine.ran) == 15


@pytest.mark.parametrize("other", [["--repeats", "3"], ["--weak"], ["--warmup-steps", "2"], ["--env", "A=1"]], ids=str)
def test_other_arguments_are_refused(start, capsys, other):
    machine = start(Machine(amdahl))
    assert bench() == 0
    assert bench(*other) == 2
    assert "cannot be mixed" in capsys.readouterr().err
    assert len(machine.ran) == 15


def test_another_number_of_cores_is_refused(start, capsys):
    start(Machine(amdahl))
    assert bench() == 0
    start(Machine(amdahl), cores=8)
    assert bench() == 2
    assert "cores 4, and now it is 8" in capsys.readouterr().err


def test_every_round_has_each_number_once_in_its_own_order():
    jobs = order(ScalingAsked(("train.py",), ranks=(1, 2, 4, 8), repeats=6))
    rounds = [tuple(n for n, repeat in jobs if repeat == number) for number in range(6)]
    assert all(sorted(one) == [1, 2, 4, 8] for one in rounds)
    assert len(set(rounds)) > 2


def test_nothing_is_left_beside_the_file(start):
    start(Machine(amdahl))
    assert bench() == 0
    assert sorted(path.name for path in Path().iterdir()) == ["results.json", "train.py"]


# Forms


@pytest.mark.parametrize("marks", [True, False])
def test_the_file_is_as_its_schema_says(start, marks):
    machine = start(Machine(amdahl))
    machine.fails, machine.marks, machine.interrupt_at = (4,), marks, 9
    bench()
    assert fitting(saved())
    bench()
    assert fitting(saved())
    assert not fitting({**saved(), "host": "node17"})


@pytest.mark.parametrize(
    ("file", "command"),
    [("train.py", ["train.py"]), ("code/train.py", [sys.executable, "-m", "code.train"]), ("./run", ["./run"])],
    ids=["script", "module", "program"],
)
def test_a_script_that_was_changed_is_another_measurement(start, capsys, file, command):
    start(Machine(amdahl))
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("#!/bin/sh")
    Path(file).chmod(0o755)
    words = ["bench", "scaling", "-n", "1,2", "--repeats", "1", "-o", "results.json", "--", *command]
    assert cli.run(words) == 0 and cli.run(words) == 0
    Path(file).write_text("changed = True")
    assert cli.run(words) == 2
    assert "measurements with script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"), [(999.7, "1000"), (999.4, "999"), (0.5, "0.5"), (0.0001234, "1.23e-04")], ids=str
)
def test_numbers_of_a_thousand_have_no_exponent(value, shown):
    assert interval_text(Estimate(value)) == shown


def test_long_steps_and_long_titles_are_shown_as_they_are(start, capsys):
    machine = start(Machine(lambda n: 12.5 / n, noise=0.0))
    machine.marks = True
    assert bench("--weak", "--repeats", "1", ranks="1") == 0
    out = capsys.readouterr().out
    assert "e+0" not in out, out
    assert "12500" in out
    assert "Weak scaling, by the time of a step; medians with 95% intervals\n" in out


def test_hosts_and_the_home_directory_are_not_told(start, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "mallory"))
    start(Machine(amdahl))
    assert bench("--hosts", "gandalf:2,saruman:2", "--env", f"DATA={tmp_path}/mallory/data", "--repeats", "1") == 0
    text = Path("results.json").read_text()
    assert not any(name in text for name in ("gandalf", "saruman", "mallory"))
    assert "host1:2,host2:2" in text and "~/data" in text


def test_json_is_the_summary_and_the_table_says_the_same(start, capsys):
    start(Machine(amdahl))
    assert bench("--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert cli.run(["bench", "show", "results.json"]) == 0
    assert f"{summary['rows'][2]['speedup']['value']:.3g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1,x", "-o", "r.json", "train.py"], "whole numbers above 0"),
        (["-n", "0", "-o", "r.json", "train.py"], "whole numbers above 0"),
        (["-n", "1,2", "-o", "no/such/r.json", "train.py"], "does not exist"),
        (["-n", "1,2", "-o", ".", "train.py"], "is a directory"),
        (["-n", "1,2", "-o", "r.json", "missing.py"], "missing.py"),
        (["-n", "1,2", "-o", "r.json"], "COMMAND"),
        (["-n", "1,2", "-o", "train.py", "train.py"], "is not a file of 'hvdkit bench scaling'"),
    ],
)
def test_mistakes_are_one_sentence(start, capsys, words, said):
    machine = start(Machine(amdahl))
    assert cli.run(["bench", "scaling", *words]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    assert machine.ran == []


def test_too_few_steps_are_said(start, capsys):
    machine = start(Machine(amdahl))
    machine.count = lambda n: 4
    assert bench() == 1
    assert "took 4 steps, of which 5 are warm-up" in capsys.readouterr().err


def test_ranks_that_are_missing_are_said(start, capsys):
    machine = start(Machine(amdahl))
    write = machine._write
    machine._write = lambda directory, rank, *more: rank == 0 and write(directory, rank, *more)
    assert bench() == 1
    assert any(
        "of 2 ranks" in (job.failure or "")
        for job in json_files.read(Path("results.json"), results.ScalingResults).jobs
    )


def test_two_points_that_no_law_passes_through_are_not_said_to_be_fitted_exactly(start, capsys):
    start(Machine(lambda n: 0.01 * n, noise=0.001))
    assert bench(ranks="1,2") == 0
    (fit,) = saved()["summary"]["fits"]
    assert not fit["exact"] and abs(fit["residuals"]["2"]) > 0.1
    assert "passes through them" not in capsys.readouterr().out
