"""``hvdkit tune`` with real jobs of two ranks, on a script that says how fast its settings are."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.parallel

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SEARCH_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
LAUNCHER = next((name for name in ("mpirun", "horovodrun") if shutil.which(name, path=SEARCH_PATH)), None)
needs_launcher = pytest.mark.skipif(LAUNCHER is None, reason="neither mpirun nor horovodrun")
TIMEOUT_S = 120

SCRIPT = """
import os, random
rank = next(os.environ[name] for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
seconds = 2.0 if os.environ.get("HOROVOD_CYCLE_TIME") == "5" else 4.0
if os.environ.get("OMP_NUM_THREADS") == "7":
    raise SystemExit("7 threads are too many")
if rank == "0":
    print("settings", os.environ.get("HOROVOD_CYCLE_TIME"), os.environ.get("HOROVOD_FUSION_THRESHOLD"))
    print(f"Hvd Procs 2 Total time: {seconds * random.uniform(0.99, 1.01)} second")
"""
SLEEPER = """
import os, pathlib, time
pathlib.Path(f"{os.getpid()}.pid").touch()
time.sleep(600)
"""


@pytest.fixture
def environment(tmp_path):
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "OMP_NUM_THREADS")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**outer, "PYTHONPATH": str(REPOSITORY)}


def hvdkit(*words):
    return [sys.executable, "-m", "hvdkit.cli", *words]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


@needs_launcher
def test_the_injected_winner_is_found_and_launch_applies_it(tmp_path, environment):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [
        "--cycle-times-ms", "5", "--fusion-thresholds-mb", "4", "--threads", "7", "--candidates", "3", "--repeats", "1",
        "--confirmations", "4", "--launcher", LAUNCHER, "-o", "tuned.json",
    ]  # fmt: skip
    done = subprocess.run(
        hvdkit("tune", "-n", "2", *words, "--", "train.py"),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert tuned["settings"] == {"cycle_time_s": 0.005, "launcher": LAUNCHER}
    found = re.search(r"^Verdict: Adopted: cycle 5 ms, ([\d.]+) times as fast", done.stdout)
    assert 1.9 < float(found[1]) < 2.1
    assert "Dropped: 7 threads, whose job exited" in done.stdout and "7 threads are too many" in done.stdout

    done = subprocess.run(
        hvdkit("launch", "-n", "2", "--tuned", "tuned.json", "--no-tag", "--", "train.py"),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "settings 5 None" in done.stdout


@needs_launcher
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_that_runs(tmp_path, environment, number, status):
    (tmp_path / "train.py").write_text(SLEEPER)
    process = subprocess.Popen(
        hvdkit("tune", "-n", "2", "--launcher", LAUNCHER, "-o", "tuned.json", "--", "train.py"),
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "two ranks starting")
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, err
    assert "Interrupted" in out and "Traceback" not in err
    ranks = [int(file.stem) for file in tmp_path.glob("*.pid")]
    wait_for(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks")
    assert not (tmp_path / "tuned.json").exists()
