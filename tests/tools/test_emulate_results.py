"""The file of ``hvdkit emulate``, and how what the ranks wrote becomes samples."""

import json

import numpy as np
import pytest
from emulate_results import ENVIRONMENT

from hvdkit import DataError
from hvdkit.common import json_files
from hvdkit.measure.emulate import results, worker
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults, RankFiles, Sample

PLAN = ReplayPlan((Collective("fc2", 10), Collective("fc1", 30)), trials=3)


def sample(trial=0, index=0, **changed):
    values = {
        "trial": trial, "index": index, "nbytes": PLAN.collectives[index].nbytes, "skew_s": 0.001, "transfer_s": 0.002,
        "slowest_s": 0.003, "slowest_rank": 1, "ranks_s": (0.002, 0.003), **changed,
    }  # fmt: skip
    return Sample(**values)


def written(folder, rank, trials, machine="one", notes=()):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "machine", lambda: machine)
        recorder = RankFiles(folder, rank, notes)
    for times in trials:
        recorder.trial(*times)
    return recorder


def join(folder, collective="allreduce"):
    asked = EmulateAsked("ring", ranks=2, hosts=1, collective=collective)
    return results.join(folder, EmulateResults(asked, ENVIRONMENT, [], PLAN, []))


def test_a_folder_that_this_host_does_not_see(tmp_path, capsys):
    assert worker.main(tmp_path / "elsewhere") == 1
    assert "directory that all hosts share" in capsys.readouterr().err


# What ranks wrote


def test_skew_is_told_apart_from_transfer(tmp_path):
    written(tmp_path, 0, [([10.0, 20.0], [10.7, 20.1])])
    written(tmp_path, 1, [([10.5, 20.0], [10.6, 20.3])])
    joined, _ = join(tmp_path)
    first, second = joined.samples
    assert (first.skew_s, first.transfer_s) == (0.5, 0.2)
    assert (first.slowest_s, first.slowest_rank, first.ranks_s) == (0.7, 0, (0.7, 0.1))
    assert (second.skew_s, second.transfer_s, second.slowest_rank) == (0.0, 0.3, 1)
    assert [(one.trial, one.index, one.nbytes) for one in joined.samples] == [(0, 0, 40), (0, 1, 120)]
    assert joined.notes == []


def test_only_trials_that_all_ranks_finished_count(tmp_path):
    times = ([1.0, 2.0], [1.1, 2.1])
    written(tmp_path, 0, [times] * 3)
    written(tmp_path, 1, [times] * 2)
    with (tmp_path / "rank-1.times").open("ab") as file:
        file.write(np.array([1.0, 2.0, 1.1]).tobytes()[:-3])  # it was killed while it wrote
    assert [one.trial for one in join(tmp_path)[0].samples] == [0, 0, 1, 1]


def test_a_rank_that_wrote_nothing_leaves_nothing_to_count(tmp_path):
    written(tmp_path, 0, [([1.0, 2.0], [1.1, 2.1])])
    assert join(tmp_path)[0].samples == []


@pytest.mark.parametrize(("collective", "skew", "transfer"), [("allreduce", 0.5, 0.2), ("broadcast", 0.0, 0.7)])
def test_on_several_machines_each_rank_s_own_times_tell_skew_from_transfer(tmp_path, collective, skew, transfer):
    """Their clocks are hours apart."""
    written(tmp_path, 0, [([10.0, 20.0], [10.7, 20.1])])
    written(tmp_path, 1, [([9010.5, 9020.0], [9010.7, 9020.1])], machine="two")
    joined, _ = join(tmp_path, collective)
    first = joined.samples[0]
    assert (first.skew_s, first.transfer_s) == pytest.approx((skew, transfer))
    assert (first.slowest_s, first.slowest_rank) == (0.7, 0)
    assert "The clocks of several machines are not compared" in joined.notes[0]


def test_a_rank_says_where_it_is(tmp_path):
    for rank in range(2):
        written(tmp_path, rank, [], machine=str(rank))
    asked = join(tmp_path)[0].asked
    assert (asked.hosts, asked.ppn) == (2, 1)
    assert len(results.machine()) > 10


def test_a_wrong_result_is_told_before_what_followed_from_it(tmp_path):
    written(tmp_path, 0, []).error("it lost rank 1", 1, wrong=False)
    written(tmp_path, 1, []).error("element 3 is 5, expected 6", 1, wrong=True)
    assert join(tmp_path)[1].error == "element 3 is 5, expected 6"


def test_notes_of_ranks_come_once(tmp_path):
    for rank in range(2):
        written(tmp_path, rank, [], notes=["torch.distributed used gloo."])
    assert join(tmp_path)[0].notes == ["torch.distributed used gloo."]


# The file of results


def of(samples, notes=()):
    return EmulateResults(EmulateAsked("ring", ranks=2, hosts=1), ENVIRONMENT, list(notes), PLAN, samples)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "r.json"
    found = of([sample(), sample(1, 1)], notes=["A note."])
    json_files.write(path, found)
    assert json_files.read(path, EmulateResults) == found
    json_files.write(path, of([]))
    assert json_files.read(path, EmulateResults).samples == []


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ((), {"schema": 3}),
        (("asked",), {"ranks": 3}),
        (("asked",), {"compression": "int8"}),
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
        json_files.read(path, EmulateResults)
