"""``hvdkit bench synthetic`` with real ranks: its lines in every framework, and the pair with ``bench scaling``."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from ranks import missing

from hvdkit.jobs.trials import Launch
from hvdkit.measure.bench import jobs
from hvdkit.synthetic import benchmark

pytestmark = pytest.mark.parallel

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SEARCH_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
LAUNCHER = next((name for name in ("mpirun", "horovodrun") if shutil.which(name, path=SEARCH_PATH)), None)
needs_launcher = pytest.mark.skipif(LAUNCHER is None, reason="neither mpirun nor horovodrun")
needs_horovod = pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod")
HVDKIT = [sys.executable, "-m", "hvdkit.cli"]
SHORT = ["--num-warmup-batches", "2", "--num-batches-per-iter", "3", "--num-iters", "2", "--batch-size", "4"]
NUMBER = r"\d+\.\d"
LINES = re.compile(
    rf"Model: (\w+)\nBatch size: 4\nNumber of CPUs: (\d)\nRunning warmup\.\.\.\nRunning benchmark\.\.\.\n"
    rf"Iter #0: {NUMBER} img/sec per CPU\nIter #1: {NUMBER} img/sec per CPU\n"
    rf"Img/sec per CPU: ({NUMBER}) \+-{NUMBER}\nTotal img/sec on (\d) CPU\(s\): ({NUMBER}) \+-{NUMBER}\n"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Of no job, with one thread."""
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "PYTHONPATH": str(REPOSITORY), "PATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def resnet50_sizes():
    """Of every tensor of ResNet-50, ascending: weights, scale and offset of each convolution, and the last layer."""
    sizes = [64 * 3 * 7 * 7, 64, 64, 2048 * 1000, 1000]
    for channels, inner, stride in benchmark.bottlenecks():
        outer = benchmark.EXPANSION * inner
        sizes += [channels * inner, inner * inner * 9, inner * outer, *[inner] * 4, *[outer] * 2]
        if benchmark.projected(channels, inner, stride):
            sizes += [channels * outer, outer, outer]
    return sorted(sizes)


def require_horovod_lines(text, ranks, model):
    found = LINES.search(text)
    assert found is not None, text
    assert (found[1], found[2], found[4]) == (model, str(ranks), str(ranks))
    assert float(found[5]) == pytest.approx(ranks * float(found[3]), abs=0.1 * ranks)


@needs_launcher
@needs_horovod
def test_rank_0_prints_horovods_lines_and_bench_takes_its_steps(tmp_path):
    """With what its ranks print kept in a file."""
    words = ["bench", "synthetic", "--model", "deep", "--no-cuda", "--fp16-allreduce", *SHORT]
    command = ["sh", "-c", 'exec "$@" >> lines.txt', "sh", *HVDKIT, *words]
    launch = Launch(2, command, ["--threads", "1", "--launcher", LAUNCHER])
    job, found = jobs.run_job(launch, 2, tmp_path)
    assert job.failure is None and found is not None, job.failure
    require_horovod_lines((tmp_path / "lines.txt").read_text(), 2, "deep")
    assert found.count == 8 and found.parts.communication is not None


def tensorflow_and_keras():
    """What both say of a short run, and the sizes of ResNet-50's variables."""
    from hvdkit.synthetic import keras, tensorflow
    from hvdkit.synthetic.benchmark import BenchmarkSettings

    short = {"model": "mlp", "batch_size": 4, "warmup_batches": 2, "batches_per_iter": 3, "iters": 2, "cuda": False}
    said = []
    for adapter, as_json in ((tensorflow, False), (keras, True)):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            adapter.run(BenchmarkSettings(**short, fp16_allreduce=True, as_json=as_json))
        said.append(text.getvalue())
    model = keras.make_model(BenchmarkSettings("resnet50-shape", image_size=64))
    assert model.output_shape == (None, 1000)
    return *said, sorted(math.prod(variable.shape) for variable in model.trainable_variables)


def test_tensorflow_and_keras_train_and_have_the_161_tensors_of_resnet50(run_job):
    """One process; what ranks exchange is tested with PyTorch above."""
    ((lines, text, sizes),) = run_job("tensorflow", tensorflow_and_keras, n=1)
    require_horovod_lines(lines, 1, "mlp")
    found = json.loads(text)
    assert (found["ranks"], found["tensors"], found["parameters"]) == (1, 8, 242_762)
    assert len(found["iterations"]) == 2
    assert found["img_per_second"] == pytest.approx(sum(found["iterations"]) / 2)
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    assert sizes == resnet50_sizes()
