"""``hvdkit bench synthetic`` with real ranks: its lines in every framework, and the pair with ``bench scaling``."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parallel

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SEARCH_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
LAUNCHER = next((name for name in ("mpirun", "horovodrun") if shutil.which(name, path=SEARCH_PATH)), None)
needs_launcher = pytest.mark.skipif(LAUNCHER is None, reason="neither mpirun nor horovodrun")
HVDKIT = [sys.executable, "-m", "hvdkit.cli"]
SHORT = ["--num-warmup-batches", "2", "--num-batches-per-iter", "3", "--num-iters", "2", "--batch-size", "4"]
TIMEOUT_S = 280
NUMBER = r"\d+\.\d"
LINES = re.compile(
    rf"Model: mlp\nBatch size: 4\nNumber of CPUs: (\d)\nRunning warmup\.\.\.\nRunning benchmark\.\.\.\n"
    rf"Iter #0: {NUMBER} img/sec per CPU\nIter #1: {NUMBER} img/sec per CPU\n"
    rf"Img/sec per CPU: ({NUMBER}) \+-{NUMBER}\nTotal img/sec on (\d) CPU\(s\): ({NUMBER}) \+-{NUMBER}\n"
)


def environment():
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {"PYTHONPATH": str(REPOSITORY), "PATH": SEARCH_PATH, "COLUMNS": "200"}
    return {**outer, **own, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def run(directory, *words):
    done = subprocess.run(
        [*HVDKIT, *words], cwd=directory, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def require_horovod_lines(text, ranks):
    found = LINES.search(text)
    assert found is not None, text
    assert (found[1], found[3]) == (str(ranks), str(ranks))
    assert float(found[4]) == pytest.approx(ranks * float(found[2]), abs=0.1 * ranks)


@needs_launcher
def test_n_starts_that_many_ranks_and_rank_0_prints_horovods_lines(tmp_path):
    pytest.importorskip("horovod.torch")
    words = ["--model", "mlp", "--no-cuda", "--fp16-allreduce", *SHORT]
    require_horovod_lines(run(tmp_path, "bench", "synthetic", "-n", "2", *words), 2)


@needs_launcher
def test_scaling_of_it_says_what_its_communication_consists_of(tmp_path):
    pytest.importorskip("horovod.torch")
    synthetic = ["bench", "synthetic", "--model", "deep", "--no-cuda", *SHORT, "--num-iters", "4"]
    scaling = ["bench", "scaling", "-n", "2", "--weak", "--timeline", "--repeats", "1", "--threads", "1"]
    text = run(tmp_path, *scaling, "--launcher", LAUNCHER, "-o", "r.json", "--", *HVDKIT, *synthetic)
    assert "What Horovod did meanwhile" in text
    content = json.loads((tmp_path / "r.json").read_text())
    assert [job["steps"]["count"] for job in content["jobs"]] == [14]
    assert [recording["ranks"] for recording in content["recordings"]] == [2]
    found = content["recordings"][0]["accounting"]
    assert found["steps"] == 9
    windows = {window["name"]: window for window in found["windows"]}
    assert list(windows) == ["working", "waiting", "exposed"]
    assert sum(window["seconds"] for window in windows.values()) == pytest.approx(found["step_s"], rel=0.05)
    total = {name: sum(window["activities"][name] for window in windows.values()) for name in ("transfer", "copy_in")}
    assert total["transfer"] > 0 and total["copy_in"] > 0, "122 small tensors are fused and sent"
    assert found["timeline_step_s"] == pytest.approx(found["step_s"], rel=0.5), "the two clocks are the same"


def test_tensorflow_and_keras_train_in_one_process_and_every_framework_has_the_161_tensors_of_resnet50():
    """One process, since TensorFlow takes longest to start; what ranks exchange is tested with PyTorch above."""
    pytest.importorskip("horovod.tensorflow")
    pytest.importorskip("torch")
    code = """
import math
from hvdkit import keras_synthetic, tensorflow_synthetic
from hvdkit.steps.synthetic import Settings
short = {"model": "mlp", "batch_size": 4, "warmup_batches": 2, "batches_per_iter": 3, "iters": 2, "cuda": False}
tensorflow_synthetic.run(Settings(**short, fp16_allreduce=True))
print("KERAS")
keras_synthetic.run(Settings(**short, fp16_allreduce=True, as_json=True))
print("RESNET50")
from hvdkit import tensorflow_synthetic_models, torch_synthetic_models
settings = Settings("resnet50-shape", image_size=64)
model = tensorflow_synthetic_models.make_model(settings)
keras_shapes = [tuple(v.shape) for v in model.trainable_variables]
torch_shapes = [tuple(p.shape) for p in torch_synthetic_models.make_model(settings).parameters()]
for shapes in (torch_shapes, keras_shapes):
    print(len(shapes), sum(map(math.prod, shapes)))
assert sorted(map(math.prod, torch_shapes)) == sorted(map(math.prod, keras_shapes))
assert model.output_shape == (None, 1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines, rest = done.stdout.split("KERAS")
    require_horovod_lines(lines, 1)
    text, shapes = rest.split("RESNET50")
    found = json.loads(text)
    assert (found["ranks"], found["tensors"], found["parameters"]) == (1, 8, 242_762)
    assert len(found["iterations"]) == 2
    assert found["img_per_second"] == pytest.approx(sum(found["iterations"]) / 2)
    assert shapes.split() == ["161", "25557032"] * 2
