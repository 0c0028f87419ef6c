"""Whatever stands behind the command reaches the script as it was typed, past the option parser of every launcher."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit.jobs.launch import plan
from hvdkit.jobs.launch.model import Command, Horovod, LaunchFacts, Mpi
from hvdkit.jobs.launch.options import Request

MPIS = {
    "mpirun": Mpi(Path("/bin/mpirun"), "Open MPI", (5, 0, 11)),
    "Hydra": Mpi(Path("/bin/mpirun"), "MPICH", (5, 0, 2)),
}
PROGRAMS = {name: Path(f"/bin/{name}") for name in ("mpiexec", "aprun", "srun", "jsrun")}
HOROVODRUN = Path("/bin/horovodrun")
FACTS = LaunchFacts(8, False, Path(sys.executable), "/bin", Horovod(True, True), None, HOROVODRUN, False, PROGRAMS)
PRINT = ("/usr/bin/printf", r"%s\0", "first")

OPTIONS = "--num --log --n --num-proc --gloo --config-file -np -n -x -H -c -h --version --map-by --bind-to=core"
SPECIAL = ("", " ", "a b", "'", '"', "\\", "$HOME", "`id`", "a\nb", "*", "~", "--", "-", "::", "日本", "\udcff", "a=b")
ALL = [*OPTIONS.split(), *SPECIAL]
WORDS = st.lists(
    st.sampled_from([*ALL, ":"])
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
    | st.text("-:=nxp ", max_size=4),
    max_size=6,
)


def arrived(argv):
    """What the program is given, when a launcher starts it so."""
    done = subprocess.run(argv, capture_output=True, check=True)
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


def started(words, launcher, **more):
    facts = replace(FACTS, mpi=MPIS.get(launcher))
    request = Request(2, (), launcher="mpirun" if launcher in MPIS else launcher, **more)
    job = plan.build(request, facts, Command((*PRINT, *words)), {})
    return job.launcher, job.command


@pytest.mark.parametrize("launcher", [*MPIS, *PROGRAMS])
@settings(max_examples=25)
@given(WORDS)
@example([":", *ALL])
def test_launchers_that_part_programs_by_colons(launcher, words):
    """They stop at the first word that is no option; Open MPI 5 looks further."""
    _, command = started(words, launcher)
    assert ":" not in command
    if launcher == "mpirun":
        for word in command:  # as prterun does before it parses
            assert not word.startswith(("--map-by", "--rank-by", "--bind-to", "--runtime-options"))
            assert word not in ("--personality", "--bindto", "--rankby")
    assert arrived(command) == ["first", *words]


@pytest.mark.parametrize("kind", ["static", "elastic"])
@settings(max_examples=25)
@given(WORDS)
@example(ALL)
def test_horovodrun_by_its_own_parser_and_its_own_command_line(kind, words):
    runner = pytest.importorskip("horovod.runner.launch")
    gloo = pytest.importorskip("horovod.runner.gloo_run")
    more = {"elastic": True, "min_np": 1, "max_np": 2, "host_discovery_script": Path("hosts.sh")}
    launcher, command = started(words, "horovodrun", **(more if kind == "elastic" else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*launcher, *command])
        parsed = runner.parse_args()
    assert (parsed.num_proc, parsed.use_gloo, parsed.verbose, parsed.config_file) == (2, True, False, None)
    assert parsed.nics == {"lo"}
    line = gloo.get_run_command(parsed.command, "localhost", ["lo"], 1)
    assert arrived(["/bin/sh", "-c", f"env {line}"]) == ["first", *words]


@pytest.mark.parametrize("word", [":", "--map-by", "--bind-to=core", "--personality"])
def test_a_command_line_is_changed_only_where_the_launcher_would_change_it(word):
    assert started(["--num", "3", "a:b", "-x"], "mpirun")[1] == (*PRINT, "--num", "3", "a:b", "-x")
    assert started([word], "mpirun")[1][:4] == (sys.executable, "-I", "-S", "-c")
