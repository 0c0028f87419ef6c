"""``hvdkit bench scaling --timeline`` on jobs that are only numbers: what the communication is said to consist of."""

import csv
import io
import json
from pathlib import Path

import pytest
from bench_machine import Machine, fitting, run_bench, saved, use

from hvdkit import cli
from hvdkit.errors import DataError
from hvdkit.measure.bench import accounting
from hvdkit.steps.step_files import RankTimes, Step

STEP = 0.010
PLANTED = {"negotiation": 0.05, "copy_in": 0.02, "transfer": 0.15, "copy_out": 0.03, "other": 0.0, "nothing": 0.05}
"""What ``bench_machine`` has Horovod do after the last rank is ready, in shares of a step."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = use(tmp_path, monkeypatch, Machine(lambda n: STEP, noise=0.0001))
    machine.marks = True
    return machine


def recorded(ranks=2):
    (row,) = [row for row in saved()["summary"]["rows"] if row["ranks"] == ranks]
    return row["recorded"]


def windows(ranks=2):
    return {window["name"]: window for window in recorded(ranks)["windows"]}


def test_what_the_exposed_communication_consists_of_comes_back(machine):
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    found = windows()
    assert found["exposed"]["seconds"] == pytest.approx(0.3 * STEP, rel=0.01)
    for name, share in PLANTED.items():
        assert found["exposed"]["activities"][name] == pytest.approx(share * STEP, abs=0.002 * STEP), name
    assert found["working"]["activities"]["negotiation"] == pytest.approx(0.2 * STEP, rel=0.01)
    assert found["working"]["activities"]["transfer"] == 0
    assert found["waiting"]["seconds"] == 0


def test_every_part_adds_up(machine):
    machine.late = {1: 0.006}
    assert run_bench("--weak", "--timeline", ranks="2,4") == 0
    for ranks in (2, 4):
        found, account = windows(ranks), recorded(ranks)
        for window in found.values():
            assert sum(window["activities"].values()) == pytest.approx(window["seconds"], rel=1e-6, abs=1e-9)
        assert sum(window["seconds"] for window in found.values()) == pytest.approx(account["step_s"], rel=1e-6)
        assert sum(account["parts"].values()) == pytest.approx(account["step_s"], rel=1e-6)
        assert account["timeline_step_s"] == pytest.approx(account["step_s"], rel=0.01)


def test_what_horovod_does_while_rank_0_waits_is_no_hidden_and_no_exposed_communication(machine):
    machine.late = {1: 0.006}
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    waiting = windows()["waiting"]
    assert waiting["seconds"] == pytest.approx(0.006, rel=0.01)
    assert waiting["activities"]["negotiation"] == pytest.approx(0.006, rel=0.01)


def test_a_recorded_job_enters_no_measurement(machine, capsys):
    machine.slowed = 3.0
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert machine.recorded == [2], "one on each number of ranks above 1"
    assert machine.ran.count(2) == machine.ran.count(1) == 5
    (row,) = [row for row in saved()["summary"]["rows"] if row["ranks"] == 2]
    assert row["step_s"] == pytest.approx(STEP, rel=0.01)
    assert row["recorded"]["step_s"] == pytest.approx(3 * STEP, rel=0.01)
    out, err = capsys.readouterr()
    assert "the one job with a timeline took 30 ms a step on rank 0, the measured ones 10 ms" in out
    assert "it enters no measurement" in err


def test_parts_that_do_not_add_up_are_said(machine, capsys):
    machine.every, machine.count = 2, lambda n: 40
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert "On 2 ranks the parts by the timeline do not add up" in capsys.readouterr().out
    assert recorded()["timeline_step_s"] == pytest.approx(2 * STEP, rel=0.01)


def test_parts_that_add_up_are_not_doubted(machine, capsys):
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert "do not add up" not in capsys.readouterr().out


def test_a_sum_in_the_file_that_is_wrong_is_said(machine, capsys):
    assert run_bench("--weak", ranks="1,2") == 0
    content = saved()
    for job in content["jobs"]:
        job["steps"]["parts"]["compute"] *= 2
    Path("results.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert cli.run(["bench", "show", "results.json"]) == 0
    assert "On 2 ranks the parts of a step do not add up to it: their sum is +60% off" in capsys.readouterr().out


def test_without_marks_what_is_hidden_is_not_told(machine):
    machine.marks = False
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    (window,) = recorded()["windows"]
    assert window["name"] == "step"
    assert window["activities"]["transfer"] == pytest.approx(0.15 * STEP, rel=0.01)
    assert recorded()["parts"]["communication"] is None


def test_a_timeline_can_be_added_to_results_that_are_complete(machine):
    assert run_bench("--weak", ranks="1,2,4") == 0
    assert saved()["recordings"] == [] and recorded() is None
    assert run_bench("--weak", "--timeline", ranks="1,2,4") == 0
    assert len(machine.ran) == 15 and machine.recorded == [2, 4]
    assert run_bench("--weak", "--timeline", ranks="1,2,4") == 0
    assert machine.recorded == [2, 4], "it is there already"
    assert run_bench("--weak", ranks="1,2,4") == 0
    assert recorded() is not None, "a later call without --timeline keeps it"


def test_a_timeline_of_another_time_is_refused_and_tried_again(machine, capsys):
    machine.timeline_off = 3600.0
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    out, err = capsys.readouterr()
    assert "The job with a timeline on 2 ranks is left out: it has a timeline in which no operation" in out
    assert "no operation of Horovod lies in the steps" in err
    machine.timeline_off = 0.0
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert windows()["exposed"]["activities"]["transfer"] > 0
    assert len(saved()["recordings"]) == 1


def test_a_script_that_records_no_steps_cannot_be_set_against_a_timeline(machine, capsys):
    machine.silent = True
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert "did not record its steps (record_steps of the adapters)" in capsys.readouterr().out


def test_a_job_that_wrote_no_timeline_is_said(machine, capsys):
    machine._record = lambda *_: None
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert "wrote no timeline on the host" in capsys.readouterr().out


def test_the_table_and_the_csv_say_it(machine, capsys):
    assert run_bench("--weak", "--timeline", "--csv", ranks="1,2") == 0
    alone, two = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert alone["exposed_transfer_s"] == ""
    assert float(two["exposed_transfer_s"]) == pytest.approx(0.15 * STEP, rel=0.02)
    assert cli.run(["bench", "show", "results.json", "--markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 | exposed")]
    assert len(lines) == 1 and lines[0].split(" | ")[5].startswith("1.5")


@pytest.mark.parametrize("marks", [True, False])
def test_the_file_with_recordings_is_as_its_schema_says(machine, marks):
    machine.marks = marks
    assert run_bench("--weak", "--timeline", ranks="1,2") == 0
    assert fitting(saved())
    wrong = saved()
    wrong["recordings"][0]["accounting"]["windows"][0]["activities"]["host"] = 1.0
    assert not fitting(wrong)


def test_a_file_from_before_recordings_is_read(machine, capsys):
    assert run_bench("--weak", ranks="1,2") == 0
    content = saved()
    del content["recordings"]
    Path("results.json").write_text(json.dumps(content))
    assert cli.run(["bench", "show", "results.json"]) == 0
    assert "| 1 |" not in capsys.readouterr().err


def test_time_between_epochs_is_no_time_of_a_step(tmp_path):
    """Two epochs of five steps with ten seconds between them; the timeline shows the same."""
    begins = [index + (10.0 if index >= 5 else 0.0) for index in range(10)]
    steps = tuple(Step(at, at + 0.1, at + 0.7, at + 1.0) for at in begins)
    path = tmp_path / "t.json"
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 0}}]
    for at in begins:
        events += [
            {"ph": "B", "name": "ALLREDUCE", "ts": (at + 0.7) * 1e6, "pid": 1},
            {"ph": "B", "name": "MPI_ALLREDUCE", "ts": (at + 0.7) * 1e6, "pid": 1},
            {"ph": "E", "ts": (at + 0.9) * 1e6, "pid": 1},
            {"ph": "E", "ts": (at + 0.9) * 1e6, "pid": 1, "args": {"dtype": "float32", "shape": "[1]"}},
        ]
    path.write_text(json.dumps(events))
    found = accounting.account([RankTimes(0, steps)], path, 0)
    assert found.timeline_step_s == pytest.approx(1.0)
    assert found.off == pytest.approx(0.0, abs=1e-6)
    assert found.windows[-1].activities["transfer"] == pytest.approx(0.2)


def test_a_timeline_without_its_start_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[{"ph": "B", "name": "ALLREDUCE", "ts": 1, "pid": 1}, {"ph": "E", "ts": 2, "pid": 1}]')
    with pytest.raises(DataError, match="does not say when it was started"):
        accounting.account([RankTimes(0, (Step(0.0, 0.1, 0.2, 0.3),))], path, 0)
