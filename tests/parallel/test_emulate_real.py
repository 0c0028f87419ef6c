"""``hvdkit emulate`` with real ranks: every engine, faults, signals, and four hosts with a rate."""

import atexit
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from ranks import missing

from hvdkit.common import json_files
from hvdkit.measure.bench.results import Environment
from hvdkit.measure.emulate import engines, results, worker
from hvdkit.measure.emulate.check import COLLECTIVES
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
TIMEOUT_S = 150
LIST = "803840,131584,33024,2600"

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
needs_horovod = pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@pytest.fixture
def environment(ranks_command):
    return ranks_command(1, "mpi")[1]


def argv(*words, n=4):
    return [sys.executable, "-m", "hvdkit.cli", "emulate", "-n", str(n), "--json", "r.json", *words]


def run(command, directory, environment):
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


# Engines

SIZES = (1, 3, 650, 200_001)
"""Elements: fewer than there are ranks, and more than divide evenly."""


def collectives(engine, ranks, todo, folder, fusion=False):
    """Replay every (collective, dtype) of ``todo``, checked; what was verified."""
    connected = engines.connect(EmulateAsked(engine, ranks, hosts=1, fusion=fusion), Path(folder))
    verified = []
    for collective, dtype in todo:
        asked = EmulateAsked(engine, ranks, hosts=1, collective=collective, fusion=fusion)
        plan = ReplayPlan(tuple(Collective(f"t{count}", count, dtype) for count in SIZES), trials=2)
        kept = []
        worker.replay(asked, plan, Renamed(connected, len(verified)), lambda *times, kept=kept: kept.append(times))
        verified.append([collective, dtype, len(kept)])
    connected.close()
    atexit.register(os._exit, 0)  # not through the threads of the frameworks, which are none of this test's business
    return {"overlaps": connected.overlaps, "verified": verified, "notes": connected.notes}


def compressed(engine, ranks, todo, folder, fusion=False):
    """Replay every (compression, dtype) of ``todo`` beside none, checked; how many times of a trial were kept."""
    connected = engines.connect(EmulateAsked(engine, ranks, hosts=1, fusion=fusion), Path(folder))
    kept = []
    for number, (compression, dtype) in enumerate(todo):
        asked = EmulateAsked(engine, ranks, hosts=1, fusion=fusion, compression=compression)
        sizes = (*SIZES, 2**20 + 3) if dtype == "float32" else SIZES  # which is packed in two parts
        plan = ReplayPlan(tuple(Collective(f"t{count}", count, dtype) for count in sizes), trials=3)
        worker.replay(
            asked, plan, Renamed(connected, number), lambda arrived, done: kept.append([len(arrived), len(done)])
        )
    connected.close()
    atexit.register(os._exit, 0)
    return kept


class Renamed:
    """An engine whose operations have other numbers in each replay: Horovod knows tensors by their names."""

    def __init__(self, engine, number):
        self._engine, self._number = engine, number

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def operation(self, index, *arguments):
        return self._engine.operation(1000 * self._number + index, *arguments)

    def compressed(self, index, *arguments):
        return self._engine.compressed(1000 * self._number + index, *arguments)


def todo(collectives, *dtypes):
    return [(collective, dtype) for dtype in dtypes for collective in collectives]


@needs_mpi
@pytest.mark.parametrize(
    ("engine", "n", "cases"),
    [
        ("mpi", 3, todo(COLLECTIVES, "float32", "float64", "int8", "int64", "uint16")),
        ("ring", 1, todo(COLLECTIVES[:3], "float32", "float16", "int32")),
        ("ring", 4, todo(COLLECTIVES[:3], "float32", "float16", "int32")),
    ],
    ids=["mpi", "ring of 1", "ring of 4"],
)
def test_mpi_s_own_collectives_and_the_ring_are_right(run_ranks, tmp_path, engine, n, cases):
    for rank in run_ranks(collectives, n, engine=engine, ranks=n, todo=cases, folder=str(tmp_path)):
        assert rank["verified"] == [[*case, 2] for case in cases]


@needs_torch
def test_gloo_through_torch_distributed_is_right(run_ranks, tmp_path):
    cases = [*todo(COLLECTIVES, "float32"), *todo(["allreduce"], "float16", "bfloat16"), ("all_to_all", "int64")]
    for rank in run_ranks(collectives, 2, warm="torch", engine="gloo", ranks=2, todo=cases, folder=str(tmp_path)):
        assert rank["verified"] == [[*case, 2] for case in cases]


@needs_horovod
@pytest.mark.parametrize(("controller", "fusion"), [("mpi", True), ("gloo", False)])
def test_horovod_is_right(run_ranks, tmp_path, controller, fusion):
    cases = [*todo(COLLECTIVES, "float32"), ("allreduce", "float16"), ("reduce_scatter_all_gather", "int64")]
    for rank in run_ranks(
        collectives, 2, warm="torch", controller=controller, engine="horovod", fusion=fusion, ranks=2,
        todo=cases, folder=str(tmp_path),
    ):  # fmt: skip
        assert rank == {"overlaps": fusion, "verified": [[*case, 2] for case in cases], "notes": []}


@pytest.mark.parametrize(
    ("engine", "fusion"),
    [
        pytest.param("mpi", False, marks=needs_mpi),
        pytest.param("gloo", False, marks=needs_torch),
        pytest.param("horovod", True, marks=needs_horovod),
    ],
)
def test_compressed_sums_are_right_but_for_their_rounding(run_ranks, tmp_path, engine, fusion):
    cases = todo(("fp16", "bf16", "int8"), "float32", "float64")
    how = {} if engine == "mpi" else {"warm": "torch"}
    for rank in run_ranks(
        compressed, 2, **how, engine=engine, ranks=2, todo=cases, folder=str(tmp_path), fusion=fusion
    ):
        assert rank == [[2 * (len(SIZES) + (dtype == "float32"))] * 2 for _, dtype in cases for _ in range(3)]


# The command


@needs_mpi
def test_int8_is_a_column_beside_none(tmp_path, environment):
    done = run(
        argv("--engine", "mpi", "--sizes", LIST, "--trials", "3", "--compression", "int8", n=2), tmp_path, environment
    )
    assert done.returncode == 0, done.stderr
    found = json_files.read(tmp_path / "r.json", results.EmulateResults)
    assert [one.index for one in found.compressed] == [one.index for one in found.samples] == [0, 1, 2, 3] * 3
    assert all(one.slowest_s > 0 for one in found.compressed)
    assert "p50 int8" in done.stdout and "With int8 a step takes" in done.stdout


@needs_mpi
def test_the_tutorial_s_list_over_the_ring(tmp_path, environment):
    done = run(argv("--engine", "ring", "--sizes", LIST, "--trials", "8"), tmp_path, environment)
    assert done.returncode == 0, done.stderr
    found = json_files.read(tmp_path / "r.json", results.EmulateResults)
    assert found.plan.trials == 8
    assert (found.asked.hosts, found.asked.ppn) == (1, 4)
    assert [one.nbytes for one in found.samples] == [2600, 33024, 131584, 803840] * 8
    assert "803840" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]


@needs_mpi
def test_a_wrong_element_ends_the_job_and_is_named(tmp_path, environment):
    code = (
        "import sys\nfrom hvdkit import cli\nfrom hvdkit.measure.emulate import run\n"
        f"run.WORKER = (sys.executable, {str(HERE / 'faulty_worker.py')!r})\ncli.main(sys.argv[1:])\n"
    )
    words = argv("--engine", "mpi", "--sizes", "800,400", "--warmup-trials", "1", n=2)[3:]
    done = run([sys.executable, "-c", code, *words], tmp_path, environment)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdkit: Rank 1 got a wrong result of allreduce 1 (")
    assert "800 bytes of float32" in last
    assert "in trial 1: element 17 is " in last
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = run([sys.executable, "-c", code, *words, "--no-check"], tmp_path, environment)
    assert done.returncode == 0, done.stderr


@needs_mpi
def test_a_straggler_is_seen_as_skew_and_not_as_transfer(tmp_path, environment):
    words = ["--engine", "ring", "--sizes", "4000", "--trials", "15", "--straggler", "1:40"]
    done = run(argv(*words, n=2), tmp_path, environment)
    assert done.returncode == 0, done.stderr
    samples = json_files.read(tmp_path / "r.json", results.EmulateResults).samples
    assert statistics.median(one.skew_s for one in samples) > 0.03
    assert sum(one.ranks_s[1] < one.ranks_s[0] for one in samples) > 10
    assert "rank 1 comes last most often" in done.stdout


@needs_mpi
def test_ctrl_c_keeps_what_was_measured(tmp_path, environment):
    process = subprocess.Popen(
        argv("--engine", "ring", "--sizes", "4000,400", "--trials", "10000000", n=2),
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(file.stat().st_size > 2000 for file in tmp_path.glob(".hvdkit-emulate-*/rank-1.times")):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    found = json_files.read(tmp_path / "r.json", results.EmulateResults)
    trials = [one.trial for one in found.samples[::2]]
    assert len(trials) >= 5
    assert trials == list(range(len(trials)))
    assert f"It was interrupted: {len(trials)} of 10000000 trials were measured by all ranks." in found.notes
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


# Several machines


@needs_mpi
@pytest.mark.root
def test_clocks_that_are_hours_apart_do_not_matter(ranks_command, tmp_path):
    away = ["unshare", "--time", "--monotonic", "9000"]
    if subprocess.run([*away, "true"], capture_output=True).returncode:
        pytest.skip("needs time namespaces")
    asked = EmulateAsked("mpi", 2, hosts=2)
    where = Environment("1", "3.11", "Linux", {}, 2)
    job = EmulateResults(asked, where, [], ReplayPlan((Collective("a", 1000),), trials=5), [])
    json_files.write(tmp_path / results.JOB, job)
    start, environment = ranks_command(2, "mpi")
    ranks = [sys.executable, "-m", "hvdkit.measure.emulate.worker", str(tmp_path)]
    alone = ["-n", "1"]
    done = run([start[0], *start[3:], *alone, *ranks, ":", *alone, *away, *ranks], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    joined, _ = results.join(tmp_path, job)
    assert len(joined.samples) == 5
    for one in joined.samples:
        assert one.slowest_s < 60 and one.skew_s + one.transfer_s == pytest.approx(one.slowest_s)
    (note,) = joined.notes
    assert note.startswith("The clocks of several machines are not compared")


# Four hosts


@pytest.fixture
def hosts(tmp_path):
    missing = namespaces.missing()
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    (tmp_path / "bin").mkdir()
    machines = namespaces.Hosts(tmp_path / "bin")
    try:
        try:
            machines.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield machines
    finally:
        machines.stop()


@needs_mpi
@pytest.mark.root
def test_the_ring_over_four_hosts_is_right_and_never_beats_the_bandwidth_bound(hosts, tmp_path, environment):
    size, link = 40_000_000, 1e9 / 8
    words = ["--engine", "ring", "--sizes", str(size), "--trials", "2", "--warmup-trials", "0", "--launcher", "mpirun"]
    placed = ["--hosts", ",".join(f"{name}:1" for name in hosts.names)]
    environment = {**environment, "PATH": f"{hosts.bin}{os.pathsep}{environment['PATH']}"}
    done = run([*hosts.inside(0), *argv(*words, *placed)], tmp_path, environment)
    hosts.clear()
    assert done.returncode == 0, done.stderr
    found = json_files.read(tmp_path / "r.json", results.EmulateResults)
    assert (found.asked.hosts, found.asked.ppn, len(found.samples)) == (4, 1, 2)
    moved = 2 * 3 / 4 * size
    for one in found.samples:
        # Before the last rank arrives, others may have begun; a burst passes at once.
        assert one.transfer_s + one.skew_s >= (moved - namespaces.BURST_BYTES) / link
        assert moved / one.slowest_s <= 1.02 * link
