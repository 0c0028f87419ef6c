"""Batch scripts: what they say, that nothing in them is read otherwise than typed, and those in jobs/."""

import importlib.resources
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job import script, site
from hvdkit.jobs.job.script import SYSTEMS
from hvdkit.jobs.job.site import BatchJob, Queue, Site
from hvdkit.jobs.launch.cli import launch
from hvdkit.measure.bench.cli import scaling

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").rglob("*.sh"))
JOB = BatchJob(2, 4, "00:30:00", ("python", "train.py", "--epochs", "3"), account="me")
NASTY = ("python", "my train.py", 'it\'s $HOME `id` \\ "q"', "", "*", "~", "!x", "{a,b}", "#PBS -q other", "é;rm -rf /",
         "\\", "~/data", "then", "it\u2019s \u201cq\u201d")  # fmt: skip


def job(capsys, *words):
    status = cli.run(["job", *words])
    return status, *capsys.readouterr()


def launch_lines(text):
    lines = [line.removeprefix("exec ") for line in text.splitlines()]
    return [line for line in lines if line.startswith(("hvdkit launch ", "hvdkit bench scaling "))]


def parsed(line):
    """The options of a ``hvdkit launch`` or ``hvdkit bench scaling`` line, read by its own parser."""
    words = shlex.split(line.split(" > ")[0], comments=True)
    command, start = (scaling, 3) if words[1] == "bench" else (launch, 2)
    return command.make_context(command.name, words[start:]).params


def launches(line):
    """The arguments of ``hvdkit launch`` for each job that a line of a ready script starts."""
    words = shlex.split(line.split(" > ")[0], comments=True)
    if words[1] == "launch":
        return [words[2:]]
    options = parsed(line)
    passed_on = ["--launcher", options["launcher"]]
    passed_on += ["--depth", str(options["depth"])] if options["depth"] else []
    found = []
    for n in options["ranks"]:
        ppn = ["--ppn", str(min(n, options["ppn"]))] if options["ppn"] else []
        found.append(["-n", str(n), *ppn, *passed_on, "--", *options["command"]])
    return found


def passes_shellcheck(text):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=text, capture_output=True, text=True)
    return done.returncode == 0 or done.stdout


def passes_bash(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return done.returncode == 0 or done.stderr


def test_the_script_for_polaris_word_for_word():
    job_ = BatchJob(2, 4, "00:30:00", ("python", "train.py"), "cnn", "debug-scaling", "me", 16)
    assert script.write(job_, site.find("pbs", "polaris"), "/venv/bin") == (
        "#!/bin/bash -l\n"
        "#PBS -N cnn\n"
        "#PBS -l select=2:system=polaris\n"
        "#PBS -l place=scatter\n"
        "#PBS -l walltime=00:30:00\n"
        "#PBS -j oe\n"
        "#PBS -q debug-scaling\n"
        "#PBS -A me\n"
        "#PBS -l filesystems=home:eagle\n"
        "\n"
        "module use /soft/modulefiles\n"
        "module load conda\n"
        "conda activate base\n"
        "export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET='AWS Libfabric'\n"
        "export LD_LIBRARY_PATH=/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:"
        "$LD_LIBRARY_PATH\n"
        "export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072\n"
        'export PATH=/venv/bin:"$PATH"  # the hvdkit that wrote this script\n'
        "\n"
        'cd "$PBS_O_WORKDIR" || exit 1\n'
        "exec hvdkit launch -n 8 --ppn 4 --depth 16 --launcher mpiexec -- python train.py\n"
    )


@pytest.mark.parametrize(
    ("site_name", "changes", "expected"),
    [
        (
            "slurm",
            {"signal": "USR1@120", "requeue": True, "mail_type": "END,FAIL", "directive": ("--reservation=a b",)},
            [
                "#SBATCH --signal=B:USR1@120",
                "#SBATCH --requeue",
                "#SBATCH --mail-type=END,FAIL",
                "#SBATCH --reservation=a b",
            ],
        ),
        (
            "lsf",
            {"signal": "SIGUSR2@61", "requeue": True, "mail_type": "ALL", "directive": ("-app gpu",)},
            ["#BSUB -wa USR2 -wt 2", "#BSUB -r", "#BSUB -B -N", "#BSUB -app gpu"],
        ),
        (
            "pbs",
            {"requeue": True, "mail_type": "ALL", "directive": ("-W group_list=me",)},
            ["#PBS -r y", "#PBS -m bea", "#PBS -W group_list=me"],
        ),
        (
            "slurm",
            {"ppn": None, "gpus_per_node": 2},
            ["#SBATCH --ntasks-per-node=2", "exec hvdkit launch -n 4 --ppn 2"],
        ),
        ("polaris", {"ppn": None}, ["exec hvdkit launch -n 8 --ppn 4 --depth 8"]),
        ("aurora", {"ppn": None, "gpus_per_node": 0}, ["exec hvdkit launch -n 4 --ppn 2 --depth 102"]),
        ("pbs", {"gpus_per_node": 4, "depth": 8}, ["#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4"]),
        ("pbs", {}, ["#PBS -l select=2:ncpus=4:mpiprocs=4", "#PBS -A me", "exec hvdkit launch -n 8 --ppn 4 -- python"]),
        (
            "slurm",
            {"depth": 16, "gpus_per_node": 4, "queue": "gpu"},
            [
                "#SBATCH --job-name=hvdkit",
                "#SBATCH --nodes=2",
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --cpus-per-task=16",
                "#SBATCH --gpus-per-node=4",
                "#SBATCH --time=00:30:00",
                "#SBATCH --output=%x.%j.log",
                "#SBATCH --open-mode=append",
                "#SBATCH --partition=gpu",
                "#SBATCH --account=me",
                'cd "$SLURM_SUBMIT_DIR" || exit 1',
                "exec hvdkit launch -n 8 --ppn 4 --depth 16 --launcher srun --gpus-per-node 4 -- python train.py",
            ],
        ),
        (
            "lsf",
            {"walltime": "01:59:01", "gpus_per_node": 4},
            ["#BSUB -n 8", '#BSUB -R "span[ptile=4]"', '#BSUB -gpu "num=4"', "#BSUB -W 02:00", "#BSUB -P me"],
        ),
        (
            "summit",
            {"gpus_per_node": 4},
            [
                "#BSUB -nnodes 2",
                "#BSUB -o hvdkit.%J.log",
                'cd "$LS_SUBCWD" || exit 1',
                "exec hvdkit launch -n 8 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 -- python",
            ],
        ),
        (
            "theta",
            {},
            [
                "#COBALT -n 2",
                "#COBALT -t 00:30:00",
                "#COBALT -O hvdkit",
                "#COBALT -q debug-cache-quad",
                "#COBALT --attrs filesystems=home,theta-fs0",
                "exec hvdkit launch -n 8 --ppn 4 --depth 16 --launcher aprun -- python train.py",
            ],
        ),
    ],
)
def test_what_each_system_is_told(site_name, changes, expected):
    values = {field: getattr(JOB, field) for field in JOB.__dataclass_fields__} | changes
    lines = script.write(BatchJob(**values), site.find(None, site_name), "/venv/bin").splitlines()
    for start in expected:
        assert any(line.startswith(start) for line in lines), (start, lines)
    body = next(index for index, line in enumerate(lines) if line == "")
    prefix = SYSTEMS[site.find(None, site_name).system].prefix
    assert all(line.startswith(prefix) for line in lines[1:body])


@pytest.mark.parametrize("site_name", site.known())
def test_every_script_is_clean_and_launches_what_was_typed(site_name):
    chosen = site.find(None, site_name)
    asked = BatchJob(2, 4, "00:30:00", NASTY, account="me", gpus_per_node=4, depth=2, queue="q")
    every = BatchJob(2, 4, "00:30:00", NASTY, account="me", mem="64G", exclusive=True, array="1-4:2%2",
                log="log/%j.out", qos="q", constraint="gpu&hbm80g", stage=True)  # fmt: skip
    every = replace(every, **dict.fromkeys(SYSTEMS[chosen.system].lacks))
    for wanted in (asked, every):
        text = script.write(wanted, chosen, "/my venv/of $USER/it's/bin")
        assert passes_bash(text) is True
        (line,) = launch_lines(text)
        options = parsed(line)
        assert options["command"] == NASTY
        assert (options["n"], options["ppn"], options["depth"]) == (8, 4, wanted.depth or chosen.depth)
        assert options["stage"] == wanted.stage
        assert passes_shellcheck(text) is True


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12), min_size=1, max_size=4))
def test_whatever_is_typed_reaches_the_command_as_it_is(words):
    text = script.write(BatchJob(1, 1, "00:01:00", ("x", *words)), site.find("slurm", None), "/venv/bin")
    (line,) = launch_lines(text)
    shown = f"hvdkit() {{ printf '%s\\0' \"$@\"; }}\n{line}"
    said = subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout.decode().split("\0")
    assert said[said.index("--") + 1 : -1] == ["x", *words]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--walltime", "00:00:00"], "above zero"),
        (["--walltime", "00:61:00"], "HH:MM:SS"),
        (["--walltime", "00:30:00\n#PBS -q x"], "HH:MM:SS"),
        (["--queue", "q\n#PBS -A other"], "--queue must be a name"),
        (["--queue", ""], "--queue must be a name"),
        (["--account", "$(id)"], "--account must be a name"),
        (["--name", "1st"], "--name must be a name"),
        (["--nodes", "0"], "--nodes"),
        (["--system", "loadleveler"], "--system"),
        (["--system", "pbs", "--site", "theta"], "Site theta has cobalt, and --system says pbs"),
        (["--site", "nosuch"], "neither one of aurora, cobalt, frontier, leonardo"),
        (["--site", "polaris"], "give it with --account"),
        (["--mem", "64GB\n#PBS -q x"], "--mem must be a number"),
        (["--array", "1,2"], "--array must be FIRST-LAST"),
        (["--output", "a b"], "--output must be a file name without spaces"),
        (["--qos", "high"], "--qos cannot be asked of pbs"),
        (["--site", "slurm", "--constraint", "gpu;id"], "--constraint must be features"),
        (["--site", "lsf", "--mem", "64G"], "--mem cannot be asked of lsf"),
        (["--site", "theta", "--account", "me", "--array", "1-2"], "--array cannot be asked of cobalt"),
        (["--signal", "USR1@120"], "--signal cannot be asked of pbs: it sends SIGTERM at the end of the walltime"),
        (["--site", "slurm", "--signal", "USR1"], "--signal must be SIGNAL@SECONDS"),
        (["--site", "slurm", "--signal", "USR1@1800"], "no later than the start of --walltime 00:30:00"),
        (["--site", "slurm", "--mail-type", "SOMETIMES"], "--mail-type must be ALL, or some of"),
        (
            ["--site", "slurm", "--directive", "reservation=x"],
            "--directive must be one option of slurm without #SBATCH",
        ),
        (["--site", "slurm", "--directive", "--comment=x\nrm -rf x"], "--directive must be one option of slurm"),
        (["--site", "cobalt", "--requeue"], "--requeue cannot be asked of cobalt: submit the script again"),
        (["-o", "nosuch/job.sh"], "No such file"),
    ],
)
def test_bad_usage_is_one_sentence_and_nothing_is_written(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    usual = ["--nodes", "2", "--ppn", "4", "--walltime", "00:30:00"]
    system = [] if "--site" in options else ["--system", "pbs"]
    status, out, err = job(capsys, *system, *usual, *options, "--", "python", "train.py")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["a\nb", "a\r#PBS -q x", "a\x07"])
def test_no_line_of_the_command_becomes_a_line_of_the_script(capsys, word):
    usual = ["--system", "lsf", "--nodes", "2", "--ppn", "4", "--walltime", "00:30:00"]
    status, out, err = job(capsys, *usual, "--", "python", "-c", word)
    assert (status, out) == (2, "")
    assert "line break" in err and err.count("\n") == 1
    assert job(capsys, *usual)[0] == 2


def test_the_line_that_submits_can_be_pasted(capsys, tmp_path):
    file = tmp_path / "my job.sh"
    usual = ["--nodes", "2", "--ppn", "4", "--walltime", "00:30:00", "-o", str(file)]
    _, _, err = job(capsys, "--system", "lsf", *usual, "--", "x")
    assert err.endswith(f"submit it: bsub < '{file}'\n")


def test_a_file_is_written_once_unless_forced(capsys, tmp_path):
    file = tmp_path / "job.sh"
    words = ["--system", "slurm", "--nodes", "1", "--ppn", "2", "--walltime", "0:10:00", "-o", str(file)]
    status, out, err = job(capsys, *words, "--", "true")
    assert (status, out) == (0, "")
    assert f"sbatch {file}" in err
    first = file.read_text()
    assert f"export PATH={Path(sys.executable).parent}:" in first
    status, _, err = job(capsys, *words, "--", "false")
    assert status == 2 and "--force to overwrite" in err
    assert file.read_text() == first
    assert job(capsys, *words, "--force", "--", "false")[0] == 0
    assert launch_lines(file.read_text())[0].endswith("-- false")


# What a site gives


def asked(site_name, nodes, walltime, ppn=4, **others):
    chosen = site.find(None, site_name)
    text = script.write(BatchJob(nodes, ppn, walltime, ("true",), account="me", **others), chosen, "/venv/bin")
    return [line.removeprefix(f"{SYSTEMS[chosen.system].prefix} ") for line in text.splitlines()]


@pytest.mark.parametrize(
    ("site_name", "options", "message"),
    [
        ("slurm", "--nodes 2 --walltime 00:30:00", "--ppn is needed: how many GPUs a host of slurm has"),
        ("theta", "--nodes 2 --walltime 00:30:00 --gpus-per-node 0", "--ppn is needed: how many sockets"),
        ("pbs", "--nodes 2 --ppn 4", "--walltime HH:MM:SS is needed"),
        ("polaris", "--nodes 64 --ppn 4 --walltime 12:00:00", "has no queue for that (debug: 1 to 2 nodes, "),
        ("polaris", "--nodes 3 --ppn 4 --walltime 00:30:00 --queue debug", "queue debug of site polaris does not give "
         "that (debug: 1 to 2 nodes, 01:00:00); ask for what is given there, or with --queue of debug-scaling, "),
        ("polaris", "--nodes 2 --ppn 8 --walltime 00:30:00", "each rank takes a GPU of its own, and a host of polaris "
         "has 4; give --ppn 4 or less"),
        ("polaris", "--nodes 2 --ppn 4 --walltime 00:30:00 --gpus-per-node 8", "a host of polaris has 4"),
        ("polaris", "--nodes 2 --ppn 4 --walltime 00:30:00 --depth 17", "that is 68 cores, and a job has 64 on a host"),
        ("slurm", "--nodes 2 --ppn 8 --walltime 00:30:00 --gpus-per-node 4", "and --gpus-per-node asks for 4"),
        ("frontier", "--nodes 91 --ppn 8 --walltime 06:00:00", "batch: 92 to 183 nodes, 06:00:00"),
        ("frontier", "--nodes 2 --ppn 8 --walltime 02:00:01 --qos debug", "no queue for that (debug: 1 to 9472 nodes"),
    ],
)  # fmt: skip
def test_what_a_site_does_not_give_or_only_the_user_knows_is_one_sentence(capsys, site_name, options, message):
    status, out, err = job(capsys, "--site", site_name, "--account", "me", *options.split(), "--", "x")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("site_name", "nodes", "walltime", "others", "expected"),
    [
        ("polaris", 2, "01:00:00", {}, ["-q debug"]),
        ("polaris", 3, "01:00:00", {}, ["-q debug-scaling"]),
        ("polaris", 496, "24:00:00", {}, ["-q prod"]),
        ("polaris", 4, "01:00:00", {"queue": "preemptable"}, ["-q preemptable"]),
        ("polaris", 4, "01:00:00", {"queue": "R1234"}, ["-q R1234"]),
        ("aurora", 2, "00:30:00", {}, ["-q debug", "-l select=2:ncpus=208", "-l place=scatter"]),
        ("frontier", 64, "24:00:00", {}, ["--partition=extended", "--cpus-per-task=7", "--gpus-per-node=8"]),
        ("frontier", 2, "00:30:00", {"qos": "debug"}, ["--partition=batch", "--qos=debug"]),
        ("perlmutter", 2, "00:30:00", {}, ["--qos=debug", "--constraint=gpu", "--cpus-per-task=32"]),
        ("perlmutter", 9, "00:30:00", {"constraint": "gpu&hbm80g"}, ["--qos=regular", "--constraint=gpu&hbm80g"]),
        ("perlmutter", 9, "00:30:00", {"queue": "premium"}, ["--qos=premium"]),
        ("lumi", 4, "60:00:00", {}, ["--partition=small-g", "--exclusive", "--gpus-per-node=8"]),
        ("leonardo", 65, "24:00:00", {}, ["--partition=boost_usr_prod", "--qos=boost_qos_bprod"]),
        ("parallelcluster", 9, "60:00:00", {"queue": "efa"}, ["--partition=efa"]),
    ],
)
def test_the_queue_that_fits(site_name, nodes, walltime, others, expected, capsys):
    lines = asked(site_name, nodes, walltime, **others)
    assert [line for line in expected if line not in lines] == []
    assert len([line for line in lines if line.startswith(("-q ", "--partition="))]) == (site_name != "perlmutter")
    (line,) = launch_lines("\n".join(lines))
    assert cli.run(["launch", "--dry-run", *shlex.split(line)[2:]]) == 0, capsys.readouterr().err


@given(
    st.sampled_from([name for name in site.known() if site.find(None, name).queues]),
    st.integers(1, 12000),
    st.integers(1, 200 * 3600),
)
def test_no_script_asks_a_queue_for_more_than_it_gives(name, nodes, seconds):
    walltime = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    given_by = [
        queue
        for queue in site.find(None, name).queues
        if not queue.by_name
        and queue.min_nodes <= nodes <= (queue.max_nodes or nodes)
        and walltime.zfill(9) <= (queue.max_walltime or walltime).zfill(9)
    ]
    try:
        lines = asked(name, nodes, walltime)
    except InvalidArgumentError as error:
        assert given_by == [] and f"site {name} has no queue for that" in str(error)
        return
    first = given_by[0]
    partition = first.name if first.partition is None else first.partition
    assert {f"-q {partition}", f"--partition={partition}", f"--qos={first.qos}"} & set(lines)


@pytest.mark.parametrize("name", site.known())
def test_the_sizes_of_a_queue_follow_each_other(name):
    sizes = {}
    for queue in site.find(None, name).queues:
        sizes.setdefault(queue.name, []).append((queue.min_nodes, queue.max_nodes))
    for of_queue in sizes.values():
        assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(of_queue))


def test_each_system_is_told_of_memory_arrays_and_logs():
    wishes = {"mem": "64G", "exclusive": True, "array": "1-8:2%4", "log": "runs/%j.log"}
    slurm = asked("slurm", 2, "00:30:00", **wishes)
    expected = {"--mem=64G", "--exclusive", "--array=1-8:2%4", "--output=runs/%j.log"}
    assert expected <= set(slurm)
    pbs = asked("pbs", 2, "00:30:00", **wishes)
    expected = {"-l select=2:ncpus=4:mpiprocs=4:mem=64gb", "-l place=scatter:excl", "-J 1-8:2%4", "-o runs/%j.log"}
    assert expected <= set(pbs)
    lsf = asked("lsf", 2, "00:30:00", **(wishes | {"mem": None}))
    assert {'-J "hvdkit[1-8:2]%4"', "-x", "-o runs/%j.log"} <= set(lsf)
    assert "--output=%x.%A_%a.log" in asked("slurm", 2, "00:30:00", array="0-3")
    assert "-o hvdkit.%J.%I.log" in asked("lsf", 2, "00:30:00", array="1-3")


def cores(cpu_bind):
    """The cores of each rank that a --cpu-bind names, in order."""
    kind, _, said = cpu_bind.partition(":")
    if kind == "mask_cpu":
        return [[n for n in range(64) if int(mask, 16) >> n & 1] for mask in said.split(",")]
    ends = [part.split("-") for part in said.split(":")]
    return [list(range(int(first), int(last) + 1)) for first, last in ends]


@pytest.mark.parametrize("name", [name for name in site.known() if site.find(None, name).cpu_bind])
def test_a_rank_is_tied_to_the_cores_near_its_gpu(name):
    chosen = site.find(None, name)
    of_ranks = cores(chosen.cpu_bind)
    assert len(of_ranks) == chosen.gpus_per_node
    assert all(len(own) == chosen.depth for own in of_ranks)
    assert len({core for own in of_ranks for core in own}) == chosen.gpus_per_node * chosen.depth
    # The first core of each GPU's region, as the user guides draw it.
    first = {
        "polaris": [24, 16, 8, 0],
        "aurora": [1, 9, 17, 25, 33, 41, 53, 61, 69, 77, 85, 93],
        "frontier": [49, 57, 17, 25, 1, 9, 33, 41],
        "lumi": [49, 57, 17, 25, 1, 9, 33, 41],
    }
    assert [own[0] for own in of_ranks] == first[name]
    queue = chosen.queues[0]
    (line,) = launch_lines("\n".join(asked(name, queue.min_nodes, "00:01:00")))
    assert parsed(line)["cpu_bind"] == chosen.cpu_bind
    for others in ({"depth": 2}, {"gpus_per_node": 0}):  # the user's own cores, and no GPU to be near to
        (line,) = launch_lines("\n".join(asked(name, queue.min_nodes, "00:01:00", **others)))
        assert parsed(line)["cpu_bind"] is None


def test_ranks_on_cpus_share_the_cores_of_a_host():
    lines = asked("polaris", 2, "00:30:00", ppn=32, gpus_per_node=0)
    assert parsed(launch_lines("\n".join(lines))[0])["depth"] == 2
    assert not any("gpu" in line for line in asked("perlmutter", 2, "00:30:00", gpus_per_node=0, constraint="cpu"))


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--site", "summit"], "Note: summit is retired: OLCF decommissioned it on November 15, 2024"),
        (["--site", "theta"], "Note: theta is retired: ALCF's user guides no longer list it"),
        (
            ["--site", "polaris", "--queue", "R1"],
            "Note: queue R1 is not among those of site polaris (debug, debug-scal",
        ),
        (["--site", "perlmutter", "--qos", "realtime"], "Note: QOS realtime is not among those of site perlmutter"),
    ],
)
def test_a_note_where_nothing_checks_the_script(capsys, words, note):
    usual = ["--nodes", "2", "--ppn", "4", "--walltime", "00:30:00", "--account", "me"]
    status, out, err = job(capsys, *words, *usual, "--", "x")
    assert status == 0 and "hvdkit launch" in out
    assert err.startswith(note) and err.count("\n") == 1


@pytest.mark.parametrize("name", sorted(set(site.known()) - set(SYSTEMS)))
def test_a_machine_s_numbers_carry_their_source_and_its_date(name):
    source = " ".join(site.find(None, name).source)
    assert "https://" in source and re.search(r"read 20\d\d-\d\d-\d\d", source)


# Sites


def test_a_site_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('system = "slurm"\ndirectives = ["--constraint=a100"]\nsetup = ["module load cuda"]\ndepth = 3\n')
    text = script.write(JOB, site.find(None, str(file)), "/venv/bin")
    assert "#SBATCH --constraint=a100\n" in text
    assert "\nmodule load cuda\n" in text
    assert "--depth 3 " in launch_lines(text)[0]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "missing required field `system`"),
        ('system = "condor"', "`str` that is one of pbs, slurm, lsf, cobalt - at `$.system`"),
        ('system = "pbs"\ncolour = 1', "unknown field `colour`"),
        ('system = "pbs"\ndirectives = ["a\\nb"]', "`str` that is a single line - at `$.directives[0]`"),
        ('system = "pbs"\ndepth = 0', "Expected `int` >= 1 - at `$.depth`"),
        ('system = "pbs"\nlauncher = "rocket"', "that is one of auto, mpirun, horovodrun, mpiexec, aprun, srun, jsrun"),
        (
            'system = "pbs"\nqueues = [{name = "a"}, {name = "b", hosts = 3}]',
            "unknown field `hosts` - at `$.queues[1]`",
        ),
        ('system = "pbs"\nqueues = [{name = "a", max_walltime = "1h"}]', "as HH:MM:SS - at `$.queues[0].max_walltime`"),
        ('system = "pbs"\nname = "x"', "`name` is that of the file"),
        ('system = "pbs"\nshell = "/bin/bash"', "that begins with #! and ends in bash, such as '#!/bin/bash -l' - at"),
        ("system = ", "cannot be read"),
    ],
)
def test_a_bad_site_file_is_one_sentence_with_key_and_file(tmp_path, text, key):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=re.escape(key)) as caught:
        site.find(None, str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_site_file_that_the_docs_show_can_be_read_and_shows_every_key(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/job.md").read_text(), re.DOTALL)
    (tmp_path / "shown.toml").write_text(shown)
    found = site.find(None, str(tmp_path / "shown.toml"))
    keys = {*Site.__struct_fields__, *Queue.__struct_fields__} - {"name"}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key} = ", shown)] == []
    assert [queue.name for queue in found.queues] == ["short", "big", "spot"]


def test_the_sites_are_known_by_name_and_travel_with_the_package():
    machines = {"aurora", "frontier", "leonardo", "lumi", "parallelcluster", "perlmutter", "polaris", "summit", "theta"}
    assert set(SYSTEMS) | machines == set(site.known())
    assert all(site.find(None, name).name == name for name in site.known())
    assert importlib.resources.files("hvdkit.jobs.job").joinpath("sites/polaris.toml").is_file()
    assert "hvdkit.jobs.job = sites/*.toml" in (ROOT / "setup.cfg").read_text()


# jobs/


def test_there_is_a_script_for_each_place_and_purpose():
    found = {(file.parent.name, file.stem) for file in JOBS}
    places = ("local", "polaris", "theta", "slurm", "lsf")
    assert {(place, purpose) for place in places for purpose in ("train", "timeline", "scaling", "profile")} <= found


@pytest.mark.parametrize("file", JOBS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_ready_script_is_short_clean_and_only_launches(file):
    text = file.read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    assert passes_bash(text) is True
    commands = [line for line in lines if "hvdkit " in line and not line.startswith("#")]
    assert commands and commands == launch_lines(text)
    for line in commands:
        options = parsed(line)
        program, *words = options["command"]
        assert program == "python" and (ROOT / words[0]).is_file()
        if "n" in options:
            assert options["ppn"] is None or options["n"] % options["ppn"] == 0
    known = ("#", "hvdkit launch ", "hvdkit bench scaling ", "cd ", "export PATH=")
    others = [line for line in lines if line and not line.startswith(known)]
    assert all(line.startswith(("module ", "conda ")) for line in others)
    assert passes_shellcheck(text) is True


@pytest.mark.parametrize("file", JOBS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_command_line_of_a_ready_script_can_be_planned(file, capsys, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE", "COBALT_NODEFILE", "LSB_DJOB_RANKFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    for line in launch_lines(file.read_text()):
        for words in launches(line):
            assert cli.run(["launch", "--dry-run", *words]) == 0
            shown = shlex.split(capsys.readouterr().out)
            assert "examples/pytorch/cnn.py" in shown
