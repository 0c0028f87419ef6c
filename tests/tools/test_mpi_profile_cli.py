"""``hvdkit mpi-profile`` and ``hvdkit launch --mpi-profile`` as they are typed. No job is started here."""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi_profile_files import HOROVOD, MPITRACE, group, record, write

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import DataError, InstallError, InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import facts, plan, recordings
from hvdkit.jobs.launch.model import Command, Horovod, Host, LaunchFacts, Mpi
from hvdkit.jobs.launch.options import Request
from hvdkit.prepare.install import cli as install_cli
from hvdkit.prepare.install import mpi_recorder
from hvdkit.read.mpi_profile.results import ShownProfile


def run(capsys, *words):
    status = cli.run(["mpi-profile", *map(str, words)])
    return status, *capsys.readouterr()


def fitting(value):
    """Whether a value is what ``show --json`` writes, with no other name."""
    try:
        found = json_files.decode(json.dumps(value), ShownProfile, "the output")
    except DataError:
        return False
    return json.loads(json_files.encode(found)) == value


# show


def test_json_is_as_the_published_schema_says_and_names_no_host(capsys):
    status, out, err = run(capsys, "show", "--json", *MPITRACE)
    content = json.loads(out)
    assert (status, err) == (0, "")
    assert fitting(content)
    assert not fitting({**content, "host": "node17"})
    assert list(content)[:3] == ["hvdkit", "kind", "schema"] and content["kind"] == "mpi-profile"
    assert "secret-host" not in out and "thetagpu" not in out


def test_json_of_the_real_files(capsys):
    content = json.loads(run(capsys, "show", "--json", *MPITRACE)[1])
    assert (content["source"], content["size"], content["missing"], content["shown_rank"]) == (
        "mpitrace", 8, [2, 3, 6, 7], 0,
    )  # fmt: skip
    routine = content["routines"][0]
    assert (routine["routine"], routine["calls"]) == ("MPI_Allreduce", 77340)
    assert (routine["seconds"], routine["ranks"]["least_rank"]) == (pytest.approx(106.664, abs=0.006), 4)
    sizes = [one for one in content["sizes"] if one["routine"] == "MPI_Allreduce"]
    assert sum(one["calls"] for one in sizes) == 77340
    assert [(one["calls"], one["average_bytes"]) for one in sizes if one["purpose"] == "control"] == [(72893, 16.0)]
    large = sizes[-1]
    assert large["bus_bytes_per_s"] == pytest.approx(2 * 7 / 8 * 714 * 4718824.9 / 18.844)
    begins = [
        "4 of 8 ranks left no record",
        "Control is",
        "These files have sizes alone",
        "mpitrace rounds",
        "Only MPI",
    ]
    assert [note.startswith(begin) for note, begin in zip(content["notes"], begins, strict=True)] == [True] * 5


def test_our_json_is_as_the_schema_says(capsys, tmp_path):
    calls = [*HOROVOD, group("MPI_Iallreduce", (3, 8, 1e-6), caller="a.out", op="MPI_SUM")]
    write(tmp_path / "p", *(record(rank, calls=calls, wait_measured=True) for rank in (0, 2)))
    content = json.loads(run(capsys, "show", "--json", tmp_path / "p", "--rank", "2")[1])
    assert fitting(content)
    assert (content["shown_rank"], content["traffic"]["control"]["calls"], content["missing"]) == (2, 1040, [1, 3])
    kinds = {(row["routine"], row["purpose"]) for row in content["ranks"][1]["calls"]}
    assert ("MPI_Iallreduce", "payload") in kinds and ("MPI_Allreduce", "control") in kinds


def test_the_table_for_people(capsys):
    status, out, _ = run(capsys, "show", *MPITRACE)
    assert status == 0
    for words in (
        "Rank 0 of 8 (4 recorded by mpitrace): 106.689 s of 128.903 s in MPI",
        "Control is Horovod's negotiation, in a thread of its own",
        "least 105.850 s (rank 4)",
        "4 of 8 ranks left no record: 2, 3, 6, 7.",
        "NCCL",
        "by which Horovod's negotiation is told from data",
    ):
        assert words in out
    cells = [re.split("  +", line.strip()) for line in out.splitlines()]
    assert next(row[:4] for row in cells if "77340" in row) == ["MPI_Allreduce", "77340", "44324.1", "106.663"]
    assert ["MPI_Allreduce", "control", "16.0", "72893", "86.606", "1.19 ms", "-"] in cells


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["show"], 2, "PATHS|DIR"), (["show", "nosuch"], 2, "nosuch"), (["show", "."], 2, "holds no MPI profile"),
        (["show", *MPITRACE, "--rank", "2"], 2, "those of 0, 1, 4, 5 of 8 ranks"),
        (["show", *MPITRACE, "--rank", "-1"], 2, "-1"), (["look"], 2, "look"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(capsys, tmp_path, monkeypatch, words, status, said):
    monkeypatch.chdir(tmp_path)
    done, out, err = run(capsys, *words)
    assert (done, out) == (status, "")
    assert re.search(said, err) and err.count("\n") == 1 and err.startswith("hvdkit: ")


# hvdkit launch --mpi-profile

FACTS = LaunchFacts(
    cores=8, root=False, python=Path("/venv/bin/python"), path="/venv/bin:/usr/bin",
    horovod=Horovod(mpi=True, gloo=True, mpi_bin=Path("/venv/bin")),
    mpi=Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)), horovodrun=Path("/venv/bin/horovodrun"),
    programs={name: Path(f"/usr/bin/{name}") for name in ("mpiexec", "aprun", "srun", "jsrun")},
    mpi_recorder=Path("/cache/key/libhvdkit-mpi-profile.so"),
)  # fmt: skip
COMMAND = Command(("/venv/bin/python", "train.py"), script=1)
REQUEST = Request(2, ("train.py",), mpi_profile=Path("/home/me/profile"))
PRELOADED = ("/usr/bin/env", "LD_PRELOAD=/cache/key/libhvdkit-mpi-profile.so")


def build(request=REQUEST, environ=None, **changes):
    return plan.build(request, replace(FACTS, **changes), COMMAND, {"PATH": FACTS.path, **(environ or {})})


def test_the_recorder_is_preloaded_into_the_ranks_alone():
    job = build()
    assert job.command == (*PRELOADED, *COMMAND.words)
    assert job.added["HVDKIT_MPI_PROFILE"] == "/home/me/profile"
    assert "LD_PRELOAD" not in job.environment and "LD_PRELOAD" not in shlex.join(job.launcher)
    assert any(setting.words == PRELOADED for setting in job.settings)
    assert "HVDKIT_MPI_PROFILE_WAIT" not in job.environment
    assert build(replace(REQUEST, mpi_profile_wait=True)).added["HVDKIT_MPI_PROFILE_WAIT"] == "1"
    assert build(replace(REQUEST, mpi_profile=None)).command == COMMAND.words


@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec", "aprun", "srun", "jsrun"])
def test_every_launcher_hands_the_directory_to_ranks_on_other_hosts(launcher):
    hosts = () if launcher == "jsrun" else (Host("nid00012", 1), Host("nid00013", 1))
    job = build(replace(REQUEST, launcher=launcher, hosts=hosts, hosts_chosen=bool(hosts), ppn=1))
    assert job.command == (*PRELOADED, *COMMAND.words)
    assert "HVDKIT_MPI_PROFILE" in shlex.join(job.launcher) or "--export=ALL" in job.launcher


def test_what_is_preloaded_already_stays():
    assert (
        build(environ={"LD_PRELOAD": "/usr/lib/libjemalloc.so"}).command[1] == f"{PRELOADED[1]}:/usr/lib/libjemalloc.so"
    )
    given = replace(REQUEST, variables={"LD_PRELOAD": "/mine.so"})
    assert build(given, environ={"LD_PRELOAD": "/other.so"}).command[1] == f"{PRELOADED[1]}:/mine.so"


def test_over_gloo_there_is_nothing_to_record():
    for request, changes in (
        (replace(REQUEST, launcher="horovodrun"), {}),
        (REQUEST, {"horovod": Horovod(mpi=False, gloo=True), "mpi": None}),
    ):
        with pytest.raises(InvalidArgumentError, match="makes none; use --launcher mpirun"):
            build(request, **changes)


def test_waiting_needs_a_profile(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    status = cli.run(["launch", "-n", "2", "--mpi-profile-wait", "train.py"])
    assert status == 2 and "--mpi-profile-wait needs --mpi-profile" in capsys.readouterr().err


# The library

MPICC = """#!/bin/sh
case "$1" in
  --showme:version) echo "mpicc: Open MPI {version} (Language: C)" ;;
  *) {then} ;;
esac
"""
TO_OUTPUT = 'while [ "$1" != -o ]; do shift; done; '
COPIES = TO_OUTPUT + 'cp {library} "$2"; echo compiled >> {log}'


def fake_mpicc(directory, then, version="5.0.11"):
    directory.mkdir(exist_ok=True)
    file = directory / "mpicc"
    file.write_text(MPICC.format(version=version, then=then))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def a_library():
    """Any library that can be loaded."""
    import _ctypes

    return _ctypes.__file__


def test_it_is_compiled_once_for_each_mpi(tmp_path):
    said, log = [], tmp_path / "log"
    mpicc = fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=log))
    first = mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "cache", said.append)
    again = mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "cache", said.append)
    assert first == again and first.is_file() and log.read_text().count("compiled") == 1
    assert len(said) == 1 and "once for this MPI" in said[0]
    assert {entry.name for entry in first.parent.iterdir()} == {mpi_recorder.NAME, "manifest.json"}
    fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=log), version="5.1.0")
    assert mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "cache", said.append) != first
    assert len(said) == 2


def test_only_the_recorder_that_was_compiled_is_preloaded(tmp_path):
    said, log = [], tmp_path / "log"
    mpicc = fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=log))
    cache = tmp_path / "cache"
    library = mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, cache, said.append)
    good = library.read_bytes()
    library.write_bytes(good + b"x")
    assert mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, cache, said.append) == library
    assert library.read_bytes() == good and "has SHA-256" in said[1] and log.read_text().count("compiled") == 2
    (library.parent / "manifest.json").unlink()  # as of earlier versions, which had none
    mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, cache, said.append)
    assert library.read_bytes() == good and log.read_text().count("compiled") == 3
    library.chmod(0o664)  # with its sum beside it, whoever can write to one can write to both
    with pytest.raises(InstallError, match=f"{library} belongs to .* mode 0664; expected you or root"):
        mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, cache, said.append)
    assert log.read_text().count("compiled") == 3


def test_a_compile_that_was_killed_leaves_nothing_that_is_preloaded(tmp_path):
    # The compiler ends hvdkit by a signal that nobody can catch, with half a library written.
    mpicc = fake_mpicc(tmp_path / "bin", 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; kill -9 $PPID')
    code = "import sys; from pathlib import Path; from hvdkit.prepare.install import mpi_recorder\n"
    code += "mpi_recorder.ensure(Path(sys.argv[1]), {'PATH': '/usr/bin:/bin'}, Path(sys.argv[2]), print)"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", code, mpicc, tmp_path / "cache"], env=environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL and len(list((tmp_path / "cache").rglob("*.so"))) == 1
    fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=tmp_path / "log"))
    library = mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "cache", lambda _: None)
    assert library.read_bytes() == Path(a_library()).read_bytes()
    assert list((tmp_path / "cache").rglob("*.so")) == [library]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("echo 'x.c:1: error: mpi.h: No such file' >&2; exit 1", "mpi.h: No such file"),
        (TO_OUTPUT + 'echo > "$2"', "cannot be loaded"),
    ],
    ids=["fails", "makes no library"],
)
def test_what_does_not_compile_is_said_and_leaves_nothing(tmp_path, then, said):
    mpicc = fake_mpicc(tmp_path / "bin", then)
    with pytest.raises(LaunchError, match=said):
        mpi_recorder.ensure(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "cache", lambda _: None)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_mpicc(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LaunchError, match=r"needs the MPI's compiler mpicc .* none in .*empty"):
        recordings.recorder(empty, {"PATH": "/nosuch"}, dry=False)
    assert recordings.recorder(empty, {}, dry=True) == Path(mpi_recorder.NAME)


def test_a_cache_whose_path_the_loader_would_split(tmp_path):
    mpicc = fake_mpicc(tmp_path / "bin", "true")
    with pytest.raises(LaunchError, match="XDG_CACHE_HOME"):
        mpi_recorder.path_of(mpicc, {"PATH": "/usr/bin:/bin"}, tmp_path / "my cache")


def test_an_install_has_it_compiled_and_goes_on_where_that_fails(tmp_path):
    mpicc = fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=tmp_path / "log"))
    environ, said = {"PATH": "/usr/bin:/bin"}, []
    mpi = SimpleNamespace(bin=mpicc.parent)
    machine = SimpleNamespace(mpi=mpi, environ=environ, cache_directory=tmp_path / "cache")
    install_cli._compile_mpi_recorder(machine, SimpleNamespace(say=said.append))
    assert len(list((tmp_path / "cache").rglob(mpi_recorder.NAME))) == 1
    fake_mpicc(tmp_path / "bin", "exit 1", version="9")
    install_cli._compile_mpi_recorder(machine, SimpleNamespace(say=said.append))
    assert said[-1].startswith("Note: The recorder of MPI calls cannot be compiled")
    install_cli._compile_mpi_recorder(SimpleNamespace(mpi=None), None)


def test_a_dry_run_compiles_nothing(tmp_path, monkeypatch):
    log = tmp_path / "log"
    mpicc = fake_mpicc(tmp_path / "bin", COPIES.format(library=a_library(), log=log))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(facts, "recorded_horovod", lambda: Horovod(True, True, mpicc.parent))
    request = replace(REQUEST, launcher="srun", dry_run=True)
    found = facts.gather(request, {"PATH": "/usr/bin:/bin"})
    assert found.mpi_recorder.name == mpi_recorder.NAME and found.mpi_recorder.is_relative_to(tmp_path / "cache")
    assert not log.exists() and not found.mpi_recorder.exists()
    assert facts.gather(replace(request, dry_run=False), {"PATH": "/usr/bin:/bin"}).mpi_recorder.is_file()
    assert facts.gather(replace(request, mpi_profile=None), {"PATH": "/usr/bin:/bin"}).mpi_recorder is None


# What a job left


def test_what_a_job_left(tmp_path):
    directory = tmp_path / "a" / "profile"
    prepare, new = recordings.prepare, recordings.new
    before = prepare("--mpi-profile", directory, recordings.MPI_PROFILES)
    assert directory.is_dir() and "no rank wrote" in recordings.mpi_outcome(directory, [])
    write(directory, record(0), record(2))
    said = recordings.mpi_outcome(directory, new(directory, recordings.MPI_PROFILES, before))
    assert f"hvdkit mpi-profile show {directory}" in said and "2 of 4 ranks left no record: 1, 3." in said
    assert not new(directory, recordings.MPI_PROFILES, prepare("--mpi-profile", directory, recordings.MPI_PROFILES))
    with pytest.raises(InvalidArgumentError, match="cannot be made a directory"):
        prepare("--mpi-profile", directory / "mpi_profile.0.json" / "x", recordings.MPI_PROFILES)
