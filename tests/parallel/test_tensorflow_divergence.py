"""TensorFlow loops whose ranks train apart end with one error on every rank; what a loop may apply, and what not."""

from typing import Any

import pytest
from ranks import on_ranks

import hvdkit

STEPS = 9


def data(world: Any, step: int) -> tuple[Any, Any]:
    """This rank's part of a step's batch, or with no ``world`` all of it."""
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(step).normal(size=(12, 6))
    x = x if world is None else x[world.rank :: world.size]
    return tf.constant(x), tf.constant(np.sin(x.sum(axis=1, keepdims=True)))


def net(offset: float = 0.0) -> Any:
    import numpy as np
    import tensorflow as tf

    return [
        tf.Variable(np.random.default_rng(at).normal(size=size) + offset, name=f"weight{at}")
        for at, size in enumerate([(6, 5), (5, 1)])
    ]


def loss_of(variables: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean((tf.tanh(x @ variables[0]) @ variables[1] - y) ** 2)


def sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.05, momentum=0.9)


def train(hk: Any, world: Any, form: str, compiled: bool, offset: float = 0.0, noise: float = 0.0) -> Any:
    """The tape, or the optimizer, is distributed; on ``noise`` each rank's gradients differ."""
    import tensorflow as tf

    variables = net(offset)
    optimizer = sgd() if form == "tape" else hk.distribute(sgd())

    def step(x: Any, y: Any) -> None:
        tape = tf.GradientTape()
        with hk.distribute(tape) if form == "tape" else tape as recording:
            loss = loss_of(variables, x, y)
        gradients = [one + noise for one in recording.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step) if compiled else step
    for number in range(STEPS):
        run(*data(world, number))
    return variables


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["tape", "optimizer"])
@on_ranks("tensorflow", n=3)
def test_ranks_that_train_apart_are_one_error_on_every_rank(hk, world, everyone, form, compiled):
    import tensorflow as tf

    raised = tf.errors.OpError if compiled else hvdkit.AgreementError
    with pytest.raises(raised, match=r"their values of weight0 differ[\s\S]*broadcast_state"):
        train(hk, world, form, compiled, offset=0.1 * world.rank)
    if form == "tape":
        with pytest.raises(raised, match="the ranks train apart"):
            train(hk, world, form, compiled, noise=0.1 * world.rank)
    together = everyone([one.numpy().tolist() for one in train(hk, world, form, compiled)])
    assert together[1:] == together[:-1]


@on_ranks("tensorflow")
def test_a_step_that_is_another_graph_on_the_root_compares_too(hk, world):
    """The root keeps a number of its own: its graph has other names."""
    import tensorflow as tf

    variables = net()
    seen = tf.Variable(0.0, dtype=tf.float64)

    def step(x: Any, y: Any) -> None:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = loss_of(variables, x, y)
        for one, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            one.assign_sub(0.01 * gradient)

    @tf.function
    def some(x: Any, y: Any) -> None:
        if world.is_root:
            seen.assign(tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(y), lambda: seen))
        step(x, y)

    for number in range(STEPS):
        some(*data(world, number))
    hk.check_agreement(variables, None, world)


@pytest.mark.parametrize("form", ["tape", "optimizer"])
@on_ranks("tensorflow")
def test_a_rank_may_trace_its_step_anew_alone(hk, world, everyone, form):
    """A last batch of another size is another graph, in which the first exchange is compared, too."""
    import tensorflow as tf

    variables = net()
    optimizer = sgd() if form == "tape" else hk.distribute(sgd())

    @tf.function
    def step(x: Any, y: Any) -> None:
        tape = tf.GradientTape()
        with hk.distribute(tape) if form == "tape" else tape as recording:
            loss = loss_of(variables, x, y)
        optimizer.apply_gradients(zip(recording.gradient(loss, variables), variables, strict=True))

    for number in range(STEPS):
        x, y = data(world, number)
        left = 1 if number == 3 and world.rank else 0
        step(x[left:], y[left:])
    root, other = everyone(step.experimental_get_tracing_count())
    assert other == root + 1
    hk.check_agreement(variables, None, world)


@on_ranks("tensorflow", n=3, fresh=True)
def test_each_process_set_counts_for_itself(hk):
    """A rank outside the set takes no part in it, and the same variable's gradients travel in both."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = hk.init()
    variable = tf.Variable(1.0)
    for number in range(19):
        with hk.distribute(tf.GradientTape(), process_set=pair if number % 2 else None) as tape:
            loss = variable * (1.0 + world.rank)
        mean = float(tape.gradient(loss, variable))
        assert mean == ([1.5, 1.5, 3.0][world.rank] if number % 2 else 2.0)


@on_ranks("tensorflow", n=3)
def test_two_gradients_of_a_function_are_counted_in_the_same_order_on_every_rank(hk, world):
    """Else one rank compares at the first of them, another one at the second, and both wait."""
    import tensorflow as tf

    for _ in range(10):
        first, second = tf.Variable(1.0), tf.Variable(2.0)

        @tf.function
        def gradients(first: Any = first, second: Any = second) -> Any:
            with hk.distribute(tf.GradientTape(persistent=True)) as tape:
                loss = (1.0 + world.rank) * first
                other = 3.0 * loss + second
            return tape.gradient(loss, [first, second]), tape.gradient(other, [first, second])

        (mean, none), means = gradients()
        assert (float(mean), none) == (2.0, None) and [float(one) for one in means] == [6.0, 1.0]


@on_ranks("tensorflow")
def test_ranks_count_alike_again_after_one_has_joined(hk, world):
    """Else one of them would compare at a step at which the other does not, and both would wait."""
    import tensorflow as tf

    variables = net()
    for _ in range(3):
        for number in range(7 if world.is_root else 4):
            with hk.distribute(tf.GradientTape()) as recording:
                loss = loss_of(variables, *data(world, number))
            for one, gradient in zip(variables, recording.gradient(loss, variables), strict=True):
                one.assign_sub(0.01 * gradient)
        hk.join(variables, None, world)
    hk.check_agreement(variables, None, world)


@on_ranks("tensorflow")
def test_a_gradient_of_an_input_is_refused(hk, world):
    import tensorflow as tf

    variables, (x, y) = net(), data(world, 0)
    with hk.distribute(tf.GradientTape()) as tape:
        tape.watch(x)
        loss = loss_of(variables, x, y)
    with pytest.raises(hvdkit.InvalidArgumentError, match=r"got a tensor of shape \(6, 6\) as source"):
        tape.gradient(loss, [*variables, x])


@on_ranks("tensorflow")
def test_gradients_that_variables_have_gathered(hk, world):
    """The sum of two passes, in variables: applied by an optimizer, as in one process."""
    import numpy as np
    import tensorflow as tf

    def accumulate(distribute: Any, part: Any) -> Any:
        variables, optimizer = net(), distribute(sgd())
        sums = [tf.Variable(tf.zeros_like(one)) for one in variables]
        for number in range(4):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, *data(part, number))
            for one, gradient in zip(sums, tape.gradient(loss, variables), strict=True):
                one.assign_add(gradient / 2)
            if number % 2:
                optimizer.apply_gradients(zip(sums, variables, strict=True))
                for one in sums:
                    one.assign(tf.zeros_like(one))
        return [one.numpy() for one in variables]

    ours, alone = accumulate(hk.distribute, world), accumulate(lambda optimizer: optimizer, None)
    for one, other in zip(ours, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("by", ["clip_by_global_norm", "clip_by_norm", "clip_by_value"])
@on_ranks("tensorflow")
def test_gradients_that_a_rank_has_clipped_are_refused_by_a_distributed_optimizer(hk, world, by, compiled):
    import tensorflow as tf

    def clip(gradients: Any) -> Any:
        if by == "clip_by_global_norm":
            return tf.clip_by_global_norm(gradients, 0.1)[0]
        return [tf.clip_by_norm(g, 0.1) if by == "clip_by_norm" else tf.clip_by_value(g, -0.1, 0.1) for g in gradients]

    def train(variables: Any, optimizer: Any, make_tape: Any, part: Any) -> Any:
        optimizer.build(variables)

        def step(x: Any, y: Any) -> None:
            with make_tape(tf.GradientTape()) as tape:
                loss = loss_of(variables, x, y)
            optimizer.apply_gradients(zip(clip(tape.gradient(loss, variables)), variables, strict=True))

        run = tf.function(step) if compiled else step
        for number in range(3):
            run(*data(part, number))
        return variables

    with pytest.raises(
        hvdkit.InvalidArgumentError, match=r"gradient 1 of 2, of shape \(6, 5\), was clipped.*global_clipnorm"
    ):
        train(net(), hk.distribute(sgd()), lambda tape: tape, world)
    ours, alone = train(net(), sgd(), hk.distribute, world), train(net(), sgd(), lambda tape: tape, None)
    for one, other in zip(ours, alone, strict=True):
        assert abs(one - other).numpy().max() < 1e-12


@on_ranks("tensorflow", n=1)
def test_functions_that_clip_still_dispatch(hk, world):
    """A program's own types take part in tf.clip_by_value, before and after hvdkit has marked it."""
    import tensorflow as tf

    class Both(tf.experimental.ExtensionType):  # type: ignore[misc]
        value: tf.Tensor

    hk.distribute(sgd())

    @tf.experimental.dispatch_for_api(tf.clip_by_value)  # type: ignore[untyped-decorator]
    def clip(t: Both, clip_value_min, clip_value_max, name=None):  # TensorFlow matches what has an annotation
        return Both(tf.clip_by_value(t.value, clip_value_min, clip_value_max))

    try:
        assert tf.clip_by_value(Both(tf.constant([5.0])), 0.0, 1.0).value.numpy() == [1.0]
    finally:
        tf.experimental.unregister_dispatch_for(clip)


@on_ranks("tensorflow", n=2)
def test_models_of_the_same_layers_compare_in_one_function(hk, world):
    """A CycleGAN's four; all are due at the same step."""
    import tensorflow as tf

    nets = [net() for _ in range(4)]
    optimizers = [sgd() for _ in nets]
    for variables, optimizer in zip(nets, optimizers, strict=True):
        optimizer.build(variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        for variables, optimizer in zip(nets, optimizers, strict=True):
            with hk.distribute(tf.GradientTape()) as tape:
                loss = loss_of(variables, x, y)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for number in range(STEPS):
        step(*data(world, number))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["tape", "optimizer"])
@on_ranks("tensorflow", n=3)
def test_ranks_that_exchange_different_gradients_are_one_error(hk, world, everyone, form, compiled):
    """Another order, another number, or None in a compiled step; the ranks would wait for each other."""
    import tensorflow as tf

    def step(variables: Any, used: int) -> None:
        optimizer = sgd() if form == "tape" else hk.distribute(sgd())
        optimizer.build(variables)

        def run(x: Any, y: Any) -> None:
            tape = tf.GradientTape()
            with hk.distribute(tape) if form == "tape" else tape as recording:
                hidden = tf.tanh(x @ net_of[0])
                loss = tf.reduce_mean((hidden @ net_of[1] - y) ** 2) if used == 2 else tf.reduce_mean(hidden)
            optimizer.apply_gradients(zip(recording.gradient(loss, variables), variables, strict=True))

        (tf.function(run) if compiled else run)(*data(world, 0))

    raised = tf.errors.OpError if compiled else hvdkit.AgreementError
    last = world.rank == world.size - 1
    for case in ("order", "number", *(["none"] if compiled else [])):
        net_of = net()
        variables = net_of
        if last and case != "none":
            variables = net_of[::-1] if case == "order" else net_of[:1]
        with pytest.raises(raised, match=r"the ranks exchange different gradients, this rank those of \d variables"):
            step(variables, used=1 if last and case == "none" else 2)
        everyone(None)
    net_of = net()
    step(net_of, used=2)
    hk.check_agreement(net_of, None, world)


@on_ranks("tensorflow")
def test_what_a_distributed_tape_cannot_average_is_refused(hk, world):
    import tensorflow as tf

    variables = net()
    with hk.distribute(tf.GradientTape(persistent=True)) as tape:
        loss = loss_of(variables, *data(world, 0))
    for jacobian in (tape.jacobian, tape.batch_jacobian):
        with pytest.raises(hvdkit.InvalidArgumentError, match="a jacobian would be this rank's alone"):
            jacobian(loss, variables[0])

    @tf.function(jit_compile=True)
    def step(x: Any, y: Any) -> Any:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = loss_of(variables, x, y)
        return tape.gradient(loss, variables)

    with pytest.raises(hvdkit.InvalidArgumentError, match="Horovod has no XLA operations"):
        step(*data(world, 0))
    with pytest.raises(hvdkit.InvalidArgumentError, match="average_metrics cannot run inside"):
        tf.function(lambda x: hk.average_metrics({"x": x}, world))(tf.constant(1.0))


@on_ranks("tensorflow", n=2)
def test_variables_that_keras_does_not_count_are_the_roots(hk, world, everyone, tmp_path):
    """Keras 3 lists no ``tf.Variable`` of a layer among its weights; the small one is in no comparison of a graph."""
    import keras
    import numpy as np
    import tensorflow as tf

    class Features(keras.layers.Layer):
        """Random features, a scale for each of two, and a module; all different on every rank."""

        def __init__(self) -> None:
            super().__init__(dtype="float64")
            own = np.random.default_rng(world.rank)
            self.random = tf.Variable(own.normal(size=(6, 8)), trainable=False)
            self.scales = {"a": [tf.Variable(np.float64(own.normal()))], "b": tf.Variable(np.float64(own.normal()))}
            self.module = tf.Module()
            self.module.shift = tf.Variable(np.float64(own.normal()))
            self.words = tf.Variable(["not sent"])
            self.dense = keras.layers.Dense(4, dtype="float64")

        def call(self, x: Any) -> Any:
            return self.dense(tf.sin(x @ self.random) * self.scales["a"][0] + self.scales["b"]) + self.module.shift

    layer = Features()
    model = keras.Sequential(
        [keras.Input((6,), dtype="float64"), layer, *(keras.layers.Dense(4, dtype="float64") for _ in range(4))]
    )
    own = [layer.scales["a"][0], layer.scales["b"], layer.module.shift]
    optimizer = keras.optimizers.Adam(0.01)
    hk.broadcast_state(model, optimizer)
    trained = [*model.trainable_variables, *own]

    @tf.function
    def step(x: Any, y: Any) -> None:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))

    def held() -> list[Any]:
        return [np.asarray(one).tolist() for one in [layer.random, *own]]

    for number in range(3):
        step(*data(world, number))
    assert everyone(held()) == [held()] * world.size
    hk.check_agreement(model, optimizer, world)
    store, before = hk.Checkpoints(tmp_path / "run"), held()
    store.save(model, optimizer, step=3)
    for one in own:
        one.assign(0.0)
    store.restore(model, optimizer)
    assert held() == before
    own[0].assign_add(float(world.rank))
    with pytest.raises(hvdkit.AgreementError, match="the ranks disagree"):
        hk.check_agreement(model, optimizer, world)
