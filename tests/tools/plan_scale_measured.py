"""What ``hvdkit emulate`` would have measured, from numbers that are known."""

import numpy as np
from emulate_results import ENVIRONMENT

from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults, Sample
from hvdkit.measure.plan import network

SIZES = tuple(2**power for power in range(16, 25))
ALPHA, BETA, OVERHEAD = 40e-6, 8e-9, 150e-6


def seconds(nbytes, n, alpha=ALPHA, beta=BETA, overhead=OVERHEAD, algorithm=network.RING):
    return overhead + alpha * network.messages(n, algorithm) + beta * network.moved(nbytes, n)


def results(n, *, hosts=None, known=True, noise=0.02, trials=20, sizes=SIZES, seed=0, spoil=None,
            skew_s=1e-4, time=seconds, asked=None, **parameters):  # fmt: skip
    """Measurements of n ranks on ``hosts`` hosts (one each by default), of the ring or of a library (not ``known``).

    ``spoil(rng, times)`` may change the times of a size. Skews are ranges of n exponential delays of mean ``skew_s``.
    """
    rng = np.random.default_rng([seed, n])
    hosts = n if hosts is None else hosts
    samples = []
    for index, nbytes in enumerate(sizes):
        times = time(nbytes, n, **parameters) * np.exp(rng.normal(0, noise, trials))
        times = times if spoil is None else spoil(rng, times)
        for trial, taken in enumerate(map(float, times)):
            skew = float(np.ptp(rng.exponential(skew_s, n)))
            samples.append(Sample(trial, index, nbytes, skew, taken, taken, 0, (taken,) * n))
    told = {"engine": "ring" if known else "mpi", "ranks": n, "hosts": hosts, "ppn": -(-n // hosts)}
    plan = ReplayPlan(tuple(Collective(f"layer{index}", nbytes // 4) for index, nbytes in enumerate(sizes)), trials)
    wanted = EmulateAsked(**{**told, **(asked or {})})
    return EmulateResults(asked=wanted, environment=ENVIRONMENT, notes=[], plan=plan, samples=samples)
