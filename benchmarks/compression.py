"""Steps of a training over a slow network, by how the gradients travel: a ratio to float32, measured in turns.

Two hosts are network namespaces of this machine with one rank each (root, Linux); every link has the rate asked for.
In each round every variant takes a step, so that what else the machine does meets all of them. Peers are PyTorch's
communication hooks for DistributedDataParallel over Gloo.

    python benchmarks/compression.py [--mbit 1000] [--delay-ms 20] [--rounds 15] [--model wide|small] [-o FILE]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import delayed_link

HERE = Path(__file__).resolve().parent
VARIANTS = ("none", "fp16", "bf16", "int8", "auto")
TRIAL = 30  # steps of "auto" until it has chosen
PEERS = ("ddp", "ddp fp16", "ddp powersgd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1000, help="rate of each host's link, Mbit/s")
    parser.add_argument("--delay-ms", type=float, default=0, help="of a packet each way; netem or delayed_link.py")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant, beside 3 to warm up")
    parser.add_argument("--model", choices=("wide", "small"), default="wide", help="80 MB or 4 MB of gradients")
    parser.add_argument("--launcher", choices=("mpirun", "horovodrun"), default="mpirun", help="over MPI or Gloo")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch's hooks out")
    parser.add_argument("-o", "--output", type=Path, help="also write the times as JSON")
    options = parser.parse_args()
    if "HVDKIT_COMPRESSION_RANK" in os.environ:
        measure(options)
        return
    times = on_two_hosts(Path(__file__), options, "HVDKIT_COMPRESSION_RANK")
    show(options, times)


def on_two_hosts(script: Path, options: argparse.Namespace, variable: str) -> dict[str, list[float]]:
    """What the root of two ranks has written, which run the script with this command line, and ``variable`` set.

    Args:
        options: with ``mbit``, ``delay_ms`` and ``launcher``.
        variable: names the file that the root is to write, JSON.
    """
    sys.path.insert(0, str(HERE.parent / "tests" / "parallel"))
    import namespaces

    if lacking := namespaces.missing():
        sys.exit(f"{script.name}: needs {', '.join(lacking)}")
    namespaces.HOSTS, namespaces.RATE = 2, f"{options.mbit:g}mbit"
    with tempfile.TemporaryDirectory() as directory:
        hosts, found = namespaces.Hosts(Path(directory)), Path(directory) / "times.json"
        environ = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", variable: str(found)}
        placed = ",".join(f"{name}:1" for name in hosts.names)
        job = [sys.executable, "-m", "hvdkit", "launch", "-n", "2", "--hosts", placed, "--launcher", options.launcher]
        job += ["--env", variable, "--env", "OMP_NUM_THREADS", "--", sys.executable, str(script.resolve())]
        hosts.start()
        for name in hosts.names:  # BBR, the default of some kernels, fills such links in one direction at a time
            reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run(["ip", "netns", "exec", name, "sh", "-c", reno], check=True)
        try:
            with delayed(options, hosts):
                argv = [*hosts.inside(0), *job, *sys.argv[1:]]
                subprocess.run(argv, check=True, env={**environ, "OMP_NUM_THREADS": "1"})
        finally:
            hosts.stop()
        return json.loads(found.read_text())  # type: ignore[no-any-return]


def delayed(options: argparse.Namespace, hosts: Any) -> contextlib.AbstractContextManager[Any]:
    """The delay between both hosts, while the block runs."""
    if not options.delay_ms:
        return contextlib.nullcontext()
    add = f"qdisc add dev eth0 root netem delay {options.delay_ms}ms limit 100000"
    tried = [subprocess.run(["tc", "-n", name, *add.split()], capture_output=True) for name in hosts.names]
    if not any(netem.returncode for netem in tried):
        return contextlib.nullcontext()
    return delayed_link.between(hosts.names, hosts.addresses, options.mbit, options.delay_ms)


def show(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    link = f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms each way"
    print(f"2 hosts of one rank, {link}, {options.launcher}, {options.model}, {options.rounds} rounds;")
    print("ratio: how many steps in the time of one in float32, median [quartiles] over rounds")
    print(f"{'gradients':<14}{'step ms':>10}{'ratio':>8}")
    for variant, own in times.items():
        ratios = [base / mine for base, mine in zip(times["none"], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{variant:<14}{1e3 * statistics.median(own):>10.1f}{middle:>8.2f}  [{low:.2f}, {high:.2f}]")
    if options.output:
        options.output.write_text(
            json.dumps({"options": vars(options), "times_s": times}, default=str, indent=1) + "\n"
        )


# On a rank ------------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    warnings.filterwarnings("ignore", "an optimizer .* that distribute has not got")  # DDP averages for it
    sizes = (4096, 4096, 800) if options.model == "wide" else (900, 900, 200)
    steps = {name: hvdkit_step(hk, torch, sizes, name) for name in VARIANTS}
    for _ in range(TRIAL):
        steps["auto"]()
    if not options.no_peers:
        hk.init_process_group()
        steps.update({name: peer_step(torch, sizes, name) for name in PEERS})
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 3):
        for name, step in steps.items():
            hk.average_metrics({"turn": 0.0}, world)  # nobody begins before all have ended the last one
            start = time.perf_counter()
            step()
            hk.average_metrics({"turn": 0.0}, world)
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    if world.is_root:
        Path(os.environ["HVDKIT_COMPRESSION_RANK"]).write_text(json.dumps(times))


def model_of(torch: Any, sizes: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    first, middle, last = sizes
    return torch.nn.Sequential(torch.nn.Linear(first, middle), torch.nn.ReLU(), torch.nn.Linear(middle, last))


def step_of(torch: Any, model: Any, optimizer: Any, width: int, batch: int = 8) -> Any:
    x = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def hvdkit_step(hk: Any, torch: Any, sizes: tuple[int, ...], compression: str) -> Any:
    model = model_of(torch, sizes)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, compression=compression)
    return step_of(torch, model, optimizer, sizes[0])


def peer_step(torch: Any, sizes: tuple[int, ...], name: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    # In several buckets PowerSGD's collectives over Gloo cross, and PyTorch 2.13 aborts.
    how = {"bucket_cap_mb": 200} if name == "ddp powersgd" else {}
    model = torch.nn.parallel.DistributedDataParallel(model_of(torch, sizes), **how)
    if name == "ddp fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "ddp powersgd":
        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return step_of(torch, model, torch.optim.SGD(model.parameters(), lr=0.01), sizes[0])


if __name__ == "__main__":
    main()
