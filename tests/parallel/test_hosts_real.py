"""Trainings on four hosts: namespaces with a name and an address each, over Gloo and over MPI."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from pathlib import Path

import namespaces
import pytest
from ranks import warm

from hvdkit.jobs.job import kubernetes
from hvdkit.jobs.job.site import BatchJob
from hvdkit.steps import secret

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None] + namespaces.missing()
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def train():
    import torch
    from torch import nn

    import hvdkit.torch as hk

    world = hk.init()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, (x.sum(dim=1) > 0).long())
    loss_of = hk.weighted_loss(nn.CrossEntropyLoss())
    loader = hk.shard(data, world, 4, remainder="exact")
    for _ in range(2):
        for inputs, targets, weights in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets, weights).backward()
            optimizer.step()
    hk.check_agreement(model, optimizer, world, loader=loader)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    return {"weights": values, "hosts": world.cross_size, "local": world.local_size}


def take_outer_steps():
    """SGD on two hosts of two ranks, in synchronous steps and in outer steps that equal them."""
    import torch

    import hvdkit.torch as hk

    world, found = hk.init(), {}
    x = torch.randn(8, 6 * world.size, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for name, options in {"synchronous": {}, "outer": {"every": 1, "outer_lr": 1, "outer_momentum": 0}}.items():
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 3).double()
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        hk.broadcast_state(model, optimizer)
        for batch in x:
            optimizer.zero_grad()
            model(batch[world.rank :: world.size]).square().mean().backward()
            optimizer.step()
        found[name] = model.weight.detach().reshape(-1).tolist()
    hk.average_weights()
    return {**found, "local": world.local_size}


def go_on(marker, ranks, directory=""):
    """Train far longer than a test may take; ``marker`` appears when it has begun.

    Before that, ``train`` where there is a directory for what each rank ended with.

    Horovod is started when all have come: Gloo's limit, which a test makes short, holds for the start as well.
    """
    import torch

    import hvdkit.torch as hk

    with tempfile.NamedTemporaryFile(dir=Path(marker).parent, prefix="came-", delete=False):
        deadline = time.monotonic() + 120
        while len(list(Path(marker).parent.glob("came-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
    world = hk.init()
    if directory:
        Path(directory, f"rank-{world.rank}.json").write_text(json.dumps(train()))
    model = torch.nn.Linear(6, 2)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    for step in range(30_000):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        if step == 5 and world.is_root:
            Path(marker).touch()
        time.sleep(0.01)


def join(directory):
    """Start torch.distributed from the environment, as programs that torchrun starts do."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "API_KEY", "HVDKIT_SECRET", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    found = {"sum": total.item(), "host": os.uname().nodename, **{name: os.environ.get(name) for name in names}}
    Path(directory, f"joined-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


class Spy(threading.Thread):
    """Collects the command lines of all processes, as every user of a host can."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen = set()
        self.stop = threading.Event()

    def run(self):
        while not self.stop.wait(0.02):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it has just ended
                    self.seen.add((process / "cmdline").read_bytes())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.join()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    machines = namespaces.Hosts(tmp_path_factory.mktemp("bin"))
    try:
        try:
            machines.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield machines
    finally:
        machines.stop()


@pytest.fixture(scope="module")
def local():
    """What 4 ranks of one host ended with, once they have run."""
    return {}


@pytest.fixture
def compare(run_job, local, tmp_path):
    """Compares what ranks on four hosts ended with to what as many end with on one host."""

    def to_one_host():
        ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(namespaces.HOSTS)]
        if not local:
            local["ranks"] = run_job("torch", train, namespaces.HOSTS)
        assert [rank["hosts"] for rank in ranks] == [namespaces.HOSTS] * namespaces.HOSTS
        assert [rank["hosts"] for rank in local["ranks"]] == [1] * namespaces.HOSTS
        for rank in ranks:
            assert rank["weights"] == ranks[0]["weights"]
            assert rank["weights"] == pytest.approx(local["ranks"][0]["weights"], rel=1e-10, abs=1e-12)

    return to_one_host


@pytest.fixture
def rank_of(ranks_command, tmp_path):
    """The command that runs a function of this file on one rank, and its environment.

    Each rank is a fork of a process that has imported PyTorch; it is on the host where it is started.
    """
    _, environment = ranks_command(1, "mpi")

    def build(function, **arguments):
        words = [__file__, function.__name__, tmp_path, json.dumps(arguments)]
        return warm("torch").stub("rank_main", *map(str, words)), environment

    return build


@pytest.fixture
def launch(hosts):
    """Starts ``hvdkit launch`` on the first host for n ranks, one a host; launchers find our ssh first on PATH."""

    def start(launcher, n, command, environment, *options, slots=1):
        placed = ["-n", str(n), "--hosts", ",".join(f"{name}:{slots}" for name in hosts.names[: n // slots])]
        argv = [sys.executable, "-m", "hvdkit.cli", "launch", *placed, "--launcher", launcher, *options, "--", *command]
        return subprocess.Popen(
            [*hosts.inside(0), *argv],
            env={**environment, "PATH": f"{hosts.bin}{os.pathsep}{environment['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield start
    hosts.clear()


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_ranks_of_two_hosts_save_at_a_warning_and_when_the_job_is_told_to_end(launch, ranks_command, launcher):
    """mpirun kills 0.25 s after SIGTERM, and ssh passes no signal on. Rank 1 handles none, and goes first."""
    code = "import os, signal, sys, time\nnames = ('HOROVOD_RANK', 'OMPI_COMM_WORLD_RANK')\n"
    code += "if '0' in map(os.environ.get, names):\n"
    code += "    def save(number, frame):\n        if number == signal.SIGTERM: time.sleep(4)\n"
    code += "        print(signal.Signals(number).name, flush=True)\n        if number == signal.SIGTERM: sys.exit(1)\n"
    code += "    for number in (signal.SIGUSR2, signal.SIGTERM): signal.signal(number, save)\n"
    code += "print('ready', flush=True)\nfor _ in range(3000): time.sleep(0.1)"
    job = launch(launcher, 2, [sys.executable, "-c", code], ranks_command(1, "mpi")[1], "--grace", "60")
    assert {job.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    job.send_signal(signal.SIGUSR2)
    assert {job.stdout.readline()} == {"[0] SIGUSR2\n"}
    job.send_signal(signal.SIGTERM)
    output, errors = job.communicate(timeout=120)
    assert output.splitlines()[0] == "[0] SIGTERM", errors
    assert "hvdkit launch: SIGUSR2 was not passed on to rank 1: no handler for it, or not yet." in errors
    assert (job.returncode, errors.splitlines()[-1]) == (
        143,
        "hvdkit launch: interrupted by SIGTERM; every process was ended.",
    )


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_no_rank_of_two_hosts_lives_on_where_hvdkit_itself_is_killed(hosts, launch, ranks_command, launcher):
    """Their connections end, and no signal comes: what writes nothing would not notice."""
    code = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    job = launch(launcher, 2, [sys.executable, "-c", code], ranks_command(1, "mpi")[1])
    assert {job.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    job.kill()
    job.wait()

    def living():
        return [pid for name in hosts.names[:2] for pid in namespaces.pids(name)]

    deadline = time.monotonic() + 60
    while living():
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in living()]
        time.sleep(0.1)


def test_a_collective_that_one_host_never_reaches_ends_the_job_with_the_stacks_of_both(launch, ranks_command, tmp_path):
    code = "import time, torch, horovod.torch as hvd\nhvd.init()\n"
    code += "if hvd.rank() == 1: time.sleep(600)\nhvd.allreduce(torch.ones(2), name='late')\n"
    options = ["--stall-timeout", "2", "--stall-dir", str(tmp_path / "stacks")]
    job = launch("mpirun", 2, [sys.executable, "-c", code], ranks_command(1, "mpi")[1], *options)
    errors = job.communicate(timeout=200)[1]
    assert job.returncode == 75, errors
    assert "longer than 2 s: rank 1 did not arrive at allreduce 'late'" in errors.splitlines()[-1]
    assert "line 3" in (tmp_path / "stacks" / "rank-1.txt").read_text()


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_outer_steps_between_hosts_of_two_ranks(launch, rank_of, launcher, tmp_path):
    command, environment = rank_of(take_outer_steps)
    job = launch(launcher, 4, command, environment, "--env", "HOROVOD_DYNAMIC_PROCESS_SETS=1", slots=2)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["local"] for rank in ranks] == [2] * 4
    for rank in ranks:
        assert rank["outer"] == ranks[0]["outer"] == pytest.approx(rank["synchronous"], rel=1e-10, abs=1e-12)


def test_over_gloo_as_under_srun(hosts, rank_of, compare):
    command, environment = rank_of(train)
    job = {"SLURM_JOB_ID": "900", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    job["SLURM_STEP_NODELIST"] = ",".join(hosts.names)
    ranks = [
        subprocess.Popen(
            [*hosts.inside(rank), *command],
            env={**environment, **job, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(namespaces.HOSTS)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * namespaces.HOSTS, texts
    compare()


def test_the_launcher_command_of_an_mpi_job_reaches_its_workers_by_the_operators_host_file(hosts, rank_of, tmp_path):
    """As in the launcher pod of the Kubeflow MPI Operator, where no rank runs."""
    command, environment = rank_of(train)
    written = kubernetes.write(BatchJob(2, 1, "00:10:00", tuple(command)), "image", (), "/root/.ssh")
    pods = json.loads(written)["spec"]["mpiReplicaSpecs"]
    hvdkit, *words = pods["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert hvdkit == "hvdkit"
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in hosts.names[1:3]))
    pod = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile")}
    pod |= {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_orte_set_default_slots": "1"}
    done = subprocess.run(
        [*hosts.inside(0), sys.executable, "-m", "hvdkit.cli", words[0], "--launcher", "mpirun", *words[1:]],
        env={**environment, **pod, "PATH": f"{hosts.bin}{os.pathsep}{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    hosts.clear()
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["hosts"] for rank in ranks] == [2, 2] and ranks[0]["weights"] == ranks[1]["weights"]
    assert not (tmp_path / "rank-2.json").exists()


LENT = ("click", "markdown_it", "mdurl", "mpi4py", "msgspec", "pygments", "rich", "typing_extensions.py")
"""What ``hvdkit launch`` imports."""


@pytest.fixture
def own_environment(tmp_path):
    """A small venv with an hvdkit that is linked to, a script and a file of many pieces."""
    prefix = tmp_path / "venv"
    venv.create(prefix, symlinks=True)
    (packages,) = prefix.glob("lib/python*/site-packages")
    for name in LENT:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    (packages / "hvdkit").symlink_to(ROOT / "hvdkit")
    (packages / "data.bin").write_bytes(bytes(range(256)) * 50_000)
    script = prefix / "bin" / "where"
    script.write_text(f"#!{prefix}/bin/python\nimport os, sys\nprint(os.uname().nodename, sys.prefix)\n")
    script.chmod(0o755)
    return prefix


def test_the_environment_is_staged_on_every_hosts_own_disk_once(hosts, ranks_command, own_environment):
    _, environment = ranks_command(1, "mpi")
    environment["LD_LIBRARY_PATH"] = str(Path(sys.prefix) / "lib")
    environment["PATH"] = os.pathsep.join([str(hosts.bin), environment["PATH"]])
    placed = ["-n", "4", "--hosts", ",".join(f"{name}:1" for name in hosts.names), "--launcher", "mpirun"]
    staged = ["--stage", "--stage-dir", str(hosts.disk)]
    argv = [str(own_environment / "bin" / "python"), "-P", "-m", "hvdkit.cli", "launch", *placed, *staged, "where"]

    def start():
        words = [*hosts.inside(0), *argv]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)

    def copies():
        found = [(hosts.disks / name).glob("hvdkit-stage-*/*") for name in hosts.names]
        return [next(filter(Path.is_symlink, paths)) for paths in found]

    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    at = hosts.disk.joinpath(*copies()[0].parts[-2:])
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {name} {at}" for rank, name in enumerate(hosts.names))
    assert " to 4 of 4 hosts in " in done.stderr
    data = next(own_environment.glob("lib/python*/site-packages/data.bin"))
    before = [(copy / data.relative_to(own_environment)).stat().st_ino for copy in copies()]
    assert (copies()[3] / data.relative_to(own_environment)).read_bytes() == data.read_bytes()

    (copies()[2] / data.relative_to(own_environment)).unlink()  # as what cleans /tmp does
    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    assert " to 1 of 4 hosts in " in done.stderr and "3 had it" in done.stderr
    after = [(copy / data.relative_to(own_environment)).stat().st_ino for copy in copies()]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]

    whole = [len(list(copy.parent.iterdir())) for copy in copies()]
    copies()[1].parent.chmod(0o777)
    data.write_bytes(b"new")  # each host lacks this one
    done = start()
    hosts.clear()
    assert done.returncode != 0 and not done.stdout, done.stdout + done.stderr
    assert f"hvdkit launch: host {hosts.names[1]}: {at.parent} is not a directory of this user alone" in done.stderr
    assert "was not started, since the environment was not staged" in done.stderr
    assert [len(list(copy.parent.iterdir())) for copy in copies()] == whole  # and none has a part of it


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_torch_distributed_starts_from_the_environment_and_no_command_line_holds_a_secret(
    hosts, launch, rank_of, launcher, tmp_path
):
    command, environment = rank_of(join, directory=str(tmp_path))
    environment = {**environment, "API_KEY": 'it\'s\n"$HOME" ü', "MASTER_ADDR": "10.0.0.9", "RANK": "7"}
    given = {"HVDKIT_SECRET": secret.new(), "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0"}
    passed = ["--env", "API_KEY"] if launcher == "mpirun" else []
    with Spy() as spy:
        job = launch(launcher, 2, command, {**environment, **given}, *passed)
        texts = job.communicate(timeout=120)
    assert job.returncode == 0, texts
    for rank in range(2):
        found = json.loads((tmp_path / f"joined-{rank}.json").read_text())
        assert (found["sum"], found["host"]) == (3.0, hosts.names[rank])
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (found["API_KEY"], found["HVDKIT_SECRET"]) == (environment["API_KEY"], given["HVDKIT_SECRET"])
    token = (found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] or "").rpartition("/")[2]
    for line in spy.seen:
        assert given["HVDKIT_SECRET"].encode() not in line and b"task_fn" not in line
        assert environment["API_KEY"].encode() not in line
        assert not token or token.encode() not in line


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_a_function_runs_on_ranks_of_two_hosts(hosts, rank_of, launcher):
    _, environment = rank_of(join)
    named = ",".join(f"{name}:1" for name in hosts.names[:2])
    call = (
        "import os, hvdkit\n"
        "def both(x):\n"
        "    import hvdkit.torch as hk, torch.distributed\n"
        "    hk.init(); hk.init_process_group()\n"
        "    return [x, os.uname().nodename, torch.distributed.get_world_size()]\n"
        f"print(hvdkit.run(both, 2, args=(7,), hosts={named!r}, launcher={launcher!r}))"
    )
    words = [*hosts.inside(0), sys.executable, "-c", call]
    environment = {**environment, "PATH": f"{hosts.bin}{os.pathsep}{environment['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    hosts.clear()
    assert done.stdout == f"{[[7, name, 2] for name in hosts.names[:2]]}\n", done.stderr


LIMITS = {
    "horovodrun": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
    "mpirun": {
        f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in (("time", "3"), ("intvl", "1"), ("probes", "3"))
    },
}


@pytest.mark.parametrize("launcher", LIMITS)
def test_a_link_that_is_cut_in_mid_training_ends_the_job_and_the_host_is_named(
    hosts, launch, rank_of, compare, launcher, tmp_path
):
    """Over MPI, what ranks on four hosts train by hvdkit launch before that is what ranks on one host train."""
    begun = tmp_path / "begun"
    n, trains = (namespaces.HOSTS, {"directory": str(tmp_path)}) if launcher == "mpirun" else (3, {})
    command, environment = rank_of(go_on, marker=str(begun), ranks=n, **trains)
    limits = [word for name, value in LIMITS[launcher].items() for word in ("--env", f"{name}={value}")]
    job = launch(launcher, n, command, environment, *limits)
    deadline = time.monotonic() + 120
    while not begun.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if not begun.exists():
        job.kill()
        pytest.fail("it did not begin:\n" + "\n".join(job.communicate(timeout=30)))
    hosts.cut(2)
    try:
        _, errors = job.communicate(timeout=100)
    finally:
        hosts.mend(2)
    assert job.returncode == 1, errors
    lost = f"hvdkit launch: host {hosts.names[2]} answered when the job began and no longer does: "
    assert errors.splitlines()[-1].startswith(lost), errors
    if trains:
        compare()
