"""The file of ``hvdkit emulate``, and how what the ranks wrote becomes samples."""

import json

import msgspec
import pytest
from emulate_results import ENVIRONMENT

from hvdkit import DataError
from hvdkit.common import json_files
from hvdkit.measure.emulate import rank_files, results
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.rank_files import ReplayJob, Writer, file_of, read, read_job, write_job
from hvdkit.measure.emulate.results import Delay, EmulateAsked, EmulateResults, Sample

PLAN = ReplayPlan((Collective("fc2", 10), Collective("fc1", 30)), trials=3)
ASKED = EmulateAsked("ring", ranks=2, hosts=1)


def sample(trial=0, index=0, **changed):
    values = {
        "trial": trial, "index": index, "nbytes": PLAN.collectives[index].nbytes, "skew_s": 0.001, "transfer_s": 0.002,
        "slowest_s": 0.003, "slowest_rank": 1, "ranks_s": (0.002, 0.003), **changed,
    }  # fmt: skip
    return Sample(**values)


def written(folder, rank, trials, machine="one", notes=()):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_files, "machine", lambda: machine)
        with Writer(folder, rank, notes) as writer:
            for number, times in trials.items():
                writer.trial(number, *times)


def join(folder, collective="allreduce"):
    return rank_files.join(folder, ReplayJob(msgspec.structs.replace(ASKED, collective=collective), PLAN))


def test_a_job_is_read_as_it_was_written(tmp_path):
    plan = ReplayPlan((Collective("a", 3), Collective("b", 2, "float16", 0.5)), trials=4)
    more = {"straggler_s": {2: 0.05}, "delay": Delay(0.02, 1, 0.1), "check": False}
    job = ReplayJob(EmulateAsked("gloo", 3, hosts=1, **more), plan)
    write_job(tmp_path, job)
    assert read_job(tmp_path) == job
    with pytest.raises(DataError, match="directory that all hosts share"):
        read_job(tmp_path / "elsewhere")


# What ranks wrote


def test_skew_is_told_apart_from_transfer(tmp_path):
    written(tmp_path, 0, {0: ([10.0, 20.0], [10.7, 20.1])})
    written(tmp_path, 1, {0: ([10.5, 20.0], [10.6, 20.3])})
    joined = join(tmp_path)
    first, second = joined.samples
    assert (first.skew_s, first.transfer_s) == (0.5, 0.2)
    assert (first.slowest_s, first.slowest_rank, first.ranks_s) == (0.7, 0, (0.7, 0.1))
    assert (second.skew_s, second.transfer_s, second.slowest_rank) == (0.0, 0.3, 1)
    assert [(one.trial, one.index, one.nbytes) for one in joined.samples] == [(0, 0, 40), (0, 1, 120)]
    assert joined.notes == []


def test_only_trials_that_all_ranks_finished_count(tmp_path):
    times = ([1.0, 2.0], [1.1, 2.1])
    written(tmp_path, 0, {0: times, 1: times, 2: times})
    written(tmp_path, 1, {0: times, 1: times})
    with file_of(tmp_path, 1).open("a") as file:
        file.write("[2, [1.0, 2.0], [1.1, 2")  # it was killed while it wrote
    joined = join(tmp_path)
    assert joined.trials == 2
    assert [one.trial for one in joined.samples] == [0, 0, 1, 1]


def test_a_rank_that_wrote_nothing_leaves_nothing_to_count(tmp_path):
    written(tmp_path, 0, {0: ([1.0, 2.0], [1.1, 2.1])})
    assert join(tmp_path).samples == []
    file_of(tmp_path, 1).touch()
    assert join(tmp_path).samples == []


@pytest.mark.parametrize(("collective", "skew", "transfer"), [("allreduce", 0.5, 0.2), ("broadcast", 0.0, 0.7)])
def test_on_several_machines_each_rank_s_own_times_tell_skew_from_transfer(tmp_path, collective, skew, transfer):
    """Their clocks are hours apart."""
    written(tmp_path, 0, {0: ([10.0, 20.0], [10.7, 20.1])})
    written(tmp_path, 1, {0: ([9010.5, 9020.0], [9010.7, 9020.1])}, machine="two")
    joined = join(tmp_path, collective)
    first = joined.samples[0]
    assert (first.skew_s, first.transfer_s) == pytest.approx((skew, transfer))
    assert (first.slowest_s, first.slowest_rank) == (0.7, 0)
    assert "The clocks of several machines are not compared" in joined.notes[0]


def test_a_rank_says_where_it_is(tmp_path):
    for rank in range(2):
        written(tmp_path, rank, {}, machine=str(rank))
    assert join(tmp_path).placed == (1, 1)
    assert len(rank_files.machine()) > 10


def test_a_wrong_result_is_told_before_what_followed_from_it(tmp_path):
    with Writer(tmp_path, 0) as writer:
        writer.error("it lost rank 1", 1, wrong=False)
    with Writer(tmp_path, 1) as writer:
        writer.error("element 3 is 5, expected 6", 1, wrong=True)
    assert join(tmp_path).failed.error == "element 3 is 5, expected 6"


def test_notes_of_ranks_come_once(tmp_path):
    for rank in range(2):
        written(tmp_path, rank, {}, notes=["torch.distributed used gloo."])
    assert join(tmp_path).notes == ["torch.distributed used gloo."]


@pytest.mark.parametrize("text", ["{}\n", "hello\n", '{"hvdkit": "emulate rank", "rank": 0}\n[1]\n'])
def test_another_file_in_the_folder_is_an_error(tmp_path, text):
    file_of(tmp_path, 0).write_text(text)
    with pytest.raises(DataError, match=r"rank-0\.jsonl was not written by a rank"):
        read(file_of(tmp_path, 0))


# The file of results


def of(samples, asked=ASKED, notes=()):
    return EmulateResults(asked, ENVIRONMENT, list(notes), PLAN, samples)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "r.json"
    found = of([sample(), sample(1, 1)], notes=["A note."])
    json_files.write(path, found)
    assert results.load(path) == found
    json_files.write(path, of([]))
    assert results.load(path).samples == []


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ((), {"schema": 3}),
        (("asked",), {"ranks": 3}),
        (("samples", 0), {"index": 2}),
        (("samples", 0), {"size": 44}),
        (("samples", 0), {"slowest_rank": 2}),
        (("samples", 0), {"skew_s": -1}),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_is_refused(tmp_path, where, change):
    path = tmp_path / "r.json"
    json_files.write(path, of([sample()]))
    content = inside = json.loads(path.read_text())
    for name in where:
        inside = inside[name]
    inside.update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"r\.json is not a file of 'hvdkit emulate' \(emulate-results, schema 2\)"):
        results.load(path)
