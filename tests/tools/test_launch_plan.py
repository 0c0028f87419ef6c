"""Facts in, command line and environment out: no process is started here."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import plan
from hvdkit.jobs.launch.model import Command, Horovod, LaunchFacts, Mpi
from hvdkit.jobs.launch.options import Request

OPEN_MPI_5 = Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11))
OPEN_MPI_4 = Mpi(Path("/usr/bin/mpirun"), "Open MPI", (4, 1, 4))
MPICH = Mpi(Path("/opt/mpich/bin/mpirun"), "MPICH", (5, 0, 2))
INTEL = Mpi(Path("/opt/intel/bin/mpirun"), "Intel MPI", (2021, 18, 1))
FACTS = LaunchFacts(
    cores=8,
    root=False,
    python=Path("/venv/bin/python"),
    path="/venv/bin:/usr/bin",
    horovod=Horovod(mpi=True, gloo=True, mpi_bin=Path("/venv/bin")),
    mpi=OPEN_MPI_5,
    horovodrun=Path("/venv/bin/horovodrun"),
)
COMMAND = Command(("/venv/bin/python", "train.py", "--epochs", "3"), script=1)
ENVIRON = {"PATH": "/venv/bin:/usr/bin", "HOME": "/home/me"}
REQUEST = Request(2, ("train.py",))


def build(request=REQUEST, facts=FACTS, command=COMMAND, environ=ENVIRON):
    return plan.build(request, facts, command, environ)


def launcher_words(**changes):
    facts = replace(FACTS, mpi=changes.pop("mpi", OPEN_MPI_5), cores=changes.pop("cores", 8))
    job = build(replace(REQUEST, **changes), facts)
    return shlex.join(job.launcher)


YIELD = "--mca mpi_yield_when_idle 1"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, f"/venv/bin/mpirun -n 2 --bind-to none {YIELD}"),
        ({"n": 9}, f"/venv/bin/mpirun -n 9 --map-by :OVERSUBSCRIBE --bind-to none {YIELD}"),
        ({"n": 8}, f"/venv/bin/mpirun -n 8 --bind-to none {YIELD}"),
        ({"depth": 2, "n": 3}, f"/venv/bin/mpirun -n 3 --map-by slot:PE=2 --bind-to core {YIELD}"),
        ({"bind": "core", "n": 3}, f"/venv/bin/mpirun -n 3 --map-by slot:PE=2 --bind-to core {YIELD}"),
        ({"bind": "socket"}, f"/venv/bin/mpirun -n 2 --map-by package --bind-to package {YIELD}"),
        ({"cpu_bind": "numa"}, f"/venv/bin/mpirun -n 2 --bind-to numa {YIELD}"),
        ({"cpu_bind": "list:0-1", "bind": "core"}, f"/venv/bin/mpirun -n 2 --bind-to list:0-1 {YIELD}"),
        ({"mpi": OPEN_MPI_4, "bind": "socket"}, f"/usr/bin/mpirun -n 2 --map-by socket --bind-to socket {YIELD}"),
        ({"mpi": OPEN_MPI_4}, f"/usr/bin/mpirun -n 2 --bind-to none {YIELD}"),
        ({"mpi": MPICH}, "/opt/mpich/bin/mpirun -n 2 -bind-to none"),
        ({"mpi": MPICH, "n": 9}, "/opt/mpich/bin/mpirun -n 9 -bind-to none"),
        ({"mpi": MPICH, "depth": 4}, "/opt/mpich/bin/mpirun -n 2 -bind-to core:4"),
        ({"mpi": MPICH, "bind": "socket"}, "/opt/mpich/bin/mpirun -n 2 -bind-to socket"),
        ({"mpi": MPICH, "cpu_bind": "numa"}, "/opt/mpich/bin/mpirun -n 2 -bind-to numa"),
        ({"mpi": INTEL}, "/opt/intel/bin/mpirun -n 2"),
        ({"mpi": INTEL, "depth": 4}, "/opt/intel/bin/mpirun -n 2 -bind-to core:4"),
        ({"mpi": INTEL, "cpu_bind": "numa"}, "/opt/intel/bin/mpirun -n 2"),
        ({"launcher": "horovodrun"}, "/venv/bin/horovodrun --gloo -np 2 --network-interface lo env --"),
        ({"launcher": "horovodrun", "n": 9}, "/venv/bin/horovodrun --gloo -np 9 --network-interface lo env --"),
    ],
)
def test_command_line_of_each_launcher(changes, expected):
    assert launcher_words(**changes) == expected


@pytest.mark.parametrize("mpi", [OPEN_MPI_5, MPICH, INTEL])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"bind": "core"}, {"--bind core"}),
        ({"bind": "numa"}, {"--bind numa"}),
        ({"bind": "numa", "depth": 2}, {"--bind numa", "--depth"}),
        ({"bind": "core", "cpu_bind": "numa"}, {"--cpu-bind"}),
        ({"bind": "core", "depth": 2}, {"--depth"}),
        ({"depth": 2}, {"--depth"}),
    ],
)
def test_the_explanation_names_the_option_that_binds(mpi, options, asked):
    told = plan.explanation(build(replace(REQUEST, **options), replace(FACTS, mpi=mpi)))
    assert set(re.findall(r"--bind \w+|--cpu-bind|--depth", told)) == asked


@pytest.mark.parametrize(
    ("facts", "request_", "variables"),
    [
        (FACTS, REQUEST, {}),
        (replace(FACTS, root=True), REQUEST, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}),
        (replace(FACTS, root=True), replace(REQUEST, launcher="horovodrun"), {}),
        (replace(FACTS, root=True, mpi=MPICH), REQUEST, {}),
        (replace(FACTS, mpi=INTEL), REQUEST, {"I_MPI_PIN": "0"}),
        (replace(FACTS, mpi=INTEL), replace(REQUEST, bind="numa"), {"I_MPI_PIN_DOMAIN": "numa"}),
        (FACTS, replace(REQUEST, timeline=Path("/tmp/t.json")), {"HOROVOD_TIMELINE": "/tmp/t.json"}),
        (FACTS, replace(REQUEST, monitor=Path("/tmp/run")), {"HVDKIT_MONITOR": "/tmp/run"}),
        (FACTS, replace(REQUEST, variables={"A": "b=c"}), {"A": "b=c"}),
        (FACTS, replace(REQUEST, variables={"OMP_NUM_THREADS": "5"}, threads=2), {"OMP_NUM_THREADS": "5"}),
    ],
)
def test_variables_of_each_launcher(facts, request_, variables):
    common = {
        **{"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"},
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    job = build(request_, facts)
    assert job.added == {**common, **variables}
    assert job.environment == {**ENVIRON, **common, **variables}


@pytest.mark.parametrize(
    ("n", "cores", "threads", "environ", "expected"),
    [
        (2, 8, None, {}, "4"),
        (3, 8, None, {}, "2"),
        (9, 8, None, {}, "1"),
        (2, 8, 6, {"OMP_NUM_THREADS": "3"}, "6"),
        (2, 8, None, {"OMP_NUM_THREADS": ""}, "4"),
        (2, 8, None, {"OMP_NUM_THREADS": "3"}, "3"),
    ],
)
def test_threads_are_an_even_share_unless_someone_chose(n, cores, threads, environ, expected):
    job = build(replace(REQUEST, n=n, threads=threads), replace(FACTS, cores=cores), environ={**ENVIRON, **environ})
    assert job.environment["OMP_NUM_THREADS"] == expected


def test_what_the_user_has_set_is_neither_changed_nor_printed():
    environ = {**ENVIRON, "PYTHONUNBUFFERED": "x", "PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "3"}
    environ["GLIBC_TUNABLES"] = "glibc.malloc.check=1"
    assert build(environ=environ).added == {}


def test_path_is_added_only_when_it_changes():
    assert build(environ={"PATH": "/usr/bin"}).added["PATH"] == "/venv/bin:/usr/bin"
    assert "PATH" not in build().added


@pytest.mark.parametrize(
    ("launcher", "horovod", "mpi", "expected"),
    [
        ("auto", Horovod(mpi=True, gloo=True), OPEN_MPI_5, "mpirun"),
        ("auto", Horovod(mpi=False, gloo=True), None, "horovodrun"),
        ("auto", Horovod(mpi=False, gloo=True), OPEN_MPI_5, "horovodrun"),
        ("auto", None, OPEN_MPI_5, "mpirun"),
        ("horovodrun", Horovod(mpi=True, gloo=True), OPEN_MPI_5, "horovodrun"),
        ("mpirun", None, OPEN_MPI_5, "mpirun"),
    ],
)
def test_launcher_that_is_chosen(launcher, horovod, mpi, expected):
    job = build(replace(REQUEST, launcher=launcher), replace(FACTS, horovod=horovod, mpi=mpi))
    assert job.launcher_name == expected
    assert Path(job.launcher[0]).name == expected


def test_nothing_to_launch_with_names_the_command_that_helps():
    with pytest.raises(LaunchError, match="hvdkit install"):
        build(facts=replace(FACTS, horovod=None, mpi=None))


def test_an_mpi_that_is_gone_is_named():
    with pytest.raises(LaunchError, match=r"no mpirun in /venv/bin.*--launcher horovodrun"):
        build(facts=replace(FACTS, mpi=None))


@pytest.mark.parametrize(
    ("request_", "facts", "message"),
    [
        (replace(REQUEST, launcher="mpirun"), replace(FACTS, mpi=None), "none in /venv/bin"),
        (replace(REQUEST, launcher="mpirun"), replace(FACTS, mpi=None, horovod=None), "none on PATH"),
        (replace(REQUEST, launcher="horovodrun"), replace(FACTS, horovodrun=None), "hvdkit install"),
        (
            replace(REQUEST, launcher="horovodrun", bind="core"),
            FACTS,
            "--bind core: horovodrun cannot tie ranks to cores",
        ),
        (replace(REQUEST, n=9, bind="core"), FACTS, "9 processes on 8 cores"),
        (replace(REQUEST, n=9, bind="socket"), FACTS, "9 processes on 8 cores"),
        (
            replace(REQUEST, launcher="horovodrun", cpu_bind="numa"),
            FACTS,
            "--cpu-bind is for mpirun, srun, mpiexec",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(request_, facts, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        build(request_, facts)
    assert "\n" not in str(caught.value)


def test_notes_say_when_ranks_share_cores_or_cannot_meet():
    assert build().notes == () and build(replace(REQUEST, notes=("As read.",))).notes == ("As read.",)
    (shared,) = build(replace(REQUEST, n=9)).notes
    assert shared.startswith("9 processes share 8 cores")
    alone = replace(FACTS, horovod=Horovod(mpi=False, gloo=True))
    (note,) = build(replace(REQUEST, launcher="mpirun"), alone).notes
    assert "trains alone" in note


def test_a_script_that_imports_mpi4py_goes_through_it_over_mpi_only(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text("import os\nfrom mpi4py import MPI\n")
    command = Command(("/venv/bin/python", "-u", str(script), "-x"), script=2)
    facts = replace(FACTS, mpi4py=True)
    over_mpi = build(facts=facts, command=command)
    assert over_mpi.command == ("/venv/bin/python", "-u", "-m", "mpi4py", str(script), "-x")
    assert any("mpi4py" in setting.why for setting in over_mpi.settings)
    assert build(replace(REQUEST, launcher="horovodrun"), facts, command).command == command.words
    assert build(facts=replace(facts, mpi4py=False), command=command).command == command.words
    script.write_text("# from mpi4py import MPI\nimport mpi4py_helpers\n")
    assert build(facts=facts, command=command).command == command.words


def test_command_line_can_be_pasted_into_a_shell():
    command = Command(("/venv/bin/python", "my train.py", "--name", "it's $HOME; ok"), script=1)
    line = plan.command_line(build(replace(REQUEST, variables={"WORDS": "a b"}), command=command))
    assert line == (
        "env OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 PYTHONHASHSEED=0 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 'WORDS=a b' "
        f"/venv/bin/mpirun -n 2 --bind-to none {YIELD} "
        "/venv/bin/python 'my train.py' --name 'it'\"'\"'s $HOME; ok'"
    )


def test_explanation_gives_every_word_and_variable_with_a_reason():
    request = replace(REQUEST, n=9, timeline=Path("/tmp/t.json"), variables={"A": "1"})
    job = build(request, replace(FACTS, root=True), environ={"PATH": "/usr/bin"})
    text = plan.explanation(job)
    headings = [line for line in text.splitlines() if not line.startswith(" ")]
    assert headings[0] == "launcher mpirun: Horovod was built with MPI; Open MPI 5.0.11 is used"
    shown = " ".join(headings[1:])
    for word in (*job.launcher[1:], *(f"{name}={value}" for name, value in job.added.items())):
        assert word in shown
    assert all(line.strip() for line in text.splitlines())
    reasons = [line for line in text.splitlines() if line.startswith("    ")]
    assert len(reasons) >= sum(bool(setting.words or setting.variables) for setting in job.settings)
