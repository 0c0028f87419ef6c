"""bfloat16 over real ranks: Horovod's sum of it, which ``hvdkit install`` adds, and gradients that travel as it."""

import functools
import operator
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import missing, on_ranks

from hvdkit.prepare.install.record import read_record

RECORD = None if missing("torch") else read_record()
pytestmark = pytest.mark.skipif(
    RECORD is None or "bfloat16" not in RECORD.adjustments,
    reason="Horovod was built without hvdkit, with --plain, or before it had bfloat16 (`hvdkit install`)",
)
ROUNDING = 2.0**-8 * (1 + 2**-10)  # of a number of 8 bits to nearest, relative; of float32 before
LENGTHS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 1000, 5_000_001)  # the last over 4 MiB, so over Horovod's fusion buffer


def numbers(length: int, rank: int) -> Any:
    """Of all sizes and both signs."""
    import torch

    generator = torch.Generator().manual_seed(17 * length + rank)
    sizes = torch.randint(-8, 8, (length,), generator=generator)
    return torch.ldexp(torch.randn(length, generator=generator), sizes).bfloat16()


def sums_are_right(world: Any, everyone: Any) -> None:
    import horovod.torch as hvd
    import torch

    for length in LENGTHS:
        for start in (0, 1):  # an odd address, too
            given = [numbers(length + start, rank)[start:] for rank in range(world.size)]
            found = given[world.rank].clone() if not start else numbers(length + 1, world.rank)[1:]
            hvd.allreduce_(found, op=hvd.Sum, name=f"sum.{length}.{start}")
            assert found.dtype == torch.bfloat16
            wide = torch.stack(given).double()
            off = (found.double() - wide.sum(0)).abs()
            assert (off <= (world.size - 1) * ROUNDING * wide.abs().sum(0)).all()
            if world.size == 2:
                assert torch.equal(found, (given[0].float() + given[1].float()).bfloat16())
    digest = int(found.view(torch.int16).long().sum())
    assert everyone(digest) == [digest] * world.size

    group = [numbers(length, world.rank) for length in (3, 70_001, 5)] + [torch.ones(4) * (1 + world.rank)]
    low, high = (
        hvd.grouped_allreduce(part, op=hvd.Sum, name=name) for part, name in ((group[:3], "low"), (group[3:], "high"))
    )
    for found, length in zip(low, (3, 70_001, 5), strict=True):
        wide = torch.stack([numbers(length, rank) for rank in range(world.size)]).double()
        assert ((found.double() - wide.sum(0)).abs() <= (world.size - 1) * ROUNDING * wide.abs().sum(0)).all()
    assert high[0].tolist() == [sum(range(1, world.size + 1))] * 4


def special_numbers_stay(world: Any) -> None:
    import horovod.torch as hvd
    import torch

    nan, inf, tiny, most = float("nan"), float("inf"), 2.0**-133, torch.finfo(torch.bfloat16).max
    mine = [nan, inf, -inf, inf, tiny, most, -0.0, 1.0] if world.is_root else [1.0, 1.0, 1.0, -inf, tiny, most, -0.0, 0]
    found = hvd.allreduce(torch.tensor(mine).bfloat16(), op=hvd.Sum, name="special").tolist()
    assert np.isnan(found[0]) and found[1:3] == [inf, -inf] and np.isnan(found[3])
    assert found[4:] == [tiny * world.size, inf, 0.0, 1.0]
    assert np.signbit(found[6])
    even = [1.0, 1.0 + 2**-7]  # beside half of a last place: the even neighbour
    half = 2.0**-8 if world.rank == 1 else 0.0
    given = even if world.is_root else [half, half]
    found = hvd.allreduce(torch.tensor(given).bfloat16(), op=hvd.Sum, name="ties").tolist()
    assert found == [1.0, 1.0 + 2**-6]


def other_operations_are_right(world: Any) -> None:
    import horovod.torch as hvd
    import torch

    given = [numbers(1001, rank) for rank in range(world.size)]
    mine, wide = given[world.rank], torch.stack(given).float()
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min, name="min"), wide.amin(0).bfloat16())
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max, name="max"), wide.amax(0).bfloat16())
    product = functools.reduce(operator.mul, wide.double())
    found = hvd.allreduce(mine, op=hvd.Product, name="product").double()
    assert ((found - product).abs() <= world.size * ROUNDING * product.abs()).all()
    half = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="scaled").double()
    exact = 2 * wide.double().sum(0)
    assert ((half - exact).abs() <= world.size * ROUNDING * 2 * wide.double().abs().sum(0)).all()
    mean = hvd.allreduce(mine, op=hvd.Average, name="mean").double()
    assert ((mean - wide.double().mean(0)).abs() <= world.size * ROUNDING * wide.double().abs().mean(0)).all()

    assert torch.equal(
        hvd.allgather(mine[: world.rank + 1], name="rows"), torch.cat([g[: r + 1] for r, g in enumerate(given)])
    )
    assert torch.equal(hvd.broadcast(mine, world.size - 1, name="root"), given[-1])
    parts, counts = hvd.alltoall(mine[: 3 * world.size], torch.tensor([3] * world.size, dtype=torch.int32), name="all")
    assert torch.equal(parts, torch.cat([g[3 * world.rank : 3 * world.rank + 3] for g in given]))
    assert counts.tolist() == [3] * world.size
    rows = [g[: 6 * world.size].reshape(6, -1) for g in given]
    share = np.array_split(np.arange(6), world.size)[world.rank]
    found = hvd.reducescatter(rows[world.rank].contiguous(), op=hvd.Sum, name="scattered").double()
    wide = torch.stack(rows).double()[:, share]
    assert ((found - wide.sum(0)).abs() <= (world.size - 1) * ROUNDING * wide.abs().sum(0)).all()
    ones = hvd.reducescatter(torch.ones(6, 2, dtype=torch.bfloat16), op=hvd.Average, name="ones")
    assert ones.tolist() == [[1.0, 1.0]] * len(share)


@on_ranks("torch", n=3, mpi=True)
def test_horovod_adds_up_over_mpi(hk, world, everyone):
    sums_are_right(world, everyone)
    special_numbers_stay(world)
    other_operations_are_right(world)


@on_ranks("torch", n=(2, 3))
def test_horovod_adds_up_over_gloo(hk, world, everyone):
    sums_are_right(world, everyone)
    special_numbers_stay(world)
    other_operations_are_right(world)


def one_goes_on_alone() -> list[float]:
    """The root's sum after the others have joined; without hvdkit, which would watch them."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    found = []
    if hvd.rank() == 0:
        found = hvd.allreduce(torch.ones(5).bfloat16(), op=hvd.Sum, name="alone").tolist()
    hvd.join()
    return found


@pytest.mark.parallel
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_rank_that_has_joined_counts_as_zeros(run_ranks, controller):
    assert run_ranks(one_goes_on_alone, 2, controller=controller, warm="torch") == [[1.0] * 5, []]


@on_ranks("torch", n=2, mpi=True)
def test_adasum_of_equal_gradients_is_their_mean(hk, world):
    import horovod.torch as hvd
    import torch

    same = numbers(1000, 0)
    assert torch.equal(hvd.allreduce(same, op=hvd.Adasum, name="same"), same)
    apart = torch.tensor([1.0, 0.0] if world.is_root else [0.0, 3.0]).bfloat16()
    assert hvd.allreduce(apart, op=hvd.Adasum, name="apart").tolist() == [1.0, 3.0]


# Gradients ------------------------------------------------------------------------------------------------------------

SAMPLES, FEATURES, STEPS = 12, 8, 60


def batches(rank: int = 0, size: int = 1) -> Any:
    """A rank's share of each global batch, in bfloat16; of one process, all."""
    import torch

    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(FEATURES, generator=generator)
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        yield x[rank::size].bfloat16(), (x @ weights)[rank::size, None].bfloat16()


def training(distribute: Any, data: Any) -> Any:
    """Losses, and the weights at the end; gradients of two types where the last layer is float32."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16).bfloat16(), nn.Tanh(), nn.Linear(16, 8).bfloat16(), nn.Linear(8, 1))
    optimizer = distribute(torch.optim.SGD(model.parameters(), 0.02, momentum=0.5), model)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = ((model[3](model[:3](x).float()) - y.float()) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), torch.cat([one.detach().float().reshape(-1) for one in model.parameters()])


@on_ranks("torch", n=(2, 3), mpi={("torch", 2)})
def test_a_model_trains_as_one_process_does(hk, world, everyone):
    found_losses, found = training(hk.distribute, batches(world.rank, world.size))
    expected_losses, expected = training(lambda optimizer, _: optimizer, batches())
    losses = np.mean(everyone(found_losses.tolist()), axis=0)
    # Each step rounds weights to 8 bits, on one process, too.
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert losses == pytest.approx(expected_losses, rel=0.1, abs=0.02)
    assert losses[-5:].mean() < 0.2 * losses[:5].mean()
    assert everyone(found.tolist()) == [found.tolist()] * world.size


def sent_by_a_backward(hk: Any, size: int, **options: Any) -> list[tuple[str, int]]:
    """Type and length of what travels for a model of ``size`` x ``size``."""
    import horovod.torch as hvd
    import torch

    model = torch.nn.Linear(size, size, bias=False).bfloat16()
    hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model, **options)
    sent, plain = [], hvd.allreduce_async_

    def noting(tensor: Any, **words: Any) -> int:
        sent.append((str(tensor.dtype), tensor.numel()))
        return plain(tensor, **words)

    hvd.allreduce_async_ = noting
    try:
        model(torch.ones(1, size).bfloat16()).sum().backward()
    finally:
        hvd.allreduce_async_ = plain
    assert torch.equal(model.weight.grad, torch.ones(size, size).bfloat16())
    return sent


@on_ranks("torch", n=2)
def test_a_gradient_travels_in_two_bytes_a_number(hk, world):
    ((kind, length),) = sent_by_a_backward(hk, 300)
    assert kind == "torch.bfloat16" and 90_000 < length < 90_100
    ((kind, _),) = sent_by_a_backward(hk, 30, compression="fp16")
    assert kind == "torch.float16"


@on_ranks("torch", n=2, fresh=True)
def test_a_horovod_without_it_gets_float32(hk, world):
    """As ``hvdkit install --plain`` builds it, or a site did: its extension has no such functions."""
    from horovod.torch.mpi_ops import mpi_lib

    for name in [name for name in dir(mpi_lib) if "BFloat16" in name]:
        delattr(mpi_lib, name)
    ((kind, _),) = sent_by_a_backward(hk, 30)
    assert kind == "torch.float32"


@on_ranks("torch", n=1)
def test_many_ranks_add_up_in_float32(hk, world):
    import torch

    from hvdkit.steps.gradients import BFLOAT16_RANKS
    from hvdkit.steps.torch_tensors import sends_bfloat16

    assert sends_bfloat16("cpu", BFLOAT16_RANKS) and not sends_bfloat16("cpu", BFLOAT16_RANKS + 1)
    # Why: one after another, so many equal numbers are still added up right, and a few hundred no more.
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(BFLOAT16_RANKS):
        total = total + 1
    assert total == BFLOAT16_RANKS
    for _ in range(512 - BFLOAT16_RANKS):
        total = total + 1
    assert total == 256


@on_ranks("torch", n=2)
def test_sparse_gradients_travel(hk, world, everyone):
    import torch

    table = torch.nn.Embedding(6, 3, sparse=True).bfloat16()
    hk.distribute(torch.optim.SGD(table.parameters(), 0.1), table)
    hk.broadcast_state(table)
    (table(torch.tensor([world.rank, 4])) * (1 + world.rank)).sum().backward()
    assert table.weight.grad.dtype == torch.bfloat16
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.5, 1.0, 0.0, 0.0, 1.5, 0.0]


@on_ranks("torch", n=2)
def test_gradients_in_8_bits_are_refused_on_every_rank(hk, world):
    import torch

    table = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))])
    told = message(lambda: hk.distribute(torch.optim.SGD(table.parameters(), 0.1), table))
    assert "the gradient of 0 cannot travel: it is float8_e4m3fn" in told and "keep parameters in bfloat16" in told
    model = torch.nn.Linear(2, 1)
    model.frozen = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    model(torch.full((1, 2), 1.0 + world.rank)).sum().backward()
    assert model.weight.grad.tolist() == [[1.5, 1.5]]


# TensorFlow and Keras -------------------------------------------------------------------------------------------------


@on_ranks("tensorflow", n=(2, 3), mpi={("tensorflow", 3)})
def test_tensorflow_adds_up_as_it_is(hk, world):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    sent, plain = [], hvd.grouped_allreduce

    def noting(tensors: Any, **words: Any) -> Any:
        sent.extend(one.dtype.name for one in tensors)
        return plain(tensors, **words)

    given = [numbers(1001, rank).float().numpy() for rank in range(world.size)]
    mine = tf.cast(given[world.rank], tf.bfloat16)
    variable = tf.Variable(tf.zeros(1001, tf.bfloat16))
    hvd.grouped_allreduce = noting
    try:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * mine)
        found = tape.gradient(loss, variable)
    finally:
        hvd.grouped_allreduce = plain
    assert sent[0] == "bfloat16" and found.dtype == tf.bfloat16
    wide = np.stack(given).astype(float)
    off = np.abs(tf.cast(found, tf.float64).numpy() - wide.mean(axis=0))
    assert (off <= world.size * ROUNDING * np.abs(wide).mean(axis=0)).all()


@on_ranks("tensorflow", n=2, fresh=True)
def test_tensorflow_s_horovod_without_it_gets_float32(hk, world):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvdkit.tensorflow import optimizer

    plain = hvd.allreduce

    def refusing(tensor: Any, **words: Any) -> Any:
        if tensor.dtype == tf.bfloat16:
            raise TypeError("Value passed to parameter 'tensor' has DataType bfloat16 not in list of allowed values")
        return plain(tensor, **words)

    hvd.allreduce = refusing
    assert not optimizer._adds_bfloat16()
    with hk.distribute(tf.GradientTape()) as tape:
        variable = tf.Variable(tf.zeros(2, tf.bfloat16))
        loss = tf.reduce_sum(variable * tf.constant([1.0 + world.rank, 2.0], tf.bfloat16))
    assert tf.cast(tape.gradient(loss, variable), tf.float32).numpy().tolist() == [1.5, 2.0]


@on_ranks("tensorflow", n=2)
def test_tensorflow_refuses_8_bits_on_every_rank(hk, world):
    """A gradient of a GPU's: on a CPU TensorFlow has no operation to make one."""
    import tensorflow as tf

    from hvdkit.tensorflow import optimizer

    gradient = tf.cast(tf.zeros(2), tf.dtypes.experimental.float8_e5m2)
    told = message(lambda: optimizer._reducible(gradient, "kernel", None))
    assert "the gradient of kernel cannot travel: it is float8_e5m2" in told


@on_ranks("keras-torch", "keras-jax", n=2)
def test_keras_adds_up_as_it_is(hk, world, everyone):
    import horovod.torch as hvd
    import keras

    keras.config.set_dtype_policy("bfloat16")
    try:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(hk.distribute(keras.optimizers.SGD(0.125)), "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    hk.broadcast_state(model)
    sent: list[str] = []
    plain = {name: getattr(hvd, name) for name in ("allreduce_", "allreduce_async_", "grouped_allreduce")}

    def noting(name: str) -> Any:
        def call(tensors: Any, **words: Any) -> Any:
            sent.extend(str(one.dtype) for one in (tensors if isinstance(tensors, list) else [tensors]))
            return plain[name](tensors, **words)

        return call

    for name in plain:
        setattr(hvd, name, noting(name))
    try:
        x = np.random.default_rng(world.rank).normal(size=(8, 4)).astype("float32")
        model.fit(x, x.sum(axis=1, keepdims=True), batch_size=4, epochs=2, verbose=0, shuffle=False)
    finally:
        for name, function in plain.items():
            setattr(hvd, name, function)
    assert "torch.bfloat16" in sent
    found = [np.asarray(one, dtype=float).tolist() for one in model.get_weights()]
    assert everyone(found) == [found] * 2
