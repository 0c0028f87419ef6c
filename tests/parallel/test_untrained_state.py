"""What no gradient trains (masks, codebooks, counters, caches): told where ranks differ by mistake, and only there."""

import warnings
from typing import Any

import pytest
from ranks import on_ranks

import hvdkit

STEPS = 14
PRUNED_AT = 2


def net() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Any) -> Any:
            return self.body(x)

    torch.manual_seed(3)
    return Net()


def keep(model: Any, value: Any, persistent: bool = True) -> None:
    model.register_buffer("kept", value, persistent=persistent)


def pruned(model: Any, world: Any, step: int) -> None:
    """Each rank draws its own mask."""
    import torch
    from torch.nn.utils import prune

    if step == PRUNED_AT:
        torch.manual_seed(world.rank)
        prune.random_unstructured(model.body[0], "weight", amount=0.4)


def pruned_alike(model: Any, world: Any, step: int) -> None:
    import torch
    from torch.nn.utils import prune

    if step == PRUNED_AT:
        torch.manual_seed(7)
        prune.random_unstructured(model.body[0], "weight", amount=0.4)


def frozen_projection(model: Any, world: Any, step: int) -> None:
    """A layer that is added later, not trained, and drawn on each rank."""
    import torch

    if step == PRUNED_AT:
        torch.manual_seed(world.rank)
        model.add_module("projection", torch.nn.Linear(3, 3).requires_grad_(False))


def fixed_features(model: Any, world: Any, step: int) -> None:
    import torch

    if step == PRUNED_AT:
        keep(model, torch.full((20,), float(world.rank)) + torch.arange(20))


def codebook(model: Any, world: Any, step: int) -> None:
    """Moves towards this rank's samples."""
    import torch

    if step == 0:
        keep(model, torch.linspace(0, 1, 40).reshape(5, 8))
    model.kept.mul_(0.9).add_(0.1 * torch.rand(5, 8) * (1 + world.rank))


def counter(model: Any, world: Any, step: int) -> None:
    import torch

    if step == 0:
        keep(model, torch.zeros((), dtype=torch.int64))
    model.kept += 8 + world.rank


def on_one_rank_alone(model: Any, world: Any, step: int) -> None:
    import torch

    if step == PRUNED_AT and world.rank:
        keep(model, torch.ones(3))


def noise(model: Any, world: Any, step: int) -> None:
    """Drawn anew for each step, as by noisy networks: as different as dropout."""
    import torch

    if step == 0:
        keep(model, torch.zeros(40))
        torch.manual_seed(world.rank)
    model.kept.copy_(torch.randn(40))


def noise_of_zeros_and_ones(model: Any, world: Any, step: int) -> None:
    import torch

    if step == 0:
        keep(model, torch.zeros(200))
        torch.manual_seed(world.rank)
    model.kept.copy_((torch.rand(200) < 0.9).float())


def cache_that_grows(model: Any, world: Any, step: int) -> None:
    import torch

    keep(model, torch.arange(3 + step * (world.rank + 1)).float(), persistent=False)


def of_the_same_bits(model: Any, world: Any, step: int) -> None:
    import torch

    if step == 0:
        keep(model, torch.zeros((), dtype=torch.int64))
    model.kept += 1


def rounded_otherwise(model: Any, world: Any, step: int) -> None:
    """As by processors of different kinds."""
    import torch

    if step == 0:
        keep(model, torch.linspace(1, 2, 40) * (1 + 1e-7 * world.rank))
    model.kept *= 1.01


def statistics(model: Any, world: Any, step: int) -> None:
    import torch
    from torch import nn
    from torch.nn.utils import spectral_norm
    from torch.nn.utils.parametrizations import spectral_norm as parametrized

    if step == 0:
        model.more = nn.ModuleList([nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)])
        model.one, model.other = spectral_norm(nn.Linear(6, 6)), parametrized(nn.Linear(6, 6))
        model.plain = nn.Module()
        model.plain.register_buffer("running_scale", torch.ones(6))
    x = torch.rand(8, 6) * (1 + world.rank)
    model.plain.running_scale.lerp_(x.amax(0), 0.1)
    model.more[0](x)
    model.more[1](x[:, :, None].expand(8, 6, 4))
    for _ in range(1 + world.rank):  # the root alone looks at samples of its own
        model.one(x)
        model.other(x)


def observed(model: Any, world: Any, step: int) -> None:
    import torch

    observers = pytest.importorskip("torch.ao.quantization")
    if step == 0:
        model.observer = observers.MovingAverageMinMaxObserver()
    model.observer(torch.rand(8, 6) * (1 + world.rank))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (pruned, "error: body.0.weight_mask differs"),
        (frozen_projection, "error: projection.weight and projection.bias differs"),
        (fixed_features, "kept differs"),
        (codebook, "kept differs"),
        (counter, "kept differs"),
        (on_one_rank_alone, "different buffers"),
        (pruned_alike, ""),
        (noise, ""),
        (noise_of_zeros_and_ones, ""),
        (cache_that_grows, ""),
        (of_the_same_bits, ""),
        (rounded_otherwise, ""),
        (statistics, ""),
        (observed, ""),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@on_ranks("torch", n=3)
def test_what_no_gradient_trains(hk, world, change, told):
    failure, said = trained(hk, world, change)
    if told.startswith("error: "):
        assert told.removeprefix("error: ") in failure
    else:
        assert not failure
        assert len(said) == bool(told and world.is_root), said
        assert all(told in one for one in said)


@on_ranks("torch", n=2)
def test_the_roots_buffers_before_each_forward(hk, world, everyone):
    import torch

    for change in (pruned, codebook):
        assert trained(hk, world, change, buffers="each step") == ("", [])
    model = net()
    keep(model, torch.zeros(3))
    for buffers, expected in (("each step", 0), ("once", world.rank)):
        hk.broadcast_state(model, buffers=buffers)
        for train, expected_now in ((True, expected), (False, world.rank)):
            model.train(train).kept.fill_(world.rank)
            model(torch.ones(1, 6))
            assert model.kept.tolist() == [expected_now] * 3
    with pytest.raises(hvdkit.InvalidArgumentError, match="buffers must be once or each step, got 'always'"):
        hk.broadcast_state(model, buffers="always")


def trained(hk: Any, world: Any, change: Any, **options: Any) -> tuple[str, list[str]]:
    """The error that ended a training, and its warnings about what differs."""
    import torch

    model, failure = net(), ""
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.05), model)
    hk.broadcast_state(model, optimizer, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            for step in range(STEPS):
                with torch.no_grad():
                    change(model, world, step)
                optimizer.zero_grad()
                model(torch.rand(4, 6)).square().mean().backward()
                optimizer.step()
        except hvdkit.AgreementError as error:
            failure = str(error)
    return failure, told_in(found)


def told_in(found: Any) -> list[str]:
    said = [one for one in found if "between" in str(one.message)]
    assert {one.filename for one in said} <= {__file__}
    return [str(one.message) for one in said]


def layer(kind: str, world: Any) -> Any:
    """A Keras layer that writes into a weight of its own."""
    import keras
    import numpy as np
    from keras import ops

    class Writing(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            integer = kind == "counter of samples"
            self.kept = self.add_weight(
                shape=() if integer else (5, 6), dtype="int32" if integer else "float32", trainable=False, name="kept"
            )
            self.drawn = np.random.RandomState(world.rank).rand(5, 6).astype("float32")
            self.seeds = keras.random.SeedGenerator(world.rank)

        def call(self, x: Any, training: bool = False) -> Any:
            if training and kind == "codebook":
                self.kept.assign(0.9 * self.kept + 0.1 * ops.max(x, 0) * np.arange(1, 31).reshape(5, 6))
            elif training and kind == "counter of samples":
                self.kept.assign_add(8 + world.rank)
            elif training and kind == "noise":
                self.kept.assign(keras.random.normal((5, 6), seed=self.seeds))
            return x

    return Writing()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("mask", "error"),
        ("codebook", "warning"),
        ("counter of samples", "warning"),
        ("noise", ""),
        ("statistics", ""),
    ],
)
@on_ranks("keras", smoke=("keras-torch", "keras-jax"))
def test_what_no_gradient_trains_in_fit(hk, world, kind, told):
    import keras
    import numpy as np

    keras.utils.set_random_seed(4)
    own = layer(kind, world)
    more = [keras.layers.Normalization(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    if kind == "statistics":
        more[0].adapt(np.arange(30.0).reshape(5, 6) * (1 + world.rank))
    last = keras.layers.SpectralNormalization(keras.layers.Dense(1))
    model = keras.Sequential([keras.Input((6,)), own, *(more if kind == "statistics" else []), last])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), loss="mse", metrics=["mae"])

    class Draw(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            if kind == "mask":
                own.kept.assign((own.drawn < 0.5).astype("float32"))

    x = np.random.RandomState(world.rank).rand(32, 6).astype("float32")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            model.fit(x, x[:, :1], 2, epochs=3, steps_per_epoch=5, verbose=0, callbacks=[hk.BroadcastState(), Draw()])
            failure = ""
        except hvdkit.AgreementError as error:
            failure = str(error)
    assert bool(failure) == (told == "error") and ("/kept differs" in failure) == (told == "error"), failure
    said = told_in(found)
    assert len(said) == (told == "warning" and world.is_root) and all("/kept differs" in one for one in said)
