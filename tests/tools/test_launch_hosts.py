"""Jobs on several hosts and in batch jobs: where the ranks go, and the command line of each launcher."""

import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import facts, hosts, lines, options, plan
from hvdkit.jobs.launch.model import Command, Horovod, Host, LaunchFacts, Mpi
from hvdkit.jobs.launch.options import OPTIONS, Request

ROOT = Path(__file__).parents[2]
PROGRAMS = {name: Path(f"/site/bin/{name}") for name in lines.BATCH}
FACTS = LaunchFacts(
    cores=64,
    root=False,
    python=Path("/venv/bin/python"),
    path="/usr/bin",
    horovod=Horovod(mpi=True, gloo=True),
    mpi=Mpi(Path("/usr/bin/mpirun"), "Open MPI", (5, 0, 11)),
    horovodrun=Path("/venv/bin/horovodrun"),
    programs=PROGRAMS,
)
QUIET = {
    **{"PATH": "/usr/bin", "OMP_NUM_THREADS": "16", "HOME": "/home/me"},
    **{"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
TWO_HOSTS = {"hosts": (Host("h1", 4), Host("h2", 4)), "hosts_chosen": True}
COMMAND = Command(("python", "train.py"), script=1)


def build(environ=QUIET, found=FACTS, **options):
    return plan.build(Request(8, ("python", "train.py"), **options), found, COMMAND, environ)


def line(**options):
    return plan.command_line(build(**options))


ALIVE = {
    f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in (("time", "20"), ("intvl", "10"), ("probes", "4"))
}
SHOWN_ALIVE = " ".join(["env", *(f"{name}={value}" for name, value in ALIVE.items())])
MPIRUN = f"{SHOWN_ALIVE} /usr/bin/mpirun -n 8 --host h1:4,h2:4"
YIELD = "--mca mpi_yield_when_idle 1"
PASSED = (
    "-x GLIBC_TUNABLES -x OMP_NUM_THREADS -x PATH -x PYTHONHASHSEED -x PYTHONUNBUFFERED -x HVDKIT_SECRET "
    "python train.py"
)
SRUN_ENDS = "--kill-on-bad-exit=1 --quit-on-interrupt --export=ALL python train.py"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The forms that sites document: Polaris, Theta, Slurm, Summit.
        (
            {"launcher": "mpiexec", "ppn": 4, "depth": 16},
            "/site/bin/mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind depth python train.py",
        ),
        (
            {"launcher": "aprun", "ppn": 4, "depth": 16},
            "/site/bin/aprun -n 8 -N 4 --cc depth -d 16 python train.py",
        ),
        (
            {"launcher": "mpiexec", "ppn": 4, "depth": 8, "cpu_bind": "list:8-15:0-7"},
            "/site/bin/mpiexec -n 8 --ppn 4 --cpu-bind list:8-15:0-7 python train.py",
        ),
        (
            {"launcher": "srun", "ppn": 4, "depth": 7, "cpu_bind": "mask_cpu:fe,fe00"},
            "/site/bin/srun --ntasks=8 --ntasks-per-node=4 --nodes=2 --cpus-per-task=7 --cpu-bind=mask_cpu:fe,fe00 "
            f"{SRUN_ENDS}",
        ),
        (
            {"launcher": "srun", "ppn": 4, "depth": 16},
            f"/site/bin/srun --ntasks=8 --ntasks-per-node=4 --nodes=2 --cpus-per-task=16 --cpu-bind=cores {SRUN_ENDS}",
        ),
        (
            {"launcher": "srun", "ppn": 4, "depth": 16, "gpus_per_node": 4},
            "/site/bin/srun --ntasks=8 --ntasks-per-node=4 --nodes=2 --cpus-per-task=16 --gpus-per-node=4 "
            f"--cpu-bind=cores {SRUN_ENDS}",
        ),
        (
            {"launcher": "jsrun", "ppn": 4, "depth": 16, "gpus_per_node": 4},
            "/site/bin/jsrun -n 8 -a 1 -c 16 -g 1 -r 4 -b packed:16 python train.py",
        ),
        ({"launcher": "mpirun", **TWO_HOSTS}, f"{MPIRUN} --map-by ppr:4:node --bind-to none {YIELD} {PASSED}"),
        (
            {"launcher": "mpirun", "depth": 16, **TWO_HOSTS},
            f"{MPIRUN} --map-by ppr:4:node:PE=16 --bind-to core {YIELD} {PASSED}",
        ),
        (
            {"launcher": "mpirun", "bind": "socket", **TWO_HOSTS},
            f"{MPIRUN} --map-by ppr:4:node --bind-to package {YIELD} {PASSED}",
        ),
        (
            {"launcher": "mpirun", "hosts": (Host("h1", 6), Host("h2", 2))},
            f"{SHOWN_ALIVE} /usr/bin/mpirun -n 8 --host h1:6,h2:2 --map-by slot --bind-to none {YIELD} {PASSED}",
        ),
        (
            {"launcher": "horovodrun", **TWO_HOSTS},
            "/venv/bin/horovodrun --gloo -np 8 -H h1:4,h2:4 env -- python train.py",
        ),
        # Ties, and hosts that the user names.
        ({"launcher": "mpiexec"}, "/site/bin/mpiexec -n 8 --cpu-bind none python train.py"),
        (
            {"launcher": "mpiexec", "ppn": 4, "bind": "numa", **TWO_HOSTS},
            "/site/bin/mpiexec -n 8 --ppn 4 --cpu-bind numa --hosts h1,h2 python train.py",
        ),
        (
            {"launcher": "mpiexec", "ppn": 4, "depth": 16, "bind": "numa"},
            "/site/bin/mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind numa python train.py",
        ),
        ({"launcher": "aprun", "bind": "core"}, "/site/bin/aprun -n 8 --cc cpu python train.py"),
        (
            {"launcher": "aprun", "hosts": (Host("nid00012", 4), Host("13", 4)), "hosts_chosen": True},
            "/site/bin/aprun -n 8 --cc none -L 12,13 python train.py",
        ),
        ({"launcher": "srun"}, f"/site/bin/srun --ntasks=8 --cpu-bind=none {SRUN_ENDS}"),
        (
            {"launcher": "srun", "ppn": 8, "bind": "numa", **TWO_HOSTS},
            "/site/bin/srun --ntasks=8 --ntasks-per-node=8 --nodes=1 --cpu-bind=ldoms --nodelist=h1 " + SRUN_ENDS,
        ),
        ({"launcher": "jsrun"}, "/site/bin/jsrun -n 8 -a 1 python train.py"),
    ],
)
def test_command_line_of_each_launcher(options, expected):
    assert line(**options) == expected


@pytest.mark.parametrize(
    ("implementation", "expected"),
    [
        ("MPICH", "/usr/bin/mpirun -n 8 -hosts h1:4,h2:4 -bind-to core:16 python train.py"),
        ("Intel MPI", "/usr/bin/mpirun -n 8 -hosts h1,h2 -ppn 4 -bind-to core:16 python train.py"),
    ],
)
def test_command_line_of_hydra_on_several_hosts(implementation, expected):
    found = replace(FACTS, mpi=Mpi(Path("/usr/bin/mpirun"), implementation, (4, 2)))
    assert line(found=found, launcher="mpirun", depth=16, **TWO_HOSTS) == expected


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("mpiexec", "--env HOROVOD_TIMELINE=/tmp/t.json --env 'A=b c'"),
        ("aprun", "-e HOROVOD_TIMELINE=/tmp/t.json -e 'A=b c'"),
        ("srun", "--export=ALL"),
        ("jsrun", "-E HOROVOD_TIMELINE -E A"),
        ("mpirun", "-x HOROVOD_TIMELINE -x A " + PASSED.removesuffix(" python train.py")),
    ],
)
def test_how_variables_reach_ranks_on_other_hosts(launcher, words):
    hosts = TWO_HOSTS if launcher == "mpirun" else {}
    job = build(launcher=launcher, timeline=Path("/tmp/t.json"), variables={"A": "b c"}, **hosts)
    assert shlex.join(job.launcher).endswith(f" {words}")
    added = {"HOROVOD_TIMELINE": "/tmp/t.json", "A": "b c"}
    assert job.added == {**added, **(ALIVE if launcher == "mpirun" else {})}
    assert added.items() <= job.environment.items()
    assert words in plan.explanation(job)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({"launcher": "mpiexec", "ppn": 4}, "16"),
        ({"launcher": "mpiexec", "ppn": 4, "depth": 8}, "8"),
        ({"launcher": "mpiexec", "ppn": 4, "depth": 8, "threads": 2}, "2"),
        ({"launcher": "mpirun", **TWO_HOSTS}, "16"),
        ({"launcher": "mpirun", "depth": 4}, "4"),
        ({"launcher": "aprun", "ppn": 4}, None),
        ({"launcher": "jsrun", "ppn": 4}, None),
        ({"launcher": "srun"}, None),
    ],
)
def test_threads_are_those_of_a_host_and_never_a_guess(options, threads):
    job = build({"PATH": "/usr/bin"}, **options)
    assert job.added.get("OMP_NUM_THREADS") == threads
    assert threads is not None or "say them with --depth" in plan.explanation(job)


def test_srun_inside_an_srun_step_does_not_wait_for_its_cores():
    for step, added in (("0", {"SLURM_OVERLAP": "1"}), ("4294967290", {}), ("4294967291", {}), ("", {})):
        assert build({**QUIET, "SLURM_STEP_ID": step}, launcher="srun", ppn=4).added == added


@pytest.mark.parametrize("launcher", ["mpiexec", "aprun", "srun"])
def test_the_explanation_names_the_option_that_binds(launcher):
    for given, option in (({"bind": "numa"}, "--bind numa"), ({"bind": "numa", "cpu_bind": "x"}, "--cpu-bind")):
        assert f"{option}: the cores of each rank" in plan.explanation(build(launcher=launcher, **given))


def test_under_horovodrun_depth_only_says_the_threads_as_its_help_says():
    with_depth, without = (build(launcher="horovodrun", depth=depth, threads=4) for depth in (4, None))
    assert with_depth.launcher == without.launcher
    assert "(not horovodrun)" in OPTIONS["depth"].click["help"]


def test_notes_name_what_other_hosts_need():
    (note,) = build(launcher="horovodrun", **TWO_HOSTS).notes
    assert "by ssh" in note and "password" in note
    (note,) = build(launcher="jsrun").notes
    assert "--depth" in note
    assert build(launcher="mpirun", depth=8).launcher[3:7] == ("--map-by", "slot:PE=8", "--bind-to", "core")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "srun", "ppn": 3}, "-n 8 is no multiple of --ppn 3, which srun needs"),
        ({"launcher": "jsrun", "ppn": 3}, "-n 8 is no multiple of --ppn 3, which jsrun needs"),
        ({"launcher": "mpirun", "ppn": 4}, "needs 2 hosts, and there is this one machine"),
        ({"launcher": "mpirun", "depth": 9}, "need 72 cores, and this machine has 64"),
        ({"launcher": "mpirun", "gpus_per_node": 1}, "--gpus-per-node is for srun, jsrun, and this job is started by"),
        ({"launcher": "jsrun", "cpu_bind": "list:0:1"}, "--cpu-bind is for mpirun, srun, mpiexec, aprun, and this job"),
        ({"launcher": "aprun", "bind": "socket"}, "use core or numa"),
        ({"launcher": "jsrun", "bind": "core"}, "leave it out, or give --depth"),
        ({"launcher": "aprun", **TWO_HOSTS}, "'h1': aprun takes node ids"),
        ({"launcher": "jsrun", **TWO_HOSTS}, "leave --hosts and --hostfile out"),
        ({"launcher": "jsrun", "gpus_per_node": 6, "ppn": 4}, "must be a multiple of --ppn"),
        ({"launcher": "srun", "hosts": (Host("a", 6), Host("b", 2)), "hosts_chosen": True}, "same number of slots"),
        (
            {
                "launcher": "mpirun",
                "found": replace(FACTS, mpi=Mpi(Path("mpirun"), "Intel MPI", (2021,))),
                "hosts": (Host("a", 6), Host("b", 2)),
            },
            "Intel MPI starts as many ranks on every host, got a:6,b:2; give all the same number of slots",
        ),
        ({"launcher": "mpiexec", "found": replace(FACTS, programs={})}, "mpiexec of PALS is not installed"),
        ({"launcher": "aprun", "found": replace(FACTS, programs={})}, "aprun is not installed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("launcher", options.LAUNCHERS)
def test_a_launcher_that_is_not_installed_can_be_shown(launcher):
    nothing = replace(FACTS, programs={}, mpi=None, horovodrun=None)
    assert build(found=nothing, launcher=launcher, dry_run=True).launcher[0] == launcher


# Hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1:4,h2:2", [("h1", 4), ("h2", 2)]),
        ("h1, node-2.site.org", [("h1", None), ("node-2.site.org", None)]),
        ("h1,h1,h2", [("h1", 2), ("h2", None)]),
    ],
)
def test_hosts_of_the_option(text, expected):
    assert hosts.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "h1:", "h1:0", "h1:-1", "h1:x", ":4", "h1;rm", "-x", "h1,,h2", "h1:4,h1:2", "h 1"]
)
def test_bad_hosts_are_one_sentence(text):
    with pytest.raises(InvalidArgumentError, match="--hosts"):
        hosts.parse(text)


def test_host_files_of_every_kind(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nh1 slots=4  # the old one\n\nh2:2\nh3\nh3\nh3\n")
    assert hosts.read(file) == [("h1", 4), ("h2", 2), ("h3", 3)]
    file.write_text("h1:4\n\n# x\nh2 slots=many\n")
    with pytest.raises(InvalidArgumentError, match="line 4: 'h2 slots=many' is no HOST"):
        hosts.read(file)
    file.write_text("\n")
    with pytest.raises(InvalidArgumentError, match="names no host"):
        hosts.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="it is not text"):
        hosts.read(file)
    with pytest.raises(InvalidArgumentError, match="No such file"):
        hosts.read(tmp_path / "nosuch")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_ranks_are_placed_on_what_is_named_or_what_the_batch_job_has():
    def place(n, ppn=None, given=None, environ=SLURM, **options):
        asked = Request(n, ("x",), ppn=ppn)
        placed = hosts.placed(asked, given, environ, hostname="n1", **options)
        return [str(host) for host in placed.hosts], placed.hosts_chosen

    assert place(4) == (["n1:2", "n2:2"], False)
    assert place(3) == (["n1:2", "n2:2"], False)
    assert place(4, ppn=4) == (["n1:4", "n2:4"], False)
    assert place(4, given=[("n2.cluster", 8)]) == (["n2.cluster:8"], True)
    assert place(4, 2, [("n1", 8), ("n2", 8)]) == (["n1:2", "n2:2"], True)
    assert place(2, given=[("localhost", 2)]) == ([], True)
    assert place(2, given=[("localhost", 2)], anywhere=True) == (["n1:2"], True)
    assert place(2, environ={**SLURM, "SLURM_JOB_NODELIST": "n1"}, anywhere=True) == ([], False)
    assert place(2, environ={}) == ([], False)
    assert place(2, environ={**SLURM, "SLURM_JOB_NODELIST": "n1"}) == ([], False)


def test_ranks_on_each_host_are_enough_to_say():
    def ranks(ppn, given=None, environ=SLURM):
        return hosts.placed(Request(0, ("x",), ppn=ppn), given, environ, hostname="n1").n

    assert ranks(4) == 8
    assert ranks(4, [("n1", 4), ("n2", 2)]) == 6
    assert ranks(3, environ={}) == 3


def test_tf_config_names_the_workers_in_the_order_of_their_ranks():
    there = (Host("n1", 2), Host("n2", 2))
    found = replace(FACTS, master_port=20000)
    job = plan.build(Request(3, ("train.py",), hosts=there, tf_config=True), found, COMMAND, QUIET)
    assert job.added["HVDKIT_WORKERS"] == "n1:20001,n1:20002,n2:20001"
    here = plan.build(Request(2, ("train.py",), tf_config=True), found, COMMAND, QUIET)
    assert here.added["HVDKIT_WORKERS"] == "127.0.0.1:20001,127.0.0.1:20002"


@pytest.mark.parametrize(
    ("n", "ppn", "given", "message"),
    [
        (9, None, [("n1", 4), ("n2", 4)], "9 ranks are more than the 8 slots of n1:4, n2:4;"),
        (9, 4, None, "9 ranks are more than the 8 slots of n1:4, n2:4 with --ppn 4;"),
        (2, None, [("n1", 1), ("n3", 1)], r"'n3' is not one of this batch job's hosts \(n1, n2\)"),
        (3, None, [("localhost", 2)], "3 ranks are more than the 2 slots of localhost:2"),
    ],
)
def test_hosts_without_room_and_unknown_hosts(n, ppn, given, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        hosts.placed(Request(n, ("x",), ppn=ppn), given, SLURM, hostname="n1")
    assert "\n" not in str(caught.value)


# The launcher of the batch job


@pytest.mark.parametrize(
    ("environ", "launcher", "why"),
    [
        ({"SLURM_JOB_ID": "7"}, "srun", "this is Slurm job 7 (SLURM_JOB_ID), and srun is installed"),
        ({"PBS_JOBID": "7.x"}, "mpiexec", "this is PBS job 7.x (PBS_JOBID), and PALS's mpiexec is installed"),
        ({"LSB_JOBID": "7"}, "jsrun", "this is LSF job 7 (LSB_JOBID), and jsrun is installed"),
        ({"COBALT_JOBID": "7"}, "aprun", "this is Cobalt job 7 (COBALT_JOBID), and aprun is installed"),
    ],
)
def test_the_batch_job_chooses_its_launcher_where_it_is_installed(tmp_path, environ, launcher, why):
    there = program(tmp_path / "pals" / launcher, "")
    assert facts.called_for(str(there.parent), environ) == (launcher, why, there)
    assert facts.called_for(str(tmp_path), environ) is None
    assert facts.called_for(str(there.parent), {}) is None
    job = build(found=replace(FACTS, batch=(launcher, why)))
    assert (job.launcher_name, job.elsewhere) == (launcher, True)
    assert plan.explanation(job).startswith(f"launcher {launcher}: {why}\n")
    assert build(found=replace(FACTS, batch=(launcher, why)), launcher="mpirun").launcher_name == "mpirun"


def program(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_mpiexec_counts_only_when_it_is_that_of_pals(tmp_path):
    environ = {"PATH": "/usr/bin:/bin"}
    for place, text in (("pals/1.2/bin", "exit 1"), ("a", "echo 'mpiexec (PALS) 1.2'")):
        file = program(tmp_path / place / "mpiexec", text)
        assert facts.find_batch_launcher("mpiexec", str(file.parent), environ) == file
    other = program(tmp_path / "b/mpiexec", "echo 'mpiexec (Open MPI) 5.0'")
    broken = program(tmp_path / "c/mpiexec", "")
    broken.write_text("#!/nowhere\n")
    for file in (other, broken):
        assert facts.find_batch_launcher("mpiexec", str(file.parent), environ) is None
    assert facts.find_batch_launcher("aprun", str(tmp_path / "b"), environ) is None


def test_gathering_asks_for_the_batch_jobs_launcher_alone(tmp_path, monkeypatch):
    program(tmp_path / "srun", "")
    monkeypatch.setattr(facts, "installed_horovod", lambda python: pytest.fail("Horovod was loaded"))
    monkeypatch.setattr(facts, "recorded_horovod", lambda: None)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **SLURM}
    found = facts.gather(Request(2, ("x",), hosts=(Host("n1", 1), Host("n2", 1))), environ)
    assert found.batch is not None and found.batch[0] == "srun"
    assert found.programs == {"srun": tmp_path / "srun"}
    monkeypatch.setattr(facts, "installed_horovod", lambda python: Horovod(mpi=False, gloo=True))
    for request in (Request(2, ("x",), hosts_chosen=True), Request(2, ("x",))):  # placement leaves out this machine
        here = facts.gather(request, environ)
        assert (here.batch, here.programs) == (None, {})


# As it is typed


def test_bad_usage_is_one_sentence_and_status_2(capsys, monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("h1:4\nh2:four\n")
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    for words in (
        "--depth -1",
        "--ppn 0",
        "--hosts h1:1",
        "--hosts h1:x",
        "--hostfile hosts",
        "--hostfile nosuch",
        "--hosts h1:4 --hostfile hosts",
        "--ppn 1 --launcher mpirun",
        "--launcher aprun",
        "--launcher jsrun",
        "--timeline nosuch/t.json",
        "--launcher srun --hosts h1:4 --dry-run --stall-timeout 3 --env HOROVOD_STALL_CHECK_DISABLE=1",
    ):
        status = cli.run(["launch", "-n", "2", *words.split(), "train.py"])
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1), f"{words}: {err}"
        assert err.startswith("hvdkit: ")


@pytest.fixture
def slurm_job(tmp_path):
    """The environment of a Slurm job with an ``srun`` that runs the command once, on this machine."""
    program(tmp_path / "bin/srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURM_PROCID=0 exec "$@"')
    python = Path(sys.executable).parent
    environ = {**os.environ, **SLURM, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}/bin:{python}:/usr/bin:/bin"}
    return {name: value for name, value in environ.items() if not name.startswith("PBS")}


def start(environ, *words, **options):
    command = [sys.executable, "-m", "hvdkit.cli", "launch", *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_a_batch_job_runs_its_launcher_passes_its_status_on_and_starts_again(slurm_job):
    code = "import os; print('attempt', os.environ['HVDKIT_RESTART'], flush=True); raise SystemExit(7)"
    job = start(slurm_job, "-n", "4", "--ppn", "2", "--restarts", "1", "--", sys.executable, "-c", code)
    out, err = job.communicate(timeout=120)
    assert (job.returncode, out) == (7, "[0] attempt 0\n[0] attempt 1\n")
    assert f" on {socket.gethostname()}) exited with status 7; the job was ended." in err
    assert "restart 1 of 1 after status 7" in err
    checked = start(slurm_job, "-n", "4", "--preflight", "--", sys.executable, "-c", "print(1)")
    out, err = checked.communicate(timeout=120)
    assert (checked.returncode, out) == (2, "")
    assert "start 'hvdkit doctor --job' itself" in err


def test_what_dry_run_prints_can_be_pasted(slurm_job):
    shown = start(slurm_job, "-n", "4", "--dry-run", "--env", "A=it's $x", "--", sys.executable, "-c", "import os; "
                  "print(os.environ['A'])").communicate(timeout=60)[0]  # fmt: skip
    done = subprocess.run(["bash", "-c", shown], env=slurm_job, capture_output=True, text=True, timeout=60)
    assert done.stdout == "it's $x\n", done.stderr
