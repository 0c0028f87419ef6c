"""hvdkit.keras on torch: gradients are the mean when backward() returns, and never averaged twice; real ranks.

Frameworks and hvdkit are imported within, on the ranks.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import on_ranks

FEATURES, SAMPLES = 6, 48
X = np.random.default_rng(5).normal(size=(SAMPLES, FEATURES)).astype("float32")
Y = np.random.default_rng(6).normal(size=(SAMPLES, 3)).astype("float32")


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def near(expected: list[float]) -> Any:
    return pytest.approx(expected, rel=2e-5, abs=2e-6)


def loss_of(model: Any, data: Any) -> Any:
    x, y = data
    return model.compute_loss(y=y, y_pred=model(x, training=True))


def gradients_of(model: Any) -> list[Any]:
    return [one.value.grad for one in model.trainable_weights]


def clips_in_place(model: Any, data: Any) -> list[Any]:
    import torch

    model.zero_grad()
    loss_of(model, data).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    return gradients_of(model)


def clips_a_copy(model: Any, data: Any) -> list[Any]:
    import torch

    model.zero_grad()
    loss_of(model, data).backward()
    norm = torch.stack([one.norm() for one in gradients_of(model)]).norm()
    return [one * (0.2 / norm) for one in gradients_of(model)]


def without_backward(model: Any, data: Any) -> list[Any]:
    import torch

    return list(torch.autograd.grad(loss_of(model, data), [one.value for one in model.trainable_weights]))


def assigned(model: Any, data: Any) -> list[Any]:
    loss_of(model, data).backward()  # of which nothing is used
    for one, gradient in zip(model.trainable_weights, without_backward(model, data), strict=True):
        one.value.grad = 2 * gradient
    return gradients_of(model)


def twice_through_one_graph(model: Any, data: Any) -> list[Any]:
    model.zero_grad()
    loss = loss_of(model, data)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    return gradients_of(model)


def of_two_halves(model: Any, data: Any) -> list[Any]:
    x, y = data
    model.zero_grad()
    for part in (slice(None, None, 2), slice(1, None, 2)):
        (0.5 * loss_of(model, (x[part], y[part]))).backward()
    return gradients_of(model)


def with_a_penalty(model: Any, data: Any) -> list[Any]:
    """As of WGAN-GP: a gradient within the loss."""
    import torch

    x, y = data
    x = x.clone().requires_grad_(True)
    model.zero_grad()
    of_x = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    (loss_of(model, (x, y)) + (of_x**2).mean()).backward()
    return gradients_of(model)


WAYS = (
    clips_in_place,
    clips_a_copy,
    without_backward,
    assigned,
    twice_through_one_graph,
    of_two_halves,
    with_a_penalty,
)


def make_model(gradients: Callable[..., list[Any]], hk: Any, op: str = "average", seed: int = 0, **options: Any) -> Any:
    """A model whose train_step makes its gradients in this way."""
    import keras
    import torch

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            found = gradients(self, data)
            with torch.no_grad():
                self.optimizer.apply(found, self.trainable_weights)
            return {"steps": self.optimizer.iterations + 0}

    keras.utils.set_random_seed(seed)
    model = Own([keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1, momentum=0.9, **options), op=op), "mse")
    return model


def train(way: int, hk: Any, world: Any, op: str = "average", **options: Any) -> list[float]:
    model = make_model(WAYS[way], hk, op, world.rank, **options)
    if op == "sum":  # one process's own, of one loss
        model.optimizer.learning_rate = 0.1 / world.size
    model.fit(hk.shard((X, Y), world, 12 // world.size), epochs=2, verbose=0, callbacks=[hk.BroadcastState()])
    return weights(model)


@on_ranks("keras-torch", n=3)
@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: WAYS[way].__name__)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_gradients_of_a_step_of_ones_own_are_those_of_one_process(hk, world, everyone, alone, way, op):
    if op == "sum" and "clips" in WAYS[way].__name__:
        return  # at another norm
    options = {"gradient_accumulation_steps": 2} if WAYS[way] is of_two_halves else {}
    found = train(way, hk, world, op, **options)
    assert everyone(found) == [found] * world.size
    assert found == near(alone(train, way=way, op=op, **options))


def train_by_hand(way: int, hk: Any, world: Any) -> list[float]:
    """A loop without fit, of an optimizer that nobody has built."""
    model = make_model(WAYS[way], hk)
    data = hk.shard((X, Y), world, 12 // world.size)
    for _ in range(2):
        for x, y in data:
            model.train_step(tensors(x, y))
    model.fit(data, verbose=0)
    for x, y in data:
        model.train_step(tensors(x, y))
    return weights(model)


def tensors(*arrays: Any) -> tuple[Any, ...]:
    import keras

    return tuple(map(keras.ops.convert_to_tensor, arrays))


@on_ranks("keras-torch")
@pytest.mark.parametrize("way", [2, 4, 6])
def test_a_loop_without_fit_and_after_it(hk, world, everyone, alone, way):
    found = train_by_hand(way, hk, world)
    assert everyone(found) == [found] * 2
    assert found == near(alone(train_by_hand, way=way))


@on_ranks("keras-torch")
@pytest.mark.parametrize("again", [False, True])
def test_clipping_in_a_loop_after_fit_is_one_warning_unless_init_is_called_again(hk, world, again):
    """Its first backward does not average: after fit a backward may be one rank's alone."""
    model = make_model(clips_in_place, hk)
    data = hk.shard((X, Y), world, 6)
    model.fit(data, verbose=0)
    if again:
        hk.init()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            model.train_step(tensors(X[:4] + world.rank, Y[:4]))
    said = [str(one.message) for one in warned if "hvdkit.keras.init() again" in str(one.message)]
    assert len(said) == (not again)


def take_turns(kind: str, order: str, options: dict[str, Any], hk: Any, world: Any) -> list[float]:
    """Two optimizers of the same variables, built one after the other."""
    import keras

    v = keras.Variable(np.zeros(3, "float32"))
    optimizers = {
        "a": hk.distribute(keras.optimizers.SGD(1.0)),
        "b": hk.distribute(keras.optimizers.SGD(1.0), **options),
    }
    for one in optimizers.values():
        one.build([v])
    x = np.arange(6.0, dtype="float32").reshape(2, 3) + 1
    (x,) = tensors(x if world.size == 1 else x[world.rank : world.rank + 1])
    for step, name in enumerate(order, start=1):
        loss = (step * 1e-9 * x * (v.value - 1e9) ** 2 / 1e9).sum(axis=1).mean()
        v.value.grad = None
        if kind == "backward":
            loss.backward()
            gradient = v.value.grad
        else:
            import torch

            (gradient,) = torch.autograd.grad(loss, [v.value])
        optimizers[name].apply([gradient], [v])
    return keras.ops.convert_to_numpy(v).astype(float).tolist()


@on_ranks("keras-torch")
@pytest.mark.parametrize("kind", ["backward", "autograd.grad"])
def test_two_optimizers_of_the_same_variables_take_turns(hk, world, everyone, alone, kind):
    for order in ("abaaba", "ababaab"):
        found = take_turns(kind, order, {}, hk, world)
        assert everyone(found) == [found] * 2
        assert found == pytest.approx(alone(take_turns, kind=kind, order=order, options={}), rel=1e-6)


@on_ranks("keras-torch")
def test_an_optimizer_averages_by_its_own_options(hk, world):
    """Not by those of another one of the same variables: 1e-9 is 0 in half precision."""
    import keras

    a, b = hk.distribute(keras.optimizers.SGD(1e9)), hk.distribute(keras.optimizers.SGD(1e9), compression="fp16")
    v = keras.Variable(0.0)
    for one in (a, b):
        one.build([v])
    for _ in range(2):
        v.value.grad = None
        (v.value * 1e-9).sum().backward()
        a.apply([v.value.grad], [v])
    assert float(keras.ops.convert_to_numpy(v)) == pytest.approx(-2.0)


@on_ranks("keras-torch")
def test_apply_leaves_the_program_its_own_tensors(hk, world):
    import keras
    import torch

    v = keras.Variable(np.ones(3, "float32"))
    optimizer = hk.distribute(keras.optimizers.SGD(1.0))
    noise = torch.zeros(3).add_(world.rank + 1.0)  # changed in place, as a buffer of the program's is
    optimizer.apply([noise], [v])
    assert noise.tolist() == [world.rank + 1.0] * 3 and keras.ops.convert_to_numpy(v).tolist() == [-0.5] * 3
    (gradient,) = torch.autograd.grad((v.value * noise).sum(), [v.value])
    optimizer.apply([gradient], [v])
    assert gradient.tolist() == [world.rank + 1.0] * 3 and v.value.grad is None


@on_ranks("keras-torch")
def test_a_step_within_a_step_of_fit(hk, world, everyone, alone):
    found = train_nested(hk, world)
    assert everyone(found) == [found] * 2
    assert found == near(alone(train_nested))


def train_both_by_hand(hk: Any, world: Any) -> list[float]:
    """As a GAN without fit: one part by train_on_batch, the other by a backward of its own."""
    import keras

    keras.utils.set_random_seed(0)
    part = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    part.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    model = make_model(clips_in_place, hk)
    for one in (part, model):
        one.optimizer.build(one.trainable_variables)
    for x, y in hk.shard((X, Y), world, 12 // world.size):
        part.train_on_batch(x, y)
        model.train_step(tensors(x, y))
    return weights(model) + weights(part)


@on_ranks("keras-torch")
def test_train_on_batch_beside_a_loop_of_ones_own(hk, world, everyone, alone):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "optimizer.apply averages")
        found = train_both_by_hand(hk, world)
    assert everyone(found) == [found] * 2
    assert found == near(alone(train_both_by_hand))


def train_nested(hk: Any, world: Any) -> list[float]:
    import keras

    def gradients(model: Any, data: Any) -> list[Any]:
        inner.train_on_batch(*data)
        return clips_in_place(model, data)

    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    inner.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    model = make_model(gradients, hk)
    model.fit(hk.shard((X, Y), world, 12 // world.size), epochs=2, verbose=0, callbacks=[hk.BroadcastState()])
    return weights(model) + weights(inner)


@on_ranks("keras-torch")
def test_a_rank_may_call_backward_alone_in_a_callback_and_after_fit(hk, world, everyone):
    """A saliency map on the root."""
    import keras

    def saliency(model: Any) -> float:
        x = keras.ops.convert_to_tensor(X[:4]).requires_grad_(True)
        model(x).sum().backward()
        return float(x.grad.abs().sum())

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert not world.is_root or saliency(self.model) > 0

        on_train_batch_end = on_epoch_end

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    for _ in range(2):
        model.fit(hk.shard((X, Y), world, 6), epochs=2, verbose=0, callbacks=[hk.BroadcastState(), Look()])
        assert not world.is_root or saliency(model) > 0
    model.evaluate(hk.shard((X, Y), world, 6), verbose=0)
    assert everyone(weights(model)) == [weights(model)] * 2


@on_ranks("keras-torch")
def test_a_bucket_leaves_before_backward_has_ended_and_nothing_is_sent_twice(hk, world, monkeypatch):
    import keras
    from horovod.torch import mpi_ops

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(600) for _ in range(6)]
    model = keras.Sequential([keras.Input((600,)), *layers])
    model.compile(hk.distribute(keras.optimizers.SGD(0.001)), "mse")
    x = np.ones((8, 600), "float32")
    model.fit(x, x, batch_size=4, verbose=0)

    from hvdkit.torch.buckets import Reducer

    first, sent = layers[0].kernel.value, []

    def start(self: Any, flat: Any, *how: Any) -> Any:
        sent.append((first.grad is None, flat.numel()))
        return plain(self, flat, *how)

    plain = Reducer.start
    monkeypatch.setattr(Reducer, "start", start)
    monkeypatch.setattr(mpi_ops, "grouped_allreduce", None)
    model.fit(x, x, batch_size=4, verbose=0)
    numbers = sum(one.size for one in model.get_weights())
    assert sent[0][0], "the first bucket waited for the last gradient"
    assert 2 * numbers <= sum(length for _, length in sent) < 2.1 * numbers


def train_frozen(hk: Any, world: Any) -> list[float]:
    """Layers that are frozen and thawed between fits, one whose gradient only some ranks have."""
    import keras

    class Sometimes(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dense = world.is_root, keras.layers.Dense(3)

        def build(self, shape: Any) -> None:
            self.dense.build(shape)

        def call(self, x: Any) -> Any:
            return self.dense(x) if self.used else x[:, :3]

    keras.utils.set_random_seed(0)
    hidden, sometimes = keras.layers.Dense(8, activation="tanh"), Sometimes()
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, sometimes, keras.layers.Dense(3)])
    optimizer = hk.distribute(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)
    for frozen in (True, False, True):
        hidden.trainable = not frozen
        model.compile(optimizer, "mse")
        model.fit(X[world.rank :: world.size], Y[world.rank :: world.size], batch_size=4, verbose=0, shuffle=False)
    return weights(model)


@on_ranks("keras-torch", n=3)
def test_layers_frozen_between_fits_and_one_that_only_some_ranks_use(hk, world, everyone):
    found = train_frozen(hk, world)
    assert everyone(found) == [found] * world.size


@on_ranks("keras-torch")
def test_a_rank_that_skips_a_step_of_a_loop_without_fit_is_told(hk, world):
    """As one does whose own loss is not finite."""
    import torch

    model = make_model(of_two_halves, hk)
    model.optimizer.build(model.trainable_variables)

    def train() -> None:
        for step in range(8):
            x = X[6 * step :: 7][:4] + world.rank
            found = of_two_halves(model, tensors(x, Y[:4]))
            if (step, world.rank) != (3, 1):
                with torch.no_grad():
                    model.optimizer.apply(found, model.trainable_weights)

    told = message(train)
    assert told.startswith("AgreementError: some ranks have taken a step that 1 of 2 ranks left out"), told


@on_ranks("keras-torch", fresh=True)
@pytest.mark.parametrize("how", ["attribute", "layer", "late"])
def test_a_model_in_a_ddp_is_refused(hk, world, tmp_path, how):
    """As Keras may make one where torch.distributed is initialised."""
    import keras
    import torch

    meeting = f"file://{tmp_path}/meeting-{world.rank}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FEATURES, 3))
    first = keras.layers.TorchModuleWrapper(ddp) if how == "layer" else keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(FEATURES), first, keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    hk.broadcast_state(model, model.optimizer)

    def wrap(*_: Any, **__: Any) -> None:
        object.__setattr__(model, "wrapped", ddp)

    if how == "attribute":
        wrap()
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=wrap if how == "late" else None)]
    told = message(lambda: model.fit(hk.shard((X, Y), world, 6), verbose=0, callbacks=callbacks))
    assert "is in a DistributedDataParallel, which averages its gradients" in told, told
    torch.distributed.destroy_process_group()


@on_ranks("keras-torch", n=1)
def test_parameters_of_models_that_are_gone_are_freed(hk, world):
    import gc
    import weakref

    import keras

    def made():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        hk.distribute(keras.optimizers.SGD(0.1)).build(model.trainable_variables)
        return [weakref.ref(variable.value) for variable in model.trainable_variables]

    gone = made()
    gc.collect()
    assert [parameter() for parameter in gone] == [None, None]
