"""Horovod's settings for speed: options and tuned files, in the units that Horovod reads."""

import json
import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.model import Horovod, LaunchFacts, Mpi
from hvdkit.jobs.launch.tuned import Tuned, TunedFile, read


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    found = LaunchFacts(
        cores=4,
        root=False,
        python=Path("/venv/bin/python"),
        path="/usr/bin",
        horovod=Horovod(mpi=True, gloo=True),
        mpi=Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)),
        horovodrun=Path("/venv/bin/horovodrun"),
    )
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    monkeypatch.setattr(facts, "own_python", lambda: found.python)
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "OMP_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def dry_run(capsys, *words):
    status = cli.run(["launch", "-n", "2", "--dry-run", "--explain", *words, "train.py"])
    out, err = capsys.readouterr()
    return status, [word for word in shlex.split(out) if "=" in word], shlex.split(out), err


LOG = Path(__file__).parents[1] / "data" / "autotune" / "torch-mpi-2ranks.csv"
HEADER = LOG.read_text().splitlines()[0] + "\n"


def test_the_best_row_of_a_real_log_in_bytes_and_milliseconds(capsys):
    status, variables, _, err = dry_run(capsys, "--tuned", str(LOG))
    assert status == 0
    assert {"HOROVOD_CYCLE_TIME=3.0047", f"HOROVOD_FUSION_THRESHOLD={round(3.64484 * 1048576)}"} <= set(variables)
    assert "HOROVOD_CACHE_CAPACITY=0" in variables and "HOROVOD_HIERARCHICAL_ALLREDUCE=0" in variables
    assert f"line 8 of {LOG}, the best of 15" in " ".join(err.split())


def log(tmp_path, *rows, end="\n"):
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "\n".join(rows) + end)
    return path


def test_a_log_whose_job_was_killed_gives_the_best_of_its_whole_rows(tmp_path):
    path = log(tmp_path, "1,0,0, 1,2.5,4.9,10", "0,0,0, 1,5,64,9.5", "0,0,0, 1,1,", end="")
    best, *_ = read(path)
    assert (best.cycle_time_ms, best.fusion_threshold_bytes, best.hierarchical_allreduce) == (2.5, 5138022, True)
    assert best.cache_capacity is None, "with the cache on, its capacity stays Horovod's"


def test_what_the_best_row_has_on_and_no_option_says_is_named(capsys, tmp_path):
    path = str(log(tmp_path, "0,1,1, 1,2.5,4.9,10", "0,0,0, 1,5,64,9.5"))
    notes = [
        f"hvdkit launch: --tuned leaves out {name}, which its best row has on; give --env {name}=1."
        for name in ("HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_TORUS_ALLREDUCE")
    ]

    def said(*words):
        return [line for line in dry_run(capsys, "--tuned", *words)[3].splitlines() if "leaves out" in line]

    assert said(path) == notes
    assert said(path, "--env", "HOROVOD_TORUS_ALLREDUCE=1") == notes[:1]
    assert said(str(LOG)) == []


@pytest.mark.parametrize(
    ("rows", "end", "named"),
    [
        ([], "", "no row with a score above 0"),
        (["0,0,0, 1,5,64,0"], "\n", "no row with a score above 0"),
        (["0,0,0, 1,5,64,1", "0,0,x, 1,5,64,1", "0,0,0, 1,5,64,1"], "\n", "line 3: expected 7 numbers"),
        (["0,0,0, 1,5,64,1", "0,0,0, 1,5"], "\n", "line 3"),
        (["0,0,0, 1,-5,64,1", "0,0,0, 1,5,64,1"], "\n", "line 2"),
    ],
)
def test_a_bad_log_is_named_by_its_line(capsys, tmp_path, rows, end, named):
    status, variables, _, err = dry_run(capsys, "--tuned", str(log(tmp_path, *rows, end=end)))
    assert (status, variables, err.count("\n")) == (2, [], 1)
    assert named in err


@pytest.mark.parametrize(
    "content",
    [
        "hello\n",
        "{}",
        '{"hvdkit": "1", "kind": "tuned", "schema": 2, "settings": {}}',
        *(
            f'{{"hvdkit": "1", "kind": "tuned", "schema": 1, "settings": {{{setting}}}}}'
            for setting in (
                '"cycle_time_ms": 1',
                '"cycle_time_s": 1e999',
                '"cycle_time_s": "fast"',
                '"cycle_time_s": -1',
                '"fusion_threshold_bytes": 4.9',
                '"launcher": "rm"',
                '"threads": 0',
                '"LD_PRELOAD": "x"',
            )
        ),
    ],
)
def test_a_file_that_is_no_tuned_file_is_refused(capsys, tmp_path, content):
    path = tmp_path / "tuned.json"
    path.write_text(content)
    status, variables, _, err = dry_run(capsys, "--tuned", str(path))
    assert (status, variables) == (2, [])
    assert str(path) in err and err.count("\n") == 1


@given(
    st.builds(
        Tuned,
        launcher=st.sampled_from([None, "mpirun", "horovodrun"]),
        threads=st.none() | st.integers(1, 512),
        cycle_time_s=st.none() | st.floats(0, 10),
        fusion_threshold_bytes=st.none() | st.integers(0, 2**40),
        cache_capacity=st.none() | st.integers(0, 2**20),
        hierarchical_allreduce=st.none() | st.booleans(),
    )
)
def test_what_is_written_is_read(tmp_path_factory, settings):
    path = tmp_path_factory.mktemp("tuned") / "tuned.json"
    json_files.write(path, TunedFile(settings))
    assert read(path)[0] == settings
    assert set(json.loads(path.read_text())["settings"]) <= {*Tuned.__struct_fields__}


def test_a_tuned_file_chooses_the_launcher_and_threads_unless_they_are_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "tuned.json"
    json_files.write(path, TunedFile(Tuned(launcher="horovodrun", threads=3, cycle_time_s=0.0005)))
    _, variables, words, err = dry_run(capsys, "--tuned", str(path))
    assert {"OMP_NUM_THREADS=3", "HOROVOD_CYCLE_TIME=0.5"} <= set(variables)
    assert "/venv/bin/horovodrun" in words and f"HOROVOD_CYCLE_TIME=0.5\n    --tuned: {path}\n" in err
    _, variables, words, _ = dry_run(capsys, "--tuned", str(path), "--launcher", "mpirun", "--threads", "2")
    assert "OMP_NUM_THREADS=2" in variables and "/venv/bin/mpirun" in words


def test_options_win_over_the_file_and_env_over_both(capsys, tmp_path):
    path = tmp_path / "tuned.json"
    json_files.write(path, TunedFile(Tuned(cycle_time_s=0.005, cache_capacity=0, fusion_threshold_bytes=0)))
    words = ["--tuned", str(path), "--cycle-time-ms", "0.25", "--fusion-threshold-mb", "4.9"]
    _, variables, _, err = dry_run(capsys, *words, "--hierarchical-allreduce", "--env", "HOROVOD_CACHE_CAPACITY=7")
    assert {
        "HOROVOD_CYCLE_TIME=0.25",
        "HOROVOD_FUSION_THRESHOLD=5138022",
        "HOROVOD_CACHE_CAPACITY=7",
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1",
    } <= set(variables)
    assert "HOROVOD_CYCLE_TIME=0.25\n    --cycle-time-ms\n" in err


def test_skew_in_the_timeline_turns_the_cache_off(capsys):
    assert "HOROVOD_CACHE_CAPACITY=0" in dry_run(capsys, "--timeline", "t.json", "--skew")[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--skew"],
        ["--tuned", str(LOG), "--autotune-log", "x.csv"],
        ["--cycle-time-ms", "1", "--autotune-log", "x.csv"],
        ["--cycle-time-ms", "-1"],
        ["--fusion-threshold-mb", "nan"],
        ["--cache-capacity", "-1"],
        ["--tuned", "nosuch.json"],
        ["--timeline", "t.json", "--skew", "--cache-capacity", "9"],
        ["--hosts", "h1", "--hostfile", "hosts"],
    ],
)
def test_options_that_contradict_are_refused(capsys, words):
    status, variables, _, err = dry_run(capsys, *words)
    assert (status, variables, err.count("\n")) == (2, [], 1)
