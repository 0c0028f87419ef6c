"""Results of an emulation that are made, not measured, for the tests of what is read from them."""

import numpy as np

from hvdkit.common.units import ITEM_SIZES
from hvdkit.measure.bench.results import Environment
from hvdkit.measure.emulate import plan
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults, Sample

ENVIRONMENT = Environment("1", "3.11", "Linux", {"mpi4py": "4"}, 4)


def asked(**changes):
    return EmulateAsked(**{"engine": "ring", "ranks": 4, "hosts": 1, "ppn": 4, **changes})


def sample(trial, index, nbytes, own, skew=0.0, transfer=None):
    """A collective whose ranks took ``own`` seconds each."""
    slowest = max(own)
    return Sample(
        trial, index, nbytes, skew, slowest - skew if transfer is None else transfer, slowest, own.index(slowest),
        tuple(own),
    )  # fmt: skip


def from_sizes(sizes, dtype="float32", *, names=None, trials=plan.TRIALS, source="a list of sizes"):
    """A plan of sizes in bytes, replayed in this order."""
    steps = []
    for index, size in enumerate(sizes):
        name = names[index] if names else f"collective{index}"
        steps.append(plan.Collective(name, size // ITEM_SIZES[dtype], dtype))
    return plan.ReplayPlan(tuple(steps), trials, source)


def made(seconds, trials=8, noise=0.0, seed=0, ranks=4, environment=ENVIRONMENT, notes=(), **changes):
    """Results of a step with one collective for each entry of ``seconds``: bytes to the delay of its slowest rank."""
    rng = np.random.default_rng(seed)
    steps = from_sizes(list(seconds), trials=trials, names=[f"size{size}" for size in seconds])
    samples = []
    for trial in range(trials):
        for index, (size, mean) in enumerate(seconds.items()):
            delay = mean * float(np.exp(rng.normal(0, noise)))
            samples.append(sample(trial, index, size, [delay] + [delay * 0.9] * (ranks - 1), skew=0.1 * delay))
    return results(steps, samples, environment=environment, notes=notes, ranks=ranks, **changes)


def results(steps, samples, environment=ENVIRONMENT, notes=(), **changes):
    ranks = len(samples[0].ranks_s) if samples else 4
    return EmulateResults(
        asked=asked(**{"ranks": ranks, **changes}),
        environment=environment,
        notes=list(notes),
        plan=steps,
        samples=list(samples),
    )
