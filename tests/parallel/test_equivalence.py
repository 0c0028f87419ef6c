"""Training with n processes is the computation of one process with the n-fold batch, last partial batch included."""

from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

import hvdkit
from hvdkit.steps.shards import Shard

FRAMEWORKS = ("torch", "tensorflow", "keras")
OVER_MPI = {("torch", 2), ("torch", 4), ("tensorflow", 2), ("keras", 2)}
SAMPLES, GLOBAL_BATCH, EPOCHS = 53, 12, 3
TWO_EACH = 56  # leaves a rank of 4 two samples at the end: one alone has no variance
ACCUMULATED = {"samples": 48, "passes": 2, "epochs": 2 * EPOCHS}
EXACT: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": "adam"},
    "filler": {"samples": 49},
    "accumulation": ACCUMULATED,
    "predivide": {"gradient_predivide_factor": 2.0},
}
BUCKETS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("one bucket", {"optimizer": "adam"}),
    "predivide": ("small buckets", {"gradient_predivide_factor": 2.0}),
    "accumulation": ("small buckets", ACCUMULATED),
}
"""For each way that buckets travel, and how they train, the training whose gradients travel alone."""
MISTAKES = {
    "equal weights": {"equal_weights": True},
    "no broadcast": {"broadcasts": False},
    "no average": {"averages": False},
}


def make_data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(samples, 6))
    return x, (x.sum(axis=1) > 0).astype(np.int64) + (x[:, 0] > 1)


def train(
    hk: Any,
    on: Any,
    world: Any,
    *,
    samples: int = SAMPLES,
    epochs: int = EPOCHS,
    dtype: str = "float64",
    equal_weights: bool = False,
    **options: Any,
) -> list[float]:
    """Final weights of a training on GLOBAL_BATCH samples a step; every rank begins with other weights."""
    on.set_precision(dtype)
    training = on.Training(world.rank, **options)
    data = on.dataset(*make_data(samples))
    loader = hk.shard(data, world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    training.train(loader, epochs, equal_weights=equal_weights)
    return training.weights()


def begin(on: Any, world: Any) -> list[float]:
    on.set_precision("float64")
    return on.Training(world.rank).weights()


def train_in_parts(on: Any, world: Any, parts: int) -> list[float]:
    """In one process: BatchNorm over each of ``parts`` parts of the global batch, as that many ranks would."""
    on.set_precision("float64")
    training, (x, y) = on.Training(world.rank, batch_norm="local"), make_data(TWO_EACH)
    worlds = [hvdkit.Topology(rank, parts) for rank in range(parts)]
    shares = [Shard(TWO_EACH, one, GLOBAL_BATCH // parts, remainder="exact", seed=3) for one in worlds]
    for epoch in range(EPOCHS):
        for batches in zip(*(share.batches(epoch) for share in shares), strict=True):
            training.step_in_parts([(x[one.indices], y[one.indices], one.weight) for one in batches])
    return training.weights()


def differs(weights: list[float], expected: list[float]) -> float:
    """The largest difference, relative to the largest weight."""
    return np.abs(np.subtract(weights, expected)).max() / np.abs(expected).max()


def same(expected: list[float], rel: float = 1e-10, abs: float = 1e-12) -> Any:
    return pytest.approx(expected, rel=rel, abs=abs)


@on_ranks(*FRAMEWORKS, n=(2, 3), mpi=OVER_MPI)
@pytest.mark.parametrize("name", EXACT)
def test_n_ranks_end_with_the_weights_of_one_process(hk, on, world, everyone, alone, name):
    """Also where gradients travel in buckets, exactly as where they travel alone."""
    weights = train(hk, on, world, **EXACT[name])
    assert weights == same(alone(train, **EXACT[name]))
    assert all(one == weights for one in everyone(weights))
    way, how = BUCKETS.get(name, ("", {}))
    if way in on.OPTIONS:
        assert train(hk, on, world, **how, **on.OPTIONS[way]) == same(weights)
    if name == "adam" and on.OPTIONS:
        assert set(on.OPTIONS) == {one for one, _ in BUCKETS.values()}


@on_ranks(*FRAMEWORKS, n=4, mpi=OVER_MPI)
def test_three_of_four_ranks_have_nothing_in_the_last_step(hk, on, world, everyone, alone):
    test_n_ranks_end_with_the_weights_of_one_process(hk, on, world, everyone, alone, "filler")
    assert on.over_mpi() == (hk.__name__ == "hvdkit.torch")


@on_ranks(*FRAMEWORKS, n=3)
def test_float32_ends_within_its_rounding(hk, on, world, everyone, alone):
    weights = train(hk, on, world, dtype="float32")
    assert weights == same(alone(train, dtype="float32"), rel=1e-5, abs=1e-6)
    assert all(one == weights for one in everyone(weights))


@on_ranks(*FRAMEWORKS, n=3)
@pytest.mark.parametrize(("compression", "rounding"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 2**-8)])
def test_compressed_gradients_stay_within_their_rounding(hk, on, world, everyone, alone, compression, rounding):
    """Each gradient is rounded to 11 or 8 bits, and added up in as many, n times at most; or to 1/127 of the largest.

    The same on every rank.
    """
    exact, weights = np.array(alone(train)), train(hk, on, world, compression=compression)
    off = np.linalg.norm(weights - exact) / np.linalg.norm(exact - alone(begin))
    assert 1e-7 < off < (world.size + 1) * rounding
    assert all(one == weights for one in everyone(weights))
    if on.OPTIONS:
        in_buckets = train(hk, on, world, compression=compression, **on.OPTIONS["small buckets"])
        assert 0 < differs(in_buckets, exact) < (world.size + 1) * rounding * 5
        assert all(one == in_buckets for one in everyone(in_buckets))


@on_ranks(*FRAMEWORKS, n=3)
def test_local_batch_norm_is_that_of_one_process_on_parts_of_the_batch(hk, on, world, everyone, alone):
    weights = train(hk, on, world, samples=TWO_EACH, batch_norm="local")
    assert weights == same(alone(train_in_parts, parts=world.size))
    assert differs(weights, alone(train, samples=TWO_EACH, batch_norm="local")) > 1e-3
    assert all(one == weights for one in everyone(weights))


@on_ranks("torch", n=3)
def test_global_batch_norm_is_that_of_one_process(hk, on, world, everyone, alone):
    weights = train(hk, on, world, batch_norm="global")
    assert weights == same(alone(train, batch_norm="global"))
    assert all(one == weights for one in everyone(weights))


@on_ranks(*FRAMEWORKS, n=2, mpi=OVER_MPI)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_finds_each_mistake(hk, on, world, everyone, alone, mistake):
    right = alone(train)
    if mistake == "no broadcast" and hk.__name__ in ("hvdkit.torch", "hvdkit.tensorflow"):
        with pytest.raises(Exception, match="the ranks train apart"):
            train(hk, on, world, **MISTAKES[mistake])
    else:
        assert any(differs(weights, right) > 1e-4 for weights in everyone(train(hk, on, world, **MISTAKES[mistake])))
    assert alone(train, **MISTAKES[mistake]) == right


def evaluate(hk: Any, on: Any, world: Any) -> float:
    on.set_precision("float64")
    return on.accuracy(on.Training(0), on.dataset(*make_data(49)), world, 4)


@on_ranks(*FRAMEWORKS, n=3)
def test_evaluation_sees_every_sample_once(hk, on, world, alone):
    assert evaluate(hk, on, world) == alone(evaluate)


@on_ranks(*FRAMEWORKS, n=(2, 3), mpi=OVER_MPI)
def test_the_ranks_met_over_mpi_and_over_gloo(hk, on, world):
    framework = hk.__name__.rpartition(".")[2]
    assert on.over_mpi() == ((framework, world.size) in OVER_MPI)
