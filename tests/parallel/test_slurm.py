"""Trainings under a real Slurm of two nodes, whose srun knows nothing of this Open MPI."""

import importlib.util
import json
import re
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
    command = [sys.executable, "-m", "hvdkit.cli", "launch", "--launcher", "srun", "-n", "2", "--ppn", "1"]
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
    looked = cluster.run(*tasks, *warm("torch").stub("hvdkit.__main__", "preflight"), **environment)
    assert looked.returncode != 0
    assert "srun started 2 ranks, but Horovod over Open MPI" in looked.stdout


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
    assert len(re.findall(r"^Hvd Procs 2 Total time: [\d.]+ second", text, re.MULTILINE)) == 1, text
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
        assert text.split() == [index] * 4, text
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
