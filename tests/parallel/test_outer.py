"""Outer steps (``distribute(every=...)``) over real ranks; the formulas are in tests/steps/test_outer.py."""

import itertools
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

STEPS, ROWS = 12, 4


def data(world: Any) -> tuple[Any, Any]:
    """This rank's rows of the global batches, in order."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(STEPS, ROWS * world.size, 6)).astype(np.float32)
    y = (x.sum(axis=2) > 0).astype(np.int64)
    return x[:, world.rank :: world.size], y[:, world.rank :: world.size]


def trained_torch(
    hk: Any, world: Any, optimizer_of: Any, steps: range, *, directory: Any = None, **options: Any
) -> Any:
    """A model and its optimizer after these steps, from a checkpoint where there is one."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    optimizer = hk.distribute(optimizer_of(model.parameters()), model, **options)
    hk.broadcast_state(model, optimizer)
    checkpoints = None if directory is None else hk.Checkpoints(directory)
    if checkpoints is not None:
        checkpoints.restore(model, optimizer)
    x, y = data(world)
    for step in steps:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x[step]).double()), torch.from_numpy(y[step]))
        loss.backward()
        optimizer.step()
        if checkpoints is not None and step == 6:
            checkpoints.save(model, optimizer, step=step + 1)
    if options:
        hk.average_weights()
        hk.check_agreement(model, None, world)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()


@on_ranks("torch", n=(2, 3))
def test_every_step_is_synchronous_sgd(hk, world):
    import torch

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    whole = trained_torch(hk, world, sgd, range(STEPS))
    found = trained_torch(hk, world, sgd, range(STEPS), every=1, outer_lr=1, outer_momentum=0, process_set="rank")
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"outer_overlap": 2}, {"compression": "int8"}], ids=["waits", "overlap", "int8"]
)
@on_ranks("torch")
def test_a_training_goes_on_from_the_middle_of_a_window(hk, world, everyone, tmp_path, options):
    import torch

    from hvdkit.steps import outer

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    outer_steps_before = next(outer._NUMBERS) + 1
    options = {"every": 4, "process_set": "rank", "directory": tmp_path, **options}
    whole = trained_torch(hk, world, adam, range(STEPS), **options)
    outer._NUMBERS = itertools.count(outer_steps_before)  # as a process that begins anew
    again = trained_torch(hk, world, adam, range(7, STEPS), **options)
    np.testing.assert_array_equal(again, whole)
    assert len({one.tobytes() for one in everyone(whole)}) == 1


@on_ranks("torch")
def test_parameters_that_begin_to_train_later_join(hk, world):
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, every=3, process_set="rank")
    hk.broadcast_state(model, optimizer)
    x, y = data(world)
    before = model[0].weight.detach().clone()
    for step in range(STEPS):
        if step == 4:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x[step])), torch.from_numpy(y[step])).backward()
        optimizer.step()
    hk.average_weights()
    hk.check_agreement(model, None, world)
    assert not torch.equal(before, model[0].weight)


@on_ranks("torch")
def test_a_broadcast_in_the_middle_of_a_window_loses_nothing(hk, world, everyone):
    """As where ``fit`` is called again: all get the mean, not what the root alone has learned."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Linear(6, 2).double()
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, every=5, process_set="rank")
    hk.broadcast_state(model, optimizer)
    x, y = data(world)
    for step in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(torch.from_numpy(x[step]).double()), torch.from_numpy(y[step])
        ).backward()
        optimizer.step()
    mean = np.mean(everyone(model.weight.detach().numpy().copy()), axis=0)
    hk.broadcast_state(model, optimizer)
    np.testing.assert_allclose(model.weight.detach().numpy(), mean, rtol=0, atol=1e-12)


@on_ranks("torch", n=3)
def test_a_rank_that_has_fewer_batches_waits(hk, world):
    import torch

    steps = range((12, 4, 9)[world.rank])
    trained_torch(hk, world, lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps, every=3, process_set="rank")


@on_ranks("torch")
def test_a_program_is_told_what_is_missing(hk, world):
    import torch

    from hvdkit.errors import InvalidArgumentError

    model = torch.nn.Linear(6, 2)
    with pytest.raises(InvalidArgumentError, match="every must be an integer >= 1, got 0"):
        hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, every=0)
    with pytest.raises(InvalidArgumentError, match="no optimizer has any"):
        hk.average_weights()


def trained_keras(hk: Any, world: Any, run_eagerly: bool, **options: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
    generator = np.random.default_rng(1)
    model.set_weights([generator.normal(size=one.shape) * 0.3 for one in model.weights])
    optimizer = hk.distribute(keras.optimizers.SGD(0.1), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # of TensorFlow two steps in one graph; the others run what they run
    several = 2 if keras.backend.backend() == "tensorflow" and not run_eagerly else 1
    model.compile(optimizer, loss, run_eagerly=run_eagerly, steps_per_execution=several)
    x, y = data(world)
    model.fit(
        x.reshape(-1, 6), y.reshape(-1), batch_size=ROWS, shuffle=False, verbose=0, callbacks=[hk.BroadcastState()]
    )
    if options:
        hk.average_weights()
        hk.check_agreement(model, None, world)
    return np.concatenate([one.reshape(-1) for one in model.get_weights()])


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@on_ranks("keras", "keras-torch", "keras-jax")
def test_keras_in_every_step_is_synchronous_sgd(hk, world, run_eagerly):
    whole = trained_keras(hk, world, run_eagerly)
    options = {"every": 1, "outer_lr": 1, "outer_momentum": 0, "process_set": "rank"}
    np.testing.assert_allclose(trained_keras(hk, world, run_eagerly, **options), whole, rtol=0, atol=1e-5)
    apart = trained_keras(hk, world, run_eagerly, every=5, process_set="rank", outer_overlap=2)
    assert np.isfinite(apart).all()
    assert not np.allclose(apart, whole, atol=1e-4)


@on_ranks("keras", "keras-torch", "keras-jax")
def test_keras_goes_on_from_the_middle_of_a_window(hk, world, everyone, tmp_path):
    import keras

    def train(steps):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
        generator = np.random.default_rng(1)
        model.set_weights([generator.normal(size=one.shape) * 0.3 for one in model.weights])
        optimizer = hk.distribute(keras.optimizers.Adam(0.05), every=4, process_set="rank")
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        optimizer.build(model.trainable_variables)
        checkpoints = hk.Checkpoints(tmp_path)
        checkpoints.restore(model, optimizer)
        x, y = data(world)
        for step in steps:
            model.train_on_batch(x[step], y[step])
            if step == 6:
                checkpoints.save(model, optimizer, step=step + 1)
        hk.average_weights()
        return np.concatenate([one.reshape(-1) for one in model.get_weights()])

    whole = train(range(STEPS))
    np.testing.assert_array_equal(train(range(7, STEPS)), whole)
    assert len({one.tobytes() for one in everyone(whole)}) == 1


@on_ranks("tensorflow")
def test_a_loop_of_tensorflow_of_ones_own(hk, world):
    import keras
    import tensorflow as tf

    from hvdkit.errors import InvalidArgumentError

    def train(**options):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
        generator = np.random.default_rng(1)
        model.set_weights([generator.normal(size=one.shape) * 0.3 for one in model.weights])
        optimizer = hk.distribute(keras.optimizers.SGD(0.1), **options)
        hk.broadcast_state(model)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        for x, y in zip(*data(world), strict=True):
            step(tf.constant(x), tf.constant(y))
        if options:
            hk.average_weights()
        return np.concatenate([one.numpy().reshape(-1) for one in model.weights])

    options = {"every": 1, "outer_lr": 1, "outer_momentum": 0, "process_set": "rank"}
    np.testing.assert_allclose(train(**options), train(), rtol=0, atol=1e-6)
    with pytest.raises(InvalidArgumentError, match="which a tape does not change; distribute the optimizer"):
        hk.distribute(tf.GradientTape(), every=3)


@on_ranks("arrays", n=(2, 3), mpi=True)
def test_arrays(hk, world, everyone):
    from hvdkit.errors import InvalidArgumentError

    def train(outer=None):
        parameters = {"w": np.linspace(-1, 1, 6), "b": np.zeros(1), "steps": np.arange(3)}
        steps = outer and hk.OuterSteps(parameters, **outer)
        for x, y in zip(*data(world), strict=True):
            error = (x @ parameters["w"] + parameters["b"] - y) / ROWS
            gradients = {"w": x.T @ error, "b": error.sum(keepdims=True)}
            if not outer:
                gradients = {name: np.mean(everyone(one), axis=0) for name, one in gradients.items()}
            parameters = {**parameters, **{name: parameters[name] - 0.1 * one for name, one in gradients.items()}}
            if steps:
                parameters = steps(parameters)
        if steps:
            parameters = steps.average_weights(parameters)
            state = steps.state()
            steps.load_state(parameters, state if world.rank == 0 else {})
            assert all(np.array_equal(one, steps.state()[name]) for name, one in state.items())
            with pytest.raises(InvalidArgumentError, match="began with other parameters"):
                steps.average_weights({"w": parameters["w"]})
        return np.concatenate([parameters["w"], parameters["b"]])

    found = train({"every": 1, "outer_lr": 1, "outer_momentum": 0})
    np.testing.assert_allclose(found, train(), rtol=0, atol=1e-10)
    apart = everyone(train({"every": 5, "outer_overlap": 2, "compression": "int8"}))
    assert all(np.array_equal(one, apart[0]) for one in apart)
