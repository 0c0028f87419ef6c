"""The examples of hvdkit.arrays as users start them: alone, under ``hvdkit launch``, and resumed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "arrays"
NEEDS = {"numpy_mlp": ("numpy",), "jax_cnn": ("jax", "optax"), "mlx_mlp": ("mlx",)}
MISSING = [name for name in ("mpi4py", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]


@pytest.fixture
def train(ranks_command, tmp_path):
    def run(name: str, n: int, *flags: str) -> subprocess.CompletedProcess[str]:
        missing = [one for one in NEEDS[name] if importlib.util.find_spec(one) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
        _, environment = ranks_command(1, "mpi")
        launch = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(n), "--no-tag", "--"] if n > 1 else []
        command = [*launch, sys.executable, str(EXAMPLES / f"{name}.py"), *flags]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)

    return run


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize(("name", "epochs", "least"), [("numpy_mlp", 8, 90), ("jax_cnn", 1, 50), ("mlx_mlp", 6, 85)])
def test_two_ranks_learn(train, name, epochs, least):
    done = train(name, 2, "--epochs", str(epochs), "--warmup_epochs", "1", "--device", "cpu")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "All 2 ranks hold identical weights and optimizer state." in done.stdout
    assert number(r"Test accuracy: ([\d.]+) %", done.stdout) >= least
    assert number(r"Hvd Procs 2 Total time: ([\d.]+) second", done.stdout.splitlines()[-1]) > 0


def losses(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"epoch 2/2 step \d+/\d+ loss ([\d.]+)", text)]


@pytest.mark.parametrize("name", ["numpy_mlp", "mlx_mlp"])
def test_a_training_goes_on_where_it_stopped(train, tmp_path, name):
    flags = ("--log-interval", "5", "--warmup_epochs", "2")
    whole = train(name, 1, "--epochs", "2", *flags)
    train(name, 1, "--epochs", "1", *flags, "--checkpoint_dir", str(tmp_path / "run"))
    rest = train(name, 1, "--epochs", "2", *flags, "--checkpoint_dir", str(tmp_path / "run"), "--resume")
    assert rest.returncode == 0, rest.stderr
    assert losses(rest.stdout) == losses(whole.stdout) != []
    assert "epoch 1/2" not in rest.stdout


def test_half_precision_learns_and_a_mistake_is_one_sentence(train):
    done = train("numpy_mlp", 2, "--epochs", "4", "--fp16-allreduce")
    assert done.returncode == 0, done.stderr
    assert number(r"Test accuracy: ([\d.]+) %", done.stdout) >= 75
    wrong = train("numpy_mlp", 1, "--data", "mnist", "--data_dir", "/nowhere")
    assert wrong.returncode == 2
    assert wrong.stderr.count("numpy_mlp.py: ") == 1 and "Traceback" not in wrong.stderr
