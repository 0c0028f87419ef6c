"""``hvdkit emulate`` with ranks that are only numbers: options, files, how it ends."""

import json
import os
from pathlib import Path

import pytest

from hvdkit import DataError, cli
from hvdkit.common import json_files
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.model import Horovod, LaunchFacts, Mpi
from hvdkit.jobs.trials import Launch, TrialJob
from hvdkit.measure.emulate import results
from hvdkit.measure.emulate.results import RankFiles

LIST = "803840,131584,33024,2600"


class Ranks:
    """Stands for ``tune.jobs.Launch``: the ranks write times that are known.

    Attributes:
        until: trials that they finish; None for all.
        ends: what the launch does then: None, an exception to raise, or the text of a failure.
        error: (rank, message, exit code, wrong) that a rank leaves.
        hosts: that ranks say of themselves, by rank.
    """

    def __init__(self):
        self.until, self.ends, self.error, self.hosts = None, None, None, {}
        self.launches, self.jobs = [], []

    def __call__(self, launch, setting, timeout_s):
        self.launches.append((launch, setting, timeout_s))
        folder = Path(launch.command[-1])
        job = json_files.read(folder / results.JOB, results.EmulateResults)
        self.jobs.append(job)
        trials = job.plan.trials if self.until is None else self.until
        for rank in range(launch.n):
            host = self.hosts.get(rank, "one")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(results.socket, "gethostname", lambda host=host: host)
                recorder = RankFiles(folder, rank)
            for trial in range(trials):
                arrived = [trial + index / 10 + rank / 1000 for index in range(len(job.plan.collectives))]
                recorder.trial(arrived, [at + 0.02 for at in arrived])
            if self.error is not None and self.error[0] == rank:
                recorder.error(*self.error[1:3], wrong=self.error[3])
        if isinstance(self.ends, BaseException):
            raise self.ends
        return TrialJob(1.0, failure=self.ends)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    found = LaunchFacts(
        4, False, Path("/venv/bin/python"), os.environ["PATH"], Horovod(mpi=True, gloo=True),
        Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)), Path("/venv/bin/horovodrun"),
    )  # fmt: skip
    fake = Ranks()
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    monkeypatch.setattr(Launch, "__call__", lambda *arguments: fake(*arguments))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    for name in ("OMP_NUM_THREADS", "HOROVOD_AUTOTUNE", "HOROVOD_FUSION_THRESHOLD"):
        monkeypatch.delenv(name, raising=False)
    return fake


def emulate(*words, n=4, sizes=LIST):
    return cli.run(["emulate", "-n", str(n), "--sizes", sizes, *words])


def saved(path="r.json"):
    return json.loads(Path(path).read_text())


def fitting(value):
    """Whether a value is as the classes of the results say, with no other name."""
    try:
        json_files.decode(json.dumps(value), results.EmulateResults, "it")
    except DataError:
        return False
    return True


def shown(capsys, path="r.json"):
    """What ``emulate show --json`` says of the file."""
    capsys.readouterr()
    assert cli.run(["emulate", "show", path, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# What it does


def test_the_list_is_replayed_last_layer_first_and_the_file_is_as_its_schema_says(ranks, capsys):
    assert emulate("--engine", "ring", "--samples", "60000", "--batch-size", "8192", "--json", "r.json") == 0
    content = saved()
    assert fitting(content)
    assert not fitting({**content, "host": "node17"})
    assert [one["bytes"] for one in content["plan"]["collectives"]] == [2600, 33024, 131584, 803840]
    assert content["plan"]["trials"] == 8
    assert len(content["samples"]) == 32
    assert content["asked"]["engine"] == "ring"
    first = content["samples"][0]
    assert (first["size"], first["skew_s"], first["transfer_s"]) == (2600, 0.003, 0.02)
    assert "803840" in capsys.readouterr().out
    row = shown(capsys)["rows"][-1]
    assert (row["size"], row["count"], row["type"]) == (803840, 200960, "float32")
    assert row["algbw_bytes_per_s"]["value"] == pytest.approx(803840 / 0.02)
    assert row["busbw_bytes_per_s"]["value"] == pytest.approx(1.5 * row["algbw_bytes_per_s"]["value"])
    assert [path.name for path in Path().iterdir()] == ["r.json"]


def test_every_kind_of_job_fits_the_schema(ranks):
    for words in (
        ("--engine", "gloo", "--collective", "all_to_all", "--straggler", "2:50", "--straggler", "0:1.5"),
        ("--engine", "mpi", "--delay", "20:1:0.25", "--no-check", "--gap-ms", "2"),
        ("--fusion", "off", "--env", "HOROVOD_CYCLE_TIME=0.5", "--ppn", "4", "--hosts", "localhost:4"),
    ):
        assert emulate(*words, "--trials", "3", "--json", "r.json") == 0
        assert fitting(saved()), words
    ranks.until, ranks.ends = 0, KeyboardInterrupt()
    assert emulate("--json", "r.json") == 130
    assert fitting(saved())


def test_what_the_ranks_are_told(ranks):
    words = ["--straggler", "2:50", "--delay", "20:1:0.25", "--warmup-trials", "1", "--no-check"]
    assert emulate("--engine", "gloo", *words, "--threads", "2", "--env", "A=b", "--timeout", "60") == 0
    (job,), ((launch, _, timeout_s),) = ranks.jobs, ranks.launches
    asked = job.asked
    assert (asked.engine, asked.fusion, asked.check, asked.warmup_trials) == ("gloo", False, False, 1)
    assert asked.straggler_s == {2: 0.05}
    assert asked.delay == results.Delay(0.02, 1, 0.25)
    assert (launch.n, timeout_s) == (4, 60)
    assert list(launch.options) == ["--threads", "2", "--env", "A=b"]
    assert launch.command[1:4] == ("-P", "-m", "hvdkit.measure.emulate.worker")


def test_horovod_s_settings(ranks):
    assert emulate("--env", "HOROVOD_CYCLE_TIME=0.5", "--env", "A=b") == 0
    assert emulate("--fusion", "off") == 0
    assert [job.asked.fusion for job in ranks.jobs] == [True, False]
    first, second = (setting.variables() for _, setting, _ in ranks.launches)
    assert first == {} and ranks.jobs[0].asked.settings == {"HOROVOD_CYCLE_TIME": "0.5"}
    assert second == {"HOROVOD_FUSION_THRESHOLD": "0"}


def test_a_sweep_goes_from_the_least_to_the_greatest_size_each_alone(ranks, capsys):
    sweep = ["emulate", "-n", "4", "--begin", "8", "--end", "128M", "--factor", "4", "--trials", "2"]
    assert cli.run([*sweep, "--json", "r.json"]) == 0
    expected = [8 * 4**power for power in range(13)]
    assert expected[-1] == 128 << 20
    assert [one["bytes"] for one in saved()["plan"]["collectives"]] == expected
    assert [row["size"] for row in shown(capsys)["rows"]] == expected
    for words in (["--fusion", "on"], ["--engine", "mpi"]):
        assert cli.run([*sweep, *words]) == 0
    assert [job.asked.fusion for job in ranks.jobs] == [False, True, False]
    assert ranks.launches[0][1].variables() == {"HOROVOD_FUSION_THRESHOLD": "0"}


def test_hosts_are_not_told_and_the_folder_is_where_they_share(ranks):
    ranks.hosts = {rank: f"host{rank // 2}" for rank in range(4)}
    assert emulate("--hosts", "gandalf:2,saruman:2", "--engine", "mpi", "--json", "r.json") == 0
    text = Path("r.json").read_text()
    assert "gandalf" not in text
    assert "saruman" not in text
    assert saved()["asked"]["hosts"] == 2
    assert saved()["asked"]["ppn"] == 2
    assert Path(ranks.launches[0][0].command[-1]).parent == Path.cwd()


@pytest.mark.parametrize(("hosts", "expected"), [("aaaa", (1, 4)), ("aabb", (2, 2)), ("aaab", (2, None))])
def test_hosts_are_those_on_which_the_ranks_were_not_those_that_were_named(ranks, hosts, expected):
    ranks.hosts = dict(enumerate(hosts))
    assert emulate("--hosts", "gandalf:4,saruman:4", "--engine", "mpi", "--json", "r.json") == 0
    content = saved()
    assert fitting(content)
    assert (content["asked"]["hosts"], content["asked"]["ppn"]) == expected
    assert any("all 4 ranks on 1 of the 2 hosts" in note for note in content["notes"]) == (expected[0] == 1)


def test_a_plot(ranks):
    pytest.importorskip("matplotlib")
    assert emulate("--plot", "cdf.svg") == 0
    assert [path.name for path in Path().iterdir()] == ["cdf.svg"]


# How it ends


def test_an_interrupt_keeps_what_all_ranks_measured(ranks, capsys):
    ranks.until, ranks.ends = 5, KeyboardInterrupt()
    assert emulate("--trials", "100", "--json", "r.json") == 130
    content = saved()
    assert fitting(content)
    assert len(content["samples"]) == 20
    assert "It was interrupted: 5 of 100 trials were measured by all ranks." in content["notes"]
    assert "5 of 100" in capsys.readouterr().out


def test_a_wrong_result_ends_it_in_one_sentence_and_nothing_is_written(ranks, capsys):
    ranks.error = (2, "Rank 2 got a wrong result of allreduce 0: element 7 is 3, expected 4.", 1, True)
    ranks.ends = "exited with status 1; its last lines:\nnoise"
    assert emulate("--json", "r.json") == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"hvdkit: {ranks.error[1]}"
    assert list(Path().iterdir()) == []


def test_a_mistake_that_a_rank_finds_is_bad_usage(ranks, capsys):
    ranks.error, ranks.ends = (0, "--engine torch has no uint16.", 2, False), "exited with status 1"
    assert emulate() == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hvdkit: --engine torch has no uint16."


def test_a_job_that_fails_later_keeps_what_was_measured(ranks, capsys):
    ranks.until, ranks.ends = 3, "was ended after 60 seconds; its last lines:\nhello"
    assert emulate("--trials", "9", "--json", "r.json") == 1
    assert len(saved()["samples"]) == 12
    assert "The job failed: 3 of 9 trials were measured by all ranks." in saved()["notes"]
    assert "was ended after 60 seconds" in capsys.readouterr().err


def test_a_job_that_fails_at_once_says_why(ranks, capsys):
    ranks.until, ranks.ends = 0, "exited with status 3; its last lines:\nImportError: no"
    assert emulate("--json", "r.json") == 1
    assert "The job exited with status 3; its last lines:\nImportError: no" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


# Mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--straggler", "2"], "--straggler is '2'; expected RANK:MS"),
        (["--straggler", "2:0"], "expected RANK:MS"),
        (["--straggler", "1:5", "--straggler", "1:6"], "each rank once"),
        (["--straggler", "4:5"], "on rank 4, and there are 4 ranks"),
        (["--delay", "x"], "--delay is 'x'; expected MS[:RANK[:P]]"),
        (["--delay", "5:0:1.5"], "--delay is '5:0:1.5'"),
        (["--delay", "5:0:1:2"], "--delay is '5:0:1:2'"),
        (["--delay", "nan"], "--delay is 'nan'"),
        (["--delay", "5:9"], "on rank 9, and there are 4 ranks"),
        (["--engine", "mpi", "--fusion", "on"], "--fusion is a setting of Horovod, got --engine mpi"),
        (["--delay", "5:0:0"], "--delay is '5:0:0'"),
        (["--engine", "ring", "--collective", "all_to_all"], "over a ring would send every block"),
        (["--json", "a.svg", "--plot", "./a.svg"], "'a.svg' is named for two things"),
        (
            ["--engine", "mpi", "--dtype", "float16"],
            "float16, which --engine mpi does not take; use --engine horovod or ring or torch",
        ),
        (
            ["--engine", "ring", "--dtype", "bfloat16"],
            "--engine ring does not take; use --engine torch or gloo or nccl, or one of float32",
        ),
        (["--engine", "ring", "--launcher", "horovodrun"], "horovodrun starts them without it"),
        (["--json", "nowhere/r.json"], "does not exist"),
        (["--json", "."], "is a directory"),
        (["--timeout", "0"], "above 0"),
        (["--engine", "kccb"], "kccb"),
        (["--compression", "int4"], "int4"),
        (["--compression", "int8", "--engine", "ring"], "over other engines than the ring"),
        (["--compression", "int8", "--collective", "broadcast"], "replays allreduces"),
        (["--compression", "bf16", "--dtype", "float16"], "is for float32 and float64"),
        (["--plot", "cdf.gif"], "cdf.gif"),
        (["--hosts", "a:4", "--hostfile", "h"], "set the same"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_runs(ranks, capsys, words, said):
    assert emulate(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert ranks.launches == []


def test_too_many_ranks_for_a_check_are_refused_before_any_is_started(ranks, capsys):
    words = ["--engine", "ring", "--dtype", "int8", "--trials", "1"]
    assert emulate(*words, n=300) == 2
    assert "300 ranks cannot be checked in int8" in capsys.readouterr().err
    assert ranks.launches == []
    assert emulate(*words, "--no-check", n=300) == 0
    assert emulate(*words, "--collective", "broadcast", n=300) == 0


def test_options_that_are_missing(ranks, capsys):
    assert cli.run(["emulate", "--sizes", "4"]) == 2
    assert "-n" in capsys.readouterr().err
    assert cli.run(["emulate", "-n", "2"]) == 2
    assert "--sizes" in capsys.readouterr().err
    assert cli.run(["emulate", "-n", "2", "sizes", "--sizes", "4"]) == 2
    assert "-n is given before 'sizes'" in capsys.readouterr().err


def test_subcommands_are_there(ranks, capsys):
    assert cli.run(["emulate", "sizes", "--sizes", LIST, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 971048
    assert emulate("--json", "r.json", "--trials", "2") == 0
    capsys.readouterr()
    assert cli.run(["emulate", "show", "r.json"]) == 0
    assert "803840" in capsys.readouterr().out
    assert cli.run(["emulate", "plan", "--sizes", LIST]) == 2
    assert "'hvdkit emulate plan' is 'hvdkit emulate sizes' now" in capsys.readouterr().err
    assert cli.run(["emulate", "compare", "r.json", "r.json"]) == 2
    assert "'hvdkit emulate compare' is 'hvdkit diff' now" in capsys.readouterr().err


def test_mpi_needs_a_launcher_of_mpi_where_horovod_has_none(ranks, monkeypatch):
    found = LaunchFacts(
        4, False, Path("/venv/bin/python"), os.environ["PATH"], Horovod(mpi=False, gloo=True),
        Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)), Path("/venv/bin/horovodrun"),
    )  # fmt: skip
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    assert emulate("--engine", "ring", "--trials", "1") == 0
    assert list(ranks.launches[-1][0].options) == ["--launcher", "mpirun"]
    assert emulate("--engine", "gloo", "--trials", "1") == 0
    assert list(ranks.launches[-1][0].options) == []
