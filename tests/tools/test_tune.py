"""``hvdkit tune`` on jobs that are only numbers: what it finds, what it does not take for a gain, what it writes."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scipy import stats

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.model import Horovod, LaunchFacts, Mpi
from hvdkit.jobs.launch.tuned import MIB, Tuned, TunedFile
from hvdkit.jobs.trials import DEFAULT, Launch, TrialJob
from hvdkit.jobs.tune.cli import save, text, verdict
from hvdkit.jobs.tune.search import CLOSING_LINE, WALL_TIME, Search, candidates, label, speedup, thread_choices

AXES = {
    "launcher": ["horovodrun"],
    "threads": [1],
    "cycle_time_s": [0.0001, 0.0005, 0.005],
    "fusion_threshold_bytes": [4 * MIB, 32 * MIB],
}
FAST = Tuned(cycle_time_s=0.0005)
SLOW_START_S = 4.0


class Machine:
    """Runs jobs of known mean times on a clock of its own, with noise, and growing slower as it goes."""

    def __init__(self, seed, seconds=None, noise=0.05, spikes=0.0, drift=0.0, fails=(), closing=True):
        self.rng = np.random.default_rng([seed, 1])
        self.seconds = seconds or {}
        self.noise, self.spikes, self.drift = noise, spikes, drift
        self.fails, self.closing = fails, closing
        self.fails_from = 1
        self.now, self.ran, self.interrupt_at = 0.0, [], None

    def clock(self):
        return self.now

    def run(self, setting, timeout_s):
        self.ran.append(setting)
        if len(self.ran) == self.interrupt_at:
            raise KeyboardInterrupt
        seconds = self.seconds.get(setting, 10.0) * math.exp(
            self.rng.normal(0, self.noise) + self.drift * len(self.ran)
        )
        if self.rng.random() < self.spikes:
            seconds *= 3
        self.now += seconds + SLOW_START_S
        if setting in self.fails and self.ran.count(setting) >= self.fails_from:
            return TrialJob(seconds, failure="exited with status 3; its last lines:\nValueError: too few threads")
        return TrialJob(seconds + SLOW_START_S, seconds if self.closing else None)


def search(machine, seed=0, settings=None, **options):
    rng = np.random.default_rng(seed)
    settings = candidates(AXES, 8, rng) if settings is None else settings
    return Search(settings, machine.run, rng=rng, clock=machine.clock, **options)


def searched(machine, seed=0, **options):
    found = search(machine, seed, **options)
    found.go()
    return found


# What it finds


@pytest.mark.parametrize("drift", [0.0, 0.02], ids=["steady", "growing slower"])
def test_it_finds_the_faster_setting(drift):
    found = [searched(Machine(seed, {FAST: 8.0}, drift=drift), seed).best() for seed in range(20)]
    assert found.count(FAST) >= 18


def test_the_speedup_that_it_tells_is_the_injected_one():
    found = searched(Machine(1, {FAST: 5.0}, noise=0.01))
    confirmed = found.confirmed()[FAST]
    assert confirmed.low < 2.0 < confirmed.high
    assert confirmed.high - confirmed.low < 0.2


@pytest.mark.parametrize(
    "noise", [{"noise": 0.05}, {"noise": 0.3}, {"noise": 0.02, "spikes": 0.1}, {"noise": 0.05, "drift": 0.02}], ids=str
)
def test_noise_alone_is_adopted_in_fewer_than_one_of_twenty_searches(noise):
    trials = 200
    adopted = [searched(Machine(seed, **noise), seed).best() is not None for seed in range(trials)]
    assert sum(adopted) <= 0.05 * trials


def test_a_slower_setting_is_never_adopted_and_the_sentence_says_so():
    slow = [FAST, Tuned(threads=1)]
    found = searched(Machine(0, dict.fromkeys(slow, 20.0)), settings=slow)
    assert found.best() is None
    assert "No setting is better than the default beyond noise" in verdict(found)


def test_settings_that_are_slower_beyond_noise_get_no_fresh_runs():
    machine = Machine(0, dict.fromkeys(candidates(AXES, 8, np.random.default_rng(0)), 20.0))
    found = searched(machine)
    assert found.finalists == ()
    assert len(machine.ran) == found.jobs - 3 * 8 == 1 + 9 * 4
    assert "Every setting was slower than the default" in verdict(found)


def test_a_lucky_default_in_the_runs_that_select_does_not_hide_a_gain():
    machine = Machine(0, {FAST: 8.0}, noise=0.02)
    whole = machine.run

    def run(setting, timeout_s):
        job = whole(setting, timeout_s)
        lucky = setting == DEFAULT and machine.ran.count(DEFAULT) == 3
        return replace(job, closing_s=job.closing_s / 10) if lucky else job

    machine.run = run
    found = searched(machine)
    assert found.screening.ratio(FAST) < 1
    assert found.best() == FAST


def test_every_round_has_the_default_and_its_own_order():
    machine = Machine(0, {FAST: 8.0})
    searched(machine)
    first, second = machine.ran[1:10], machine.ran[10:19]
    assert set(first) == set(second) == {DEFAULT, *candidates(AXES, 8, np.random.default_rng(0))}
    assert first != second


def test_wall_time_is_compared_where_there_is_no_closing_line():
    assert searched(Machine(0, {FAST: 5.0}, closing=False)).measure == WALL_TIME
    assert searched(Machine(0, {FAST: 5.0})).measure == CLOSING_LINE


# Failures


def test_a_setting_whose_job_fails_is_dropped_and_told_with_its_last_lines():
    machine = Machine(0, {FAST: 8.0}, noise=0.01, fails=[Tuned(threads=1)])
    found = searched(machine)
    assert machine.ran.count(Tuned(threads=1)) == 1
    assert found.best() == FAST
    assert "1 thread" in text(found, SUBJECT)
    assert "ValueError: too few threads" in text(found, SUBJECT)


def test_a_failing_default_ends_it_with_the_reason():
    machine = Machine(0, fails=[DEFAULT])
    with pytest.raises(LaunchError, match=r"default settings the job fails.*\n.*too few threads"):
        searched(machine)
    assert machine.ran == [DEFAULT]


def test_a_default_that_fails_later_ends_it_too():
    machine = Machine(0, fails=[DEFAULT])
    machine.fails_from = 5
    with pytest.raises(LaunchError, match="too few threads"):
        searched(machine)
    assert machine.ran.count(DEFAULT) == 5


@pytest.mark.parametrize("fails_from", [2, 10], ids=["in the runs that select", "in the fresh runs"])
def test_a_setting_that_fails_once_is_not_adopted_however_fast(fails_from):
    machine = Machine(0, {FAST: 5.0}, fails=[FAST])
    machine.fails_from = fails_from
    found = searched(machine)
    assert machine.ran.count(FAST) == fails_from
    assert FAST in found.failures
    assert found.best() != FAST
    assert FAST not in found.confirmed()
    assert (FAST in found.finalists) == (fails_from == 10)


def test_all_settings_failing_leaves_the_defaults():
    found = searched(Machine(0, fails=candidates(AXES, 8, np.random.default_rng(0))))
    assert found.best() is None
    assert "Every setting but the default failed" in verdict(found)


def test_a_setting_that_loses_the_closing_line_is_dropped():
    machine = Machine(0)
    whole = machine.run
    machine.run = lambda setting, timeout_s: replace(
        whole(setting, timeout_s), closing_s=None if setting == FAST else 10.0
    )
    assert "no closing line" in searched(machine).failures[FAST]


def test_a_slow_first_job_does_not_use_up_the_budget():
    machine = Machine(0, {FAST: 5.0}, noise=0.01)
    whole = machine.run

    def run(setting, timeout_s):
        job = whole(setting, timeout_s)
        return replace(job, wall_s=job.wall_s * 10) if len(machine.ran) == 1 else job

    machine.run = run
    found = searched(machine, budget_s=1000)
    assert found.best() == FAST
    assert not found.budget_ended


def test_a_job_that_hangs_is_given_a_limit():
    limits = []
    machine = Machine(0)
    whole = machine.run
    machine.run = lambda setting, timeout_s: limits.append(timeout_s) or whole(setting, timeout_s)
    searched(machine)
    assert limits[0] is None
    assert all(100 < limit < 200 for limit in limits[1:])


# Ends


def test_ctrl_c_keeps_what_was_measured():
    machine = Machine(0, {FAST: 5.0}, noise=0.01)
    machine.interrupt_at = 25
    found = search(machine)
    with pytest.raises(KeyboardInterrupt):
        found.go()
    setting, ratio = found.leader()
    assert setting == FAST
    assert ratio == pytest.approx(2.0, rel=0.1)
    assert "Best so far, unconfirmed: cycle 0.5 ms" in verdict(found, interrupted=True)


@pytest.mark.parametrize("interrupt_at", [1, 2, 3])
def test_ctrl_c_before_anything_can_be_compared(interrupt_at):
    machine = Machine(0)
    machine.interrupt_at = interrupt_at
    found = search(machine)
    with pytest.raises(KeyboardInterrupt):
        found.go()
    assert text(found, SUBJECT, interrupted=True).startswith("Verdict: Interrupted")


@pytest.mark.parametrize("budget_s", [20, 100, 400, 700, 1e6])
def test_the_budget_is_kept(budget_s):
    machine = Machine(0, {FAST: 5.0}, noise=0.01)
    found = searched(machine, budget_s=budget_s)
    assert machine.now <= budget_s * 1.05
    assert found.budget_ended == (budget_s < 1e6)
    text(found, SUBJECT)
    if budget_s >= 400:
        assert found.best() == FAST
    if budget_s == 20:
        assert verdict(found).startswith("Could not tell: the budget was up before")


def test_a_search_that_is_cut_short_could_not_tell():
    """One pair of fresh runs says nothing of the noise: neither that a setting is better nor that none is."""
    found = search(Machine(0), settings=[FAST])
    found.finalists, found.measure, found.budget_ended = (FAST,), CLOSING_LINE, True
    found.confirming.append({DEFAULT: 10.0, FAST: 8.0})
    said = verdict(found)
    assert said.startswith("Could not tell: one pair of fresh runs of") and "No setting is better" not in said
    assert "cycle 0.5 ms, 1.250 times as fast" in said
    found.budget_ended = False
    assert verdict(found) == said, "with --confirmations 1, too"


# Statistics


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=20), st.floats(0.5, 0.999))
def test_the_interval_is_students(pairs, confidence):
    logs = np.log([default / other for default, other in pairs])
    found = speedup(pairs, confidence)
    assert found.low <= found.ratio * (1 + 1e-12) and found.ratio <= found.high * (1 + 1e-12)
    if np.std(logs) > 1e-6:
        with np.errstate(over="ignore"):
            low, high = np.exp(stats.t.interval(confidence, len(logs) - 1, np.mean(logs), stats.sem(logs)))
        assert found.low == pytest.approx(low, rel=1e-6)
        assert found.high == pytest.approx(high, rel=1e-6)


def test_one_pair_says_nothing_about_the_noise():
    assert (speedup([(2.0, 1.0)], 0.95).low, speedup([(2.0, 1.0)], 0.95).high) == (0.0, math.inf)


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(math.nan, 1.0)], [(1.0, math.inf)]])
def test_times_that_cannot_be_are_refused(pairs):
    with pytest.raises(InvalidArgumentError, match="above 0"):
        speedup(pairs, 0.95)


def test_the_intervals_of_two_finalists_hold_together():
    found = searched(Machine(0, {FAST: 5.0}))
    assert len(found.finalists) == 2
    assert found.confirmed()[FAST] == speedup(found.confirming.pairs(FAST), 0.975)


# Settings


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 8), max_size=3),
    st.lists(st.floats(0, 100), max_size=3),
    st.lists(st.integers(0, 2**30), max_size=3),
)
def test_candidates_differ_from_one_another_and_from_the_default(limit, threads, cycles, sizes):
    axes = {"launcher": ["horovodrun"], "threads": threads, "cycle_time_s": cycles, "fusion_threshold_bytes": sizes}
    found = candidates(axes, limit, np.random.default_rng(0))
    assert 1 <= len(found) <= limit
    assert len(set(found)) == len(found)
    assert DEFAULT not in found
    alone = 1 + len(set(threads)) + len(set(cycles)) + len(set(sizes))
    assert sum(len(json_files.plain(setting)) == 1 for setting in found) == min(limit, alone)


def test_a_setting_becomes_options_of_launch_in_the_units_of_horovod():
    setting = Tuned("horovodrun", 2, 0.0005, 4 * MIB)
    assert Launch(4, ["train.py", "--lr", "1"], ["--ppn", "2"]).argv(setting)[1:] == [
        "-P", "-m", "hvdkit.cli", "launch", "-n", "4", "--no-tag", "--ppn", "2", "--launcher", "horovodrun",
        "--threads", "2", "--env", "HOROVOD_CYCLE_TIME=0.5", "--env", "HOROVOD_FUSION_THRESHOLD=4194304", "--",
        "train.py", "--lr", "1",
    ]  # fmt: skip
    assert Launch(1, ["x"]).argv(DEFAULT)[1:] == ["-P", "-m", "hvdkit.cli", "launch", "-n", "1", "--no-tag", "--", "x"]
    assert label(setting) == "horovodrun, 2 threads, cycle 0.5 ms, fusion 4 MiB"
    assert label(DEFAULT) == "default"


@pytest.mark.parametrize(
    ("share", "current", "choices"),
    [(1, 1, ()), (8, 8, (4, 7)), (2, 1, (2,)), (3, 3, (1, 2)), (4, None, (2, 3, 4)), (None, 1, ())],
)
def test_threads_worth_trying(share, current, choices):
    assert thread_choices(share, current) == choices


# The file

SUBJECT = "2 ranks of: train.py\ndefault: mpirun, OMP_NUM_THREADS=1"


@pytest.mark.parametrize("launcher", [None, "horovodrun"])
def test_the_file_is_one_that_launch_takes(tmp_path, launcher):
    file = tmp_path / "tuned.json"
    found = searched(Machine(0, {FAST: 5.0}))
    said = text(found, SUBJECT)
    save(file, found, said, launcher)
    assert json_files.read(file, TunedFile).settings == structs.replace(FAST, launcher=launcher)
    assert json.loads(file.read_text())["measured"] == said.splitlines()


def test_without_a_gain_the_file_changes_nothing(tmp_path):
    file = tmp_path / "tuned.json"
    found = searched(Machine(0))
    assert found.best() is None
    save(file, found, "", "horovodrun")
    assert json_files.read(file, TunedFile).settings == Tuned()


# One job


def python_job(tmp_path, monkeypatch, text, n=2):
    """A ``Launch`` whose ``hvdkit launch`` is a script of its own."""
    (tmp_path / "job.py").write_text(text)
    monkeypatch.setattr(Launch, "argv", lambda self, setting: [sys.executable, str(tmp_path / "job.py")])
    return Launch(n, ["train.py"])


def test_the_last_closing_line_is_read(tmp_path, monkeypatch):
    text = "print('Hvd Procs 2 Total time: 9 second\\nx\\nHvd Procs 2 Total time: 2.5e-01 second\\nbye')"
    assert python_job(tmp_path, monkeypatch, text)(DEFAULT, 60).closing_s == 0.25


@pytest.mark.parametrize(("said", "seconds"), [(" 12.5", 12.5), ("1.2E+01", 12), (".5", 0.5), ("1e999", 7), ("nan", 7)])
def test_a_time_is_read_as_pythons_and_fortrans_programs_print_it(tmp_path, monkeypatch, said, seconds):
    text = f"print('Hvd Procs 2 Total time: 7 second\\nHvd Procs 2 Total time: {said} second')"
    assert python_job(tmp_path, monkeypatch, text)(DEFAULT, 60).closing_s == seconds


def test_ranks_that_formed_no_single_job_count_as_failed(tmp_path, monkeypatch):
    job = python_job(tmp_path, monkeypatch, "print('Hvd Procs 1 Total time: 9 second')")(DEFAULT, 60)
    assert "'Hvd Procs 1', not 2" in job.failure


def test_the_reason_of_a_failure_is_its_last_lines(tmp_path, monkeypatch):
    text = "import sys\nfor i in range(99): print(i, flush=True)\nsys.exit('out of memory')"
    job = python_job(tmp_path, monkeypatch, text)(DEFAULT, 60)
    assert job.failure.startswith("exited with status 1")
    assert job.failure.endswith("98\nout of memory")
    assert len(job.failure.splitlines()) == 9


@pytest.mark.slow
def test_a_job_over_its_time_is_ended(tmp_path, monkeypatch):
    text = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    job = python_job(tmp_path, monkeypatch, text)(DEFAULT, 2)
    assert "was ended after 2 seconds" in job.failure
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# As it is typed


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """4 cores, Open MPI and horovodrun, train.py; ``machine.run`` runs the jobs."""
    (tmp_path / "train.py").touch()
    found = LaunchFacts(
        4, False, Path("/venv/bin/python"), os.environ["PATH"], Horovod(mpi=True, gloo=True),
        Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)), Path("/venv/bin/horovodrun"),
    )  # fmt: skip
    here = Machine(0, noise=0.01)
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    monkeypatch.setattr(Launch, "__call__", lambda self, setting, timeout_s: here.run(setting, timeout_s))
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME"):
        monkeypatch.delenv(name, raising=False)
    return here


def test_tune_adopts_and_writes(machine, capsys):
    machine.seconds = {FAST: 7.0}
    assert cli.run(["tune", "-n", "2", "-o", "tuned.json", "--", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert "Adopted: cycle 0.5 ms" in out
    assert "--tuned tuned.json" in err
    assert json_files.read(Path("tuned.json"), TunedFile).settings.cycle_time_s == 0.0005
    assert Tuned(launcher="horovodrun") in machine.ran
    assert Tuned(threads=1) in machine.ran


def test_a_fixed_launcher_is_the_only_one(machine):
    assert cli.run(["tune", "-n", "2", "--launcher", "horovodrun", "train.py"]) == 0
    assert {setting.launcher for setting in machine.ran} == {None}


def test_what_is_named_is_what_is_tried(machine):
    words = ["--threads", "3", "--cycle-times-ms", "", "--fusion-thresholds-mb", "0.5", "--launcher", "mpirun"]
    assert cli.run(["tune", "-n", "2", *words, "train.py"]) == 0
    fusion = Tuned(fusion_threshold_bytes=MIB // 2)
    assert set(machine.ran) == {DEFAULT, Tuned(threads=3), fusion, structs.replace(fusion, threads=3)}


def test_ctrl_c_writes_no_file(machine, capsys):
    machine.interrupt_at = 30
    assert cli.run(["tune", "-n", "2", "-o", "tuned.json", "train.py"]) == 130
    assert not Path("tuned.json").exists()
    assert "Interrupted" in capsys.readouterr().out


def test_a_failing_job_is_one_message_and_status_1(machine, capsys):
    machine.fails = [DEFAULT]
    assert cli.run(["tune", "-n", "2", "-o", "tuned.json", "train.py"]) == 1
    _, err = capsys.readouterr()
    assert "too few threads" in err and "Traceback" not in err
    assert not Path("tuned.json").exists()


def test_more_ranks_than_cores_is_said(machine, capsys):
    assert cli.run(["tune", "-n", "5", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert "5 ranks share 4 cores" in out
    assert "5 ranks share 4 cores" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "missing.py"),
        ([], "hvdkit tune -n 2 -- python train.py"),
        (["--cycle-times-ms", "fast", "train.py"], "commas"),
        (["--threads", "0", "train.py"], "1 or more"),
        (["--budget", "-1", "train.py"], "above 0"),
        (["-o", "no/such/tuned.json", "train.py"], "does not exist"),
        (["-o", ".", "train.py"], "is a directory"),
        (["--env", "X", "train.py"], "NAME=VALUE"),
        (["--env", "HOROVOD_AUTOTUNE=1", "train.py"], "HOROVOD_AUTOTUNE=1"),
        (["--confirmations", "1", "train.py"], "confirmations"),
        (["--launcher", "mpirun", "--threads", "", "--cycle-times-ms", "", "--fusion-thresholds-mb", "", "train.py"],
         "nothing to try"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_sentence_before_anything_runs(machine, capsys, words, said):
    assert cli.run(["tune", "-n", "2", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
    assert machine.ran == []
