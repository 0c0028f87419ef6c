"""benchmarks/peers.py: what it makes of the ranks' times, with ranks that train nothing."""

import importlib
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RANK = """
import json, os, sys
from pathlib import Path

variant, model, steps, warm_up, directory = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert "HOROVOD_CYCLE_TIME" not in os.environ and os.environ["OMP_NUM_THREADS"] == "1"
fault = os.environ.get("FAULT", "") if variant == "peer" else ""
if fault == "raises" and rank == 1:
    sys.exit("the peer has no network")
if fault == "hangs":
    import time; time.sleep(60)
slow = {"alone": 0.010, "peer": 0.040}[variant]
seconds = [slow if step % 2 == rank % 2 else 0.001 for step in range(int(steps))]
found = {"rank": rank, "size": size, "step_seconds": seconds, "weights_digest": rank if fault == "drifts" else 7}
if fault != "forgets":
    (Path(directory) / f"rank-{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture
def peers(tmp_path, monkeypatch, capsys):
    """Runs the program here: what it imports takes longer than all that it starts."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("peers")
    (tmp_path / "train_torch.py").write_text(RANK)
    monkeypatch.setattr(program, "SCRIPTS", tmp_path)
    monkeypatch.setattr(program, "GRACE_SECONDS", 2)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    terminated = signal.getsignal(signal.SIGTERM)

    def start(*arguments, fault=""):
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setattr(sys, "argv", ["peers.py", "--json", str(tmp_path / "found.json"), *arguments])
        with pytest.raises(SystemExit) as ended:
            program.main()
        return SimpleNamespace(returncode=ended.value.code, **capsys.readouterr()._asdict())

    yield start
    signal.signal(signal.SIGTERM, terminated)


TWO = ("--models", "mlp", "--variants", "peer,alone", "--rounds", "2", "--steps", "20")


def test_a_step_is_as_long_as_on_its_slowest_rank(peers, tmp_path):
    done = peers(*TWO)
    assert done.returncode == 0, done.err
    found = json.loads((tmp_path / "found.json").read_text())["models"]["mlp"]
    assert found["rounds_ms"] == [{"peer": pytest.approx(40), "alone": pytest.approx(10)}] * 2
    assert found["summary"]["peer"]["share_of_limit"] == pytest.approx([0.25, 0.25, 0.25])
    assert found["summary"]["peer"]["over_hvdkit"] is None
    assert "| mlp | PyTorch DDP over gloo | 40.0 (40.0 to 40.0) | 0.25 [0.25, 0.25] |  |" in done.out
    assert "| mlp | no communication | 10.0 (10.0 to 10.0) |  |  |" in done.out
    assert "mlp round 2/2 alone: 10.000 ms per step" in done.err


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "the peer has no network"),
        ("drifts", "the ranks ended with different weights"),
        ("forgets", "expected ranks 0 .. 1 of 2"),
        pytest.param("hangs", "not done after 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_variant_that_fails_is_left_out_and_said(peers, tmp_path, fault, why):
    done = peers(*TWO, "--timeout", "5" if fault == "hangs" else "60", fault=fault)
    assert done.returncode == 1
    found = json.loads((tmp_path / "found.json").read_text())["models"]["mlp"]
    assert list(found["summary"]) == ["alone"]
    assert len(found["rounds_ms"]) == 2
    assert why in found["failed"]["peer"]
    assert done.err.count("FAILED") == 1
    assert "| PyTorch DDP" not in done.out
    assert "Left out: mlp, PyTorch DDP over gloo" in done.out


def test_usage_errors_are_one_sentence(peers):
    done = peers("--models", "resnet")
    assert done.returncode == 2
    assert "expected names from cnn,mlp,deep,wide" in done.err
    assert "Traceback" not in done.err
