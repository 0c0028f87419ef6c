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
from hvdkit.run.launch import facts
from hvdkit.run.launch.model import Horovod, LaunchFacts, Mpi
from hvdkit.run.launch.tuned import Tuned, TunedFile, choose


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


NO_OPTION = dict.fromkeys(("cycle_time_ms", "fusion_threshold_mb", "cache_capacity", "hierarchical_allreduce"))


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
    assert choose(path, **NO_OPTION)[0] == settings
    assert set(json.loads(path.read_text())["settings"]) <= {*Tuned.__struct_fields__}


def test_a_tuned_file_chooses_the_launcher_and_threads_unless_they_are_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "tuned.json"
    json_files.write(path, TunedFile(Tuned(launcher="horovodrun", threads=3, cycle_time_s=0.0005)))
    _, variables, words, err = dry_run(capsys, "--tuned", str(path))
    assert {"OMP_NUM_THREADS=3", "HOROVOD_CYCLE_TIME=0.5"} <= set(variables)
    assert "/venv/bin/horovodrun" in words and f"HOROVOD_CYCLE_TIME=0.5\n    --tuned {path}\n" in err
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
