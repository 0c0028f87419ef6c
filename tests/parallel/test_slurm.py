"""Trainings under a real Slurm of two nodes, whose srun knows nothing of this Open MPI."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
from ranks import warm
from test_any_launcher import sum_of_ranks

REQUIRED = ("torch", "horovod", "sklearn")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None] + slurm_cluster.missing()
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: apt install slurm-wlm munge)"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slurm")
    nodes = slurm_cluster.Cluster(directory)
    try:
        try:
            nodes.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def environment(ranks_command):
    _, variables = ranks_command(1, "mpi")
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return {name: variables[name] for name in names if name in variables}


def test_init_connects_the_tasks_of_two_nodes_without_mpi(cluster, environment, tmp_path):
    command = ["srun", "-N", "2", "-n", "4", "--overcommit", *sum_of_ranks(tmp_path, "job")]
    done = cluster.run(*command, **environment)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        facts = json.loads((tmp_path / f"job-{rank}.json").read_text())
        assert facts == [4, rank % 2, 2, rank // 2, 2, "srun", 6.0]


def test_words_for_the_script_pass_srun_untouched(cluster, environment, tmp_path):
    command = [sys.executable, "-m", "hvdkit.cli", "launch", "--launcher", "srun", "-n", "2", "--ppn", "1", "--no-tag"]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    for words in (["--num", "-x", "", "a b", "$HOME", "a\nb", "*", "--"], ["a", ":", "--help", "日本", ":"]):
        done = cluster.run(*command, "--", sys.executable, "-c", show, *words, **environment)
        assert [json.loads(line) for line in done.stdout.splitlines()] == [words, words], done.stderr


def test_every_process_is_rank_0_of_1_where_mpi_is_asked_for_and_that_is_explained(cluster, environment, tmp_path):
    tasks = ["srun", "-N", "2", "-n", "2"]
    done = cluster.run(*tasks, *sum_of_ranks(tmp_path, "job"), HOROVOD_CONTROLLER="mpi", **environment)
    assert done.returncode != 0
    assert re.search(r"srun started rank \d of 2, but Horovod \(over Open MPI .*\) sees rank 0 of 1", done.stderr)
    assert "every process would train alone" in done.stderr
    preflight = [*tasks, *warm("torch").stub("hvdkit.__main__", "doctor", "--job")]
    looked = cluster.run(*preflight, HOROVOD_CONTROLLER="mpi", **environment)
    assert looked.returncode != 0
    assert "of 2, but Horovod (over Open MPI" in looked.stdout
    looked = cluster.run(*preflight, **environment)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert "The job can train: 2 of 2 ranks" in looked.stdout and "over Gloo" in looked.stdout


def test_a_batch_script_of_hvdkit_job_trains_the_cnn_on_two_nodes(cluster, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = ["--system", "slurm", "--nodes", "2", "--ppn", "1", "--walltime", "00:05:00", "-o", "job.sh"]
    training = [f"{ROOT}/examples/pytorch/cnn.py", "--epochs", "6", "--checkpoint_dir", "with a blank"]
    written = cluster.run(sys.executable, "-m", "hvdkit.cli", "job", *wanted, "--", *training, **environment)
    assert written.returncode == 0, written.stderr
    done = cluster.run("sbatch", "--wait", "job.sh", **environment)
    (log,) = tmp_path.glob("hvdkit.*.log")
    text = log.read_text()
    assert done.returncode == 0, text
    assert "All 2 ranks hold identical weights" in text
    assert float(re.search(r"Test accuracy: ([\d.]+) %", text)[1]) > 90
    assert len(re.findall(r"^\[0\] Hvd Procs 2 Total time: [\d.]+ second", text, re.MULTILINE)) == 1, text
    assert list((tmp_path / "with a blank").glob("step-*"))


def test_slurm_takes_every_option_of_hvdkit_job_from_a_site_of_ones_own(cluster, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue = (
        '{ name = "short", partition = "all", max_nodes = 2, max_walltime = "00:10:00", directives = ["--requeue"] }'
    )
    (tmp_path / "mine.toml").write_text(
        'system = "slurm"\nlauncher = "srun"\ncpus_per_node = 2\ndepth = 2\ncpu_bind = "mask_cpu:0x3"\n'
        f"gpus_per_node = 1\nqueues = [{queue}]\n"
    )
    wanted = ["--site", "mine.toml", "--nodes", "2", "--ppn", "2", "--walltime", "00:05:00", "--gpus-per-node", "0"]
    wanted += ["--mem", "1M", "--exclusive", "--array", "3-4%1", "--output", "said.%a", "-o", "job.sh"]
    told = [sys.executable, "-m", "hvdkit.cli", "job"]
    program = ["printenv", "SLURM_ARRAY_TASK_ID"]
    written = cluster.run(*told, *wanted, "--", *program, **environment)
    assert written.returncode == 0, written.stderr
    done = cluster.run("sbatch", "--wait", "job.sh", **environment)
    for index in ("3", "4"):
        text = (tmp_path / f"said.{index}").read_text()
        assert sorted(text.splitlines()) == [f"[{rank}] {index}" for rank in range(4)], text
    assert done.returncode == 0
    refused = cluster.run(*told, *wanted, "--force", "--nodes", "3", "--", *program, **environment)
    assert refused.returncode == 2
    assert "site mine has no queue for that (short: 1 to 2 nodes, 00:10:00)" in refused.stderr


def test_submit_shows_what_the_job_prints_and_ends_with_its_status(cluster, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = [sys.executable, "-m", "hvdkit.cli", "job", "--system", "slurm", "--nodes", "1", "--ppn", "1"]
    told += ["--walltime", "00:05:00", "--submit"]
    failing = cluster.run(*told, "--", "sh", "-c", "echo it trains; sleep 1; echo it fails; exit 3", **environment)
    assert failing.returncode == 3, failing.stderr
    assert "it trains\n" in failing.stdout and "it fails\n" in failing.stdout
    assert re.search(
        r"Job \d+ is submitted to slurm\.\n(.*\n)*Job \d+ has ended: FAILED, exit status 3\.", failing.stderr
    )
    assert cluster.run(*told, "--", "true", **environment).returncode == 0
    several = cluster.run(*told, "--array", "1-2", "--", "true", **environment)
    assert several.returncode == 0 and "has ended" not in several.stderr
    refused = cluster.run(*told, "--queue", "nowhere", "--", "true", **environment)
    assert refused.returncode == 1 and re.search(r"hvdkit: sbatch took no job: .*partition", refused.stderr)


def test_the_rank_that_failed_is_named_lines_are_tagged_and_depth_binds(cluster, environment):
    told = [sys.executable, "-m", "hvdkit.cli", "launch", "--launcher", "srun", "-n", "2", "--ppn", "1"]
    code = "import os, sys, time; rank = os.environ['SLURM_PROCID']; print('I am', rank, flush=True)\n"
    code += "print(len(os.sched_getaffinity(0)), 'core', file=sys.stderr, flush=True)\n"
    code += "if rank == '1': time.sleep(1); sys.exit(3)\ntime.sleep(100)"
    done = cluster.run(*told, "--depth", "1", "--", sys.executable, "-c", code, **environment)
    assert sorted(done.stdout.splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert {"[0] 1 core", "[1] 1 core"} <= {*done.stderr.splitlines()}
    assert re.search(
        r"^hvdkit launch: rank 1 \(pid \d+ on \S+\) exited with status 3; the job was ended.$", done.stderr, re.M
    )
    assert done.returncode == 3
    plain = cluster.run(*told, "--no-tag", "--", "echo", "a line", **environment)
    assert (plain.stdout, plain.returncode) == ("a line\na line\n", 0)


def test_a_function_runs_on_the_nodes_of_the_allocation(cluster, environment):
    call = "import os, hvdkit; print(hvdkit.run(lambda x: [x, os.environ['SLURMD_NODENAME']], ppn=1, args=(7,)))"
    done = cluster.run("salloc", "-N", "2", sys.executable, "-c", call, **environment)
    found = json.loads(done.stdout.replace("'", '"'))
    assert [x for x, _ in found] == [7, 7] and len({node for _, node in found}) == 2, done.stderr


def test_ranks_on_two_nodes_save_at_a_warning_and_when_the_job_is_told_to_end(cluster, environment):
    """srun itself kills at SIGTERM. Rank 1 is done at once, which must not end rank 0."""
    code = "import os, signal, sys, time\ndef save(number, frame):\n    if number == signal.SIGTERM:\n"
    code += "        time.sleep(4 if os.environ['SLURM_PROCID'] == '0' else 0)\n"
    code += "    print(signal.Signals(number).name, flush=True)\n    if number == signal.SIGTERM: sys.exit(1)\n"
    code += "for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, save)\n"
    code += "print('ready', flush=True)\nfor _ in range(3000): time.sleep(0.1)"
    told = [sys.executable, "-m", "hvdkit.cli", "launch", "--launcher", "srun", "-n", "2", "--ppn", "1"]
    job = subprocess.Popen(
        [*told, "--grace", "60", "--", sys.executable, "-c", code],
        env={**os.environ, **cluster.environment, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert {job.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    job.send_signal(signal.SIGUSR1)
    assert {job.stdout.readline() for _ in range(2)} == {"[0] SIGUSR1\n", "[1] SIGUSR1\n"}
    job.send_signal(signal.SIGTERM)
    output, errors = job.communicate(timeout=120)
    assert output.splitlines() == ["[1] SIGTERM", "[0] SIGTERM"], errors
    assert (job.returncode, errors.splitlines()[-1]) == (
        143,
        "hvdkit launch: interrupted by SIGTERM; every process was ended.",
    )


def test_a_job_is_warned_saves_is_queued_again_and_followed(cluster, environment, tmp_path, monkeypatch):
    """It waits for the first job, whose reason is said, and begins anew when it is queued again."""
    monkeypatch.chdir(tmp_path)
    first = cluster.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap", "sleep 300").stdout.strip()
    code = "import os, signal, time\ndef save(*_): print('saved', flush=True)\nsignal.signal(signal.SIGUSR1, save)\n"
    code += "again = os.environ.get('SLURM_RESTART_COUNT')\nprint('restart', again, flush=True)\n"
    code += "for _ in range(0 if again else 3000): time.sleep(0.1)"
    told = [sys.executable, "-m", "hvdkit.cli", "job", "--system", "slurm", "--nodes", "1", "--ppn", "1", "--requeue"]
    Path("script.py").write_text(code)
    told += ["--signal", "USR1@30", "--walltime", "00:05:00", "--submit"]
    job = subprocess.Popen(
        [*told, "--", sys.executable, "script.py"],
        env={**os.environ, **cluster.environment, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    number = re.match(r"Job (\d+) is submitted", job.stderr.readline())[1]
    assert re.fullmatch(r"Job \d+: pending \((Resources|Priority)\)\n", job.stderr.readline())
    cluster.run("scancel", first)
    assert job.stdout.readline() == "[0] restart None\n"
    cluster.run("scancel", "--batch", "--signal=USR1", number)  # as Slurm itself does at B:USR1@30
    assert job.stdout.readline() == "[0] saved\n"
    cluster.run("scontrol", "requeue", number)
    output, errors = job.communicate(timeout=200)
    assert "[0] restart 1\n" in output, errors
    assert (job.returncode, errors.splitlines()[-1]) == (0, f"Job {number} has ended: COMPLETED, exit status 0.")
