"""``hvdkit diff``: what changed between two recordings of one kind, what explains it, and what is refused."""

import json

import emulate_results
import explain_jobs
import mpi_profile_files
import numpy as np
import pytest
import timeline_files
import trace_files
from msgspec.structs import replace

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import DataError, DataNotFoundError, InvalidArgumentError
from hvdkit.measure.bench import results as bench
from hvdkit.measure.bench.results import Environment, JobSteps, Parts, ScalingAsked
from hvdkit.read.diff.cli import compare
from hvdkit.read.explain.sources import JobLaunch


def timeline(path, seed, collective, steps=40, negotiate=200, first=None, repeated=True):
    """``collective``: tensor to the typical microseconds of its collective."""
    rng = np.random.default_rng(seed)
    names = list(collective) if repeated else [f"{name}.{step}" for step in range(steps) for name in collective]
    events, now = timeline_files.metadata(names), 1000
    for step in range(steps):
        for at, typical in enumerate(collective.values(), start=1):
            waited, took = (int(mean * rng.lognormal(0, 0.1)) for mean in (negotiate, typical))
            took = first if first and not step else took
            events += timeline_files.allreduce(at if repeated else step * len(collective) + at, now, waited, took)
            now += 2000 + waited + took
    return timeline_files.write(path, events)


def trace(path, multiply, steps=6, extra=()):
    """Each step: 2 ms loading, ``multiply[i]`` ms of aten::mm, an allreduce of 10 ms."""
    events = []
    for number in range(steps):
        at, length = 100 * number, multiply[number % len(multiply)]
        events += [trace_files.step(number + 3, at, 40 + length), trace_files.data(at, 2)]
        events += [trace_files.event("aten::mm", at + 2, length), trace_files.gloo(at + 25 + length, 10)]
        events += [trace_files.event(name, at + 36 + length, 1) for name in extra]
    return trace_files.write(path, *events, rank=0)


def job(folder, slow=0.0, steps=60, cores=4, slow_input=0.0):
    """A folder of ``launch --explain-job``: rank 1 computes ``slow`` seconds longer, rank 0 waits for its input."""
    rng = np.random.default_rng(steps)
    (folder / "steps").mkdir(parents=True)
    lines = [[json.dumps({"hvdkit": "step times", "version": 1, "rank": rank, "host": 7})] for rank in (0, 1)]
    now = 0.0
    for _ in range(steps):
        ready = []
        for rank in (0, 1):
            given = now + 1e-3 + (slow_input if rank == 0 else 0.0)
            ready.append((given, given + 0.02 * rng.uniform(1, 1.05) + (slow if rank == 1 else 0.0)))
        end = max(one for _, one in ready) + 0.003
        for rank, (given, there) in enumerate(ready):
            lines[rank].append(json.dumps([now, given, there, end]))
        now = end
    for rank, text in enumerate(lines):
        (folder / "steps" / f"rank-{rank}.jsonl").write_text("\n".join(text) + "\n")
    json_files.write(folder / "launch.json", JobLaunch(2, "mpirun", cores, 2, 1, {"HOROVOD_CYCLE_TIME": str(cores)}))
    return folder


def monitored(folder, wait=0.001, windows=8):
    folder.mkdir()
    lines = [{"kind": "start", "time": 1.0, "schema": 1, "world_size": 2, "step": 0}]
    for number in range(windows):
        jitter = 1e-5 * (number % 3)
        ranks = {"step": [0.02 + wait + jitter] * 2, "input": [0.001] * 2, "compute": [0.019 + jitter] * 2}
        ranks |= {"wait": [wait, None], "rss": [1, 1], "device": [None, None]}
        lines.append({"kind": "window", "time": 2.0 + number, "step": number, "steps": 10, "ranks": ranks, "logs": {}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "win')
    return folder


def benched(path, seconds, noise=0.01, repeats=5, mode="strong", asked=(), parts=None):
    """``seconds``: number of ranks to seconds of all the work; ``parts``: of a step of 10, with as many seconds."""
    rng = np.random.default_rng([repeats, len(path.name)])
    jobs = []
    for n, mean in seconds.items():
        for repeat in range(repeats):
            took = float(mean * np.exp(rng.normal(0, noise)))
            steps = None
            if parts is not None:
                each = Parts(0.0, parts["input"], took / 10 - sum(parts.values()), parts["communication"], 0.0)
                steps = JobSteps(10, took / 10, 1.0, took / 10, each)
            jobs.append(bench.MeasuredJob(n, repeat, 1.0, took, steps))
    environment = Environment("1", "3.11", "Linux", {}, 4)
    question = ScalingAsked(("train.py",), (), tuple(sorted({*seconds, *asked})), mode, repeats)
    json_files.write(path, bench.ScalingResults(question, environment, (), (), jobs))
    return path


def emulated(path, *args, environment=emulate_results.ENVIRONMENT, **options):
    json_files.write(path, emulate_results.made(*args, environment=environment, **options))
    return path


def changes(found, level):
    return {one.what: one for one in found.changes if one.level == level}


# What explains a change


def test_of_timelines_the_step_its_parts_and_the_phase_that_became_slower(tmp_path):
    a = timeline(tmp_path / "a.json", 1, {"small": 100, "large": 1000})
    b = timeline(tmp_path / "b.json", 2, {"small": 100, "large": 2000})
    found = compare(a, b)
    assert found.of == "timeline"
    whole = changes(found, "whole")["step"]
    assert whole.sure and whole.explains_s == pytest.approx(1e-3, rel=0.1)
    assert whole.before.value == pytest.approx(5.5e-3, rel=0.05)
    parts = changes(found, "part")
    assert parts["collectives"].sure and not parts["negotiation"].sure
    assert sum(one.explains_s for one in parts.values()) == pytest.approx(whole.explains_s)
    detail = next(one for one in found.changes if one.level == "detail")
    assert (detail.what, detail.sure, detail.calls_after) == ("collective of large", True, 1)
    assert detail.explains_s == pytest.approx(1e-3, rel=0.1)
    assert [one.what for one in changes(found, "detail").values() if one.sure] == ["collective of large"]
    assert "collectives (+" in found.verdict and "most of all collective of large (+" in found.verdict
    back = compare(b, a)
    assert changes(back, "whole")["step"].speed.low > 1 and "collectives (-" in back.verdict


def test_chance_among_many_comparisons_is_not_called_a_change(tmp_path):
    names = {f"t{number}": 500 for number in range(100)}
    files = [timeline(tmp_path / f"{seed}.json", seed, names, steps=12) for seed in (3, 4)]
    found = compare(*files)
    assert len(changes(found, "detail")) == 200
    assert not any(one.sure for one in changes(found, "detail").values())
    same = compare(files[0], files[0])
    assert all(one.explains_s == 0 and not one.sure for one in same.changes) and same.verdict.endswith("chance.")


def test_the_first_step_explains_nothing(tmp_path):
    a = timeline(tmp_path / "a.json", 7, {"t": 1000})
    b = timeline(tmp_path / "b.json", 7, {"t": 1000}, first=500_000)
    assert all(one.explains_s == pytest.approx(0, abs=1e-9) for one in compare(a, b).changes)


def test_timelines_of_other_tensors_and_without_steps(tmp_path):
    steps = timeline(tmp_path / "a.json", 1, {"t": 100, "gone": 100})
    none = timeline(tmp_path / "b.json", 1, {"t": 100}, repeated=False)
    found = compare(steps, timeline(tmp_path / "c.json", 1, {"t": 100, "new": 100}))
    gone, new = (changes(found, "detail")[f"collective of {name}"] for name in ("gone", "new"))
    assert (gone.after, gone.sure, new.before) == (None, None, None)
    assert gone.explains_s < 0 < new.explains_s == pytest.approx(1e-4, rel=0.2)
    with pytest.raises(DataError, match=r"no steps in .*b\.json"):
        compare(steps, none)


def test_of_traces_the_operator_and_what_communication_exposes(tmp_path):
    a, b = trace(tmp_path / "a.json", [20, 21]), trace(tmp_path / "b.json", [30, 31], steps=7, extra=["new"])
    found = compare(a, b)
    assert "computation (+" in found.verdict and "operator aten::mm (+" in found.verdict
    parts, details = changes(found, "part"), changes(found, "detail")
    assert parts["computation"].sure and parts["exposed communication"].explains_s == pytest.approx(0)
    assert parts["data loading"].before.value == pytest.approx(2e-3)
    assert details["operator aten::mm"].explains_s == pytest.approx(9.93e-3, abs=1e-4)
    assert details["operator new"].before is None and details["operator new"].calls_after == 1
    (tmp_path / "two").mkdir()
    for rank in (0, 1):
        trace(tmp_path / "two" / f"trace-{rank}-of-2.json", [20])
    assert "Of 2 traces" in " ".join(compare(tmp_path / "two", a).notes)


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "one validation"])
def test_a_pause_between_steps_is_no_allreduce(tmp_path, ready):
    """Also where one step, a validation, says nothing of its gradients: then the others' parts are still told."""
    healthy, paused = explain_jobs.Job(), explain_jobs.Job()
    explain_jobs.pause_of_all(paused)
    for name, one in (("a", healthy), ("b", paused)):
        one.exact = True
        one.write(tmp_path / name)
        for path in (tmp_path / name / "steps").iterdir() if not ready else ():
            *lines, last, cores = path.read_text().splitlines()
            asked, given, _, *more = json.loads(last)
            path.write_text("\n".join([*lines, json.dumps([asked, given, None, *more]), cores, ""]))
    parts = changes(compare(tmp_path / "a", tmp_path / "b"), "part")
    assert parts["between steps"].explains_s == pytest.approx((4 if ready else 3) / 195, rel=0.02)
    assert all(abs(one.explains_s) < 1e-4 for name, one in parts.items() if name != "between steps")
    assert {"wait for slower ranks", "allreduce and update"} <= parts.keys()


def test_of_mpi_profiles_the_routine_by_medians_over_the_ranks(tmp_path):
    def profile(name, seconds, size=2, elapsed=10.0):
        calls = [[mpi_profile_files.group("MPI_Allreduce", (10, 1000, each), op="MPI_SUM")] for each in seconds]
        ranks = [mpi_profile_files.record(rank, size, one, seconds=elapsed) for rank, one in enumerate(calls)]
        return mpi_profile_files.write(tmp_path / name, *ranks)

    a, b = profile("a", (0.1, 0.3)), profile("b", (0.3, 0.5), elapsed=12.0)
    found = compare(a, b)
    row = changes(found, "detail")["MPI_Allreduce, payload"]
    assert (row.before.value, row.after.value) == (pytest.approx(2), pytest.approx(4))
    assert (row.calls_before, row.calls_after, row.sure) == (10, 10, None)
    assert found.verdict.startswith("The job takes 10.0 s in A and 12.0 s in B (+20%): payload in MPI (+2.00 s)")
    other = compare(a, profile("c", (0.1,), size=3))
    assert "Different ranks: 2 before, 3 after." in other.notes
    assert any("2 of 3 ranks left no record: 1, 2." in note for note in other.notes)


def test_of_step_times_the_part_and_the_rank(tmp_path):
    a, b = job(tmp_path / "a"), job(tmp_path / "b", slow=0.01, steps=80, cores=8)
    found = compare(a, b)
    assert found.of == "step times"
    parts = changes(found, "part")
    assert parts["computation"].explains_s == pytest.approx(5e-3, rel=0.1)
    assert parts["wait for slower ranks"].explains_s == pytest.approx(5e-3, rel=0.1)
    assert sum(one.explains_s for one in parts.values()) == pytest.approx(found.changes[0].explains_s)
    assert "most of all own time of rank 1 (+" in found.verdict
    assert changes(found, "whole")["step"].explains_s == pytest.approx(1e-2, rel=0.1)
    assert "Different HOROVOD_CYCLE_TIME: 4 before, 8 after." in found.notes
    assert not any("ranks" in note for note in found.notes)
    slow = compare(a, job(tmp_path / "c", slow_input=0.01))
    assert "own time of rank 0" in slow.verdict and changes(slow, "part")["input"].sure
    assert changes(compare(a, job(tmp_path / "d", steps=61)), "whole")["step"].sure is False


def test_of_a_monitors_history(tmp_path):
    found = compare(monitored(tmp_path / "a"), monitored(tmp_path / "b", wait=0.006) / "metrics.jsonl")
    assert found.of == "monitor history" and found.a.says == "7 windows after the first, 2 ranks"
    assert found.changes[0].before.value == pytest.approx(0.021, rel=0.01)
    assert "wait for slower ranks, and allreduce (+5.00 ms)" in found.verdict
    with pytest.raises(DataError, match="fewer than two windows"):
        compare(tmp_path / "a", monitored(tmp_path / "c", windows=1))


def test_what_another_job_left_further_below_is_not_compared(tmp_path):
    a, b = monitored(tmp_path / "a"), monitored(tmp_path / "b", wait=0.006)
    for side in (a, b):
        monitored(side / "run2")
    assert compare(a, b).changes == compare(a / "metrics.jsonl", b / "metrics.jsonl").changes


def test_of_bench_results_the_part_at_the_largest_number_of_ranks(tmp_path):
    a = benched(tmp_path / "a.json", {1: 4.0, 2: 2.0}, parts={"input": 0.01, "communication": 0.02})
    b = benched(tmp_path / "bb.json", {1: 4.0, 2: 3.0}, parts={"input": 0.01, "communication": 0.12})
    found = compare(a, b)
    assert found.verdict.startswith("The work on 2 ranks takes 2.")
    assert "communication (+1.00 s)" in found.verdict
    assert changes(found, "whole")["work on 1 rank"].explains_s == pytest.approx(0, abs=0.2)


def test_of_emulations_sizes_steps_and_the_wait_for_the_last_rank(tmp_path):
    a = emulated(tmp_path / "a.json", {400: 0.1, 800: 0.3}, 12, 0.01)
    found = compare(a, emulated(tmp_path / "b.json", {400: 0.1, 800: 0.1}, 12, 0.01, seed=1))
    whole = changes(found, "whole")
    assert list(whole) == ["allreduce of 400 bytes", "allreduce of 800 bytes", "step of 2 allreduces, 1.20 kB"]
    assert [one.speed.value for one in whole.values()] == pytest.approx([1, 3, 2], rel=0.05)
    assert changes(found, "part")["transfer"].explains_s == pytest.approx(0.9 * -0.2, rel=0.05)
    fused = compare(a, emulated(tmp_path / "d.json", {400: 0.1, 800: 0.3}, 12, 0.01, fusion=True))
    after = changes(fused, "whole")["step of 2 allreduces, 1.20 kB"].after
    assert after.value == pytest.approx(0.3, rel=0.05), "fused collectives are under way at the same time"
    other = compare(a, emulated(tmp_path / "c.json", {800: 0.1, 1600: 1.0}))
    assert list(changes(other, "whole")) == ["allreduce of 800 bytes"]
    assert "Only in B: allreduce of 1600 bytes, step of 2 allreduces, 2.40 kB." in other.notes


# When it fails


@pytest.mark.parametrize(
    ("after", "noise", "below"),
    [
        ({1: 4.0, 2: 2.0}, 0.01, ()),
        ({1: 4.0, 2: 2.5}, 0.01, ("work (closing line) on 2 ranks",)),
        ({1: 4.0, 2: 2.02}, 0.005, ()),
        ({1: 3.0, 2: 1.5}, 0.01, ()),
    ],
    ids=["the same", "slower on 2 ranks", "hardly slower", "faster"],
)
def test_it_fails_when_the_second_is_slower_beyond_noise(tmp_path, after, noise, below):
    a, b = benched(tmp_path / "a.json", {1: 4.0, 2: 2.0}, noise), benched(tmp_path / "bb.json", after, noise)
    assert compare(a, b, 0.95).below == below and compare(a, b).below == ()


def test_single_repeats_are_compared_by_their_value(tmp_path):
    a, b = (benched(tmp_path / name, {2: mean}, 0.001, 1) for name, mean in (("a", 2.0), ("b", 2.2)))
    assert compare(a, b).changes[0].sure is None and compare(a, b).changes[0].speed.value == pytest.approx(
        1 / 1.1, rel=0.01
    )


@pytest.mark.parametrize(("asked", "gone"), [((1, 2), True), ((1,), False)], ids=["its jobs failed", "not asked for"])
def test_what_the_second_could_not_measure_any_more_fails(tmp_path, asked, gone):
    a = benched(tmp_path / "a.json", {1: 4.0, 2: 2.0, 4: 1.0})
    b = benched(tmp_path / "b.json", {1: 4.0, 8: 1.0}, asked=asked)
    found = compare(a, b, 0.5)
    assert found.below == ("work (closing line) on 2 ranks",) * gone
    assert any(note.startswith("Only in A: work (closing line) on 2 ranks, ") for note in found.notes)


# What is said and what is refused


def test_the_command_says_the_change_first(tmp_path, capsys):
    a, b = (str(timeline(tmp_path / f"{took}.json", took, {"t<1>\x1b": took})) for took in (1000, 3000))
    assert cli.run(["diff", a, b]) == 0
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert first.startswith("The step takes 3.") and first.endswith(" ms).") and "collective of t<1>\\x1b (+" in first
    assert "\x1b" not in out and "details (1 of 2)" not in out
    assert cli.run(["diff", a, b, "--top", "1", "--fail-below", "0.9"]) == 1
    out = capsys.readouterr().out
    assert "details (1 of 2)" in out and "step: its speed is below the limit" in out
    assert cli.run(["diff", b, a, "--fail-below", "0.9", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["kind"], values["of"]) == ("diff", "timeline")
    assert values["changes"][0]["before_s"]["value"] == pytest.approx(5.2e-3, rel=0.1)


def test_what_else_is_different_is_said(tmp_path):
    a = emulated(tmp_path / "a.json", {40: 0.1})
    where = replace(emulate_results.ENVIRONMENT, cores=8, packages={"mpi4py": "5"})
    notes = compare(a, emulated(tmp_path / "b.json", {40: 0.1}, engine="mpi", environment=where)).notes
    assert {"Different engine: ring before, mpi after.", "Different cores: 4 before, 8 after."} < {*notes}
    assert "Different packages mpi4py: 4 before, 5 after." in notes
    assert not any("python" in note or "types" in note for note in notes)


def test_a_folder_with_several_kinds_is_compared_by_the_one_that_says_most(tmp_path):
    folders = [job(tmp_path / name) for name in "ab"]
    for folder in folders:
        timeline(folder / "timeline.json", 1, {"t": 100})
    found = compare(*folders)
    assert found.of == "step times" and any(note.endswith(": timeline.") for note in found.notes)
    assert compare(folders[0] / "timeline.json", folders[1]).of == "timeline"


def test_what_does_not_compare_is_refused(tmp_path):
    found = timeline(tmp_path / "t.json", 1, {"t": 100})
    strong, weak = (benched(tmp_path / mode, {2: 1.0}, mode=mode) for mode in ("strong", "weak"))
    size = emulated(tmp_path / "size", {40: 0.1})
    for a, b, said in (
        (found, trace(tmp_path / "trace.json", [20]), r"t\.json \(timeline\) and .*trace\.json \(trace\)"),
        (strong, weak, "nothing in common"),
        (strong, benched(tmp_path / "three", {3: 1.0}), "nothing in common"),
        (size, emulated(tmp_path / "other", {80: 0.1}), "nothing in common"),
        (size, emulated(tmp_path / "broadcast", {40: 0.1}, collective="broadcast"), "nothing in common"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            compare(a, b)
    with pytest.raises(DataNotFoundError):
        compare(found, tmp_path / "gone")


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"kind": "bench-scaling"}', '{"kind": "bench-scaling", "schema": 2, "asked": {}}',
     '{"kind": "emulate-results", "schema": 2, "asked": {}, "environment": {}, "samples": [], "plan": 3}',
     '{"kind": "start"}\n'],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"bad\.json"):
        compare(path, path)


@pytest.mark.parametrize("old", ["timeline diff", "trace diff", "mpi-profile compare"])
def test_where_a_comparison_was_it_is_said_where_it_is(old, capsys):
    assert cli.run([*old.split(), "a", "b"]) == 2
    assert capsys.readouterr().err == (
        f"hvdkit: 'hvdkit {old}' is 'hvdkit diff A B' now (see 'hvdkit {old.split()[0]} --help').\n"
    )
