"""``hvdkit test`` with real ranks: sound in every framework, and with faults that the test causes."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from ranks import missing, on_ranks

from hvdkit.errors import AgreementError, HvdkitError, TopologyMismatchError
from hvdkit.synthetic import smoke

LINES = """\
hvdkit test: controller: Gloo
hvdkit test: allreduce: 1 + 2 = 3 on every rank, under {}
hvdkit test: training: after 10 steps all ranks"""

needs_horovod = pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod")


@contextlib.contextmanager
def on_cpu(hk):
    """Ranks that have computed before cannot be pinned to a device any more; there is a CPU alone."""
    import torch

    device = torch.device("cpu") if hk.__name__ == "hvdkit.torch" else "/CPU:0"
    with mock.patch.object(hk, "pin_device", lambda *_: device), contextlib.redirect_stdout(io.StringIO()) as said:
        yield said


@on_ranks("torch", "tensorflow", "keras")
def test_two_ranks_add_up_and_train(hk, world):
    framework = hk.__name__.rpartition(".")[2]
    with on_cpu(hk) as said:
        smoke.run(framework, 2, gpu=False)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("hvdkit test: ")]
    assert "\n".join(lines).startswith(LINES.format(world.launcher)) and len(lines) == 3
    with on_cpu(hk), pytest.raises(TopologyMismatchError, match="3 ranks were started, and Horovod sees 2"):
        smoke.run(framework, 3, gpu=False)


@on_ranks("torch", "tensorflow", "keras")
def test_ranks_that_add_up_or_train_wrongly_are_errors(hk):
    framework = hk.__name__.rpartition(".")[2]
    alone = mock.patch.object(hk, "average_metrics", lambda metrics, _: metrics)
    with on_cpu(hk) as said, alone, pytest.raises(HvdkitError, match=r"adds up 1 \+ 2 to [24]"):
        smoke.run(framework, 2, gpu=False)
    assert "allreduce" not in said.getvalue()
    apart = mock.patch.object(hk, "distribute", lambda trained, *_, **__: trained)
    # What Keras' fit itself refuses is another error of hvdkit.
    with on_cpu(hk) as said, apart, pytest.raises(HvdkitError if framework == "keras" else AgreementError):
        smoke.run(framework, 2, gpu=False)
    assert "allreduce" in said.getvalue() and "training" not in said.getvalue()


def run(*packages: Path) -> tuple[int, list[dict]]:
    paths = os.pathsep.join(map(str, [*packages, Path(__file__).parents[2]]))
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.cli", "test", "--json", "--framework", "torch", "--timeout", "280"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)["checks"]


@pytest.mark.parallel
@needs_horovod
def test_the_command_itself():
    status, checks = run()
    assert [one["check"] for one in checks] == ["Horovod", "torch allreduce", "torch training"]
    assert status == 0 and all(one["ok"] for one in checks), checks


@pytest.mark.parallel
@needs_horovod
def test_a_framework_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('damaged')")
    status, checks = run(tmp_path)
    assert status == 1 and [one["ok"] for one in checks] == [True, False]
    assert checks[-1]["what"] == "hvdkit.torch needs PyTorch, which cannot be imported; run `pip install torch`."
