"""What hvdkit.tensorflow uses of TensorFlow's and Keras' insides is still there, and still does what it is used for."""

import warnings

import numpy as np
from ranks import on_ranks


@on_ranks("tensorflow", n=1)
def test_what_is_replaced_marks_what_it_returns_and_returns_the_same(hk, world):
    import tensorflow as tf

    from hvdkit.steps.gradients import CLIPPED
    from hvdkit.tensorflow import private

    private.mark()
    private.mark()  # a second optimizer
    given = [tf.constant([3.0, 4.0]), tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))]
    clipped, norm = tf.clip_by_global_norm(given, 1.0)
    clipped += [tf.clip_by_norm(given[0], 1.0), tf.clip_by_value(given[0], 0.0, 1.0)]
    assert all(getattr(one, CLIPPED) for one in clipped) and not hasattr(given[0], CLIPPED)
    assert float(norm) == np.float32(27**0.5) and np.allclose(clipped[2], [0.6, 0.8])
    variable = tf.Variable([1.0, 2.0])
    for loss, shape in ((lambda: variable**2, (2,)), (lambda: tf.reduce_mean(variable**2), None)):
        with tf.GradientTape() as tape:
            value = loss()
        assert getattr(tape.gradient(value, variable), private._SUMMED, None) == shape
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        private.warn_of_target(value, 2)
    assert not said
    assert tf.clip_by_value in private._DISPATCHED, "tf.experimental.dispatch_for_api finds what is replaced"


@on_ranks("tensorflow", n=1)
def test_graphs_tell_what_they_are_within(hk, world):
    import tensorflow as tf

    from hvdkit.tensorflow import private

    found = {}

    def look(name):
        found[name] = (private.is_in_loop(), private.is_compiled_by_xla(), private.outermost_graph())

    @tf.function(autograph=False)
    def outer(number):
        look("function")
        tf.cond(number > 0, lambda: look("branch") or number, lambda: number)
        turn = lambda turn: look("loop") or turn + 1  # noqa: E731
        return tf.while_loop(lambda turn: turn < number, turn, [0])

    look("eager")
    outer(tf.constant(2))
    tf.function(lambda: look("xla") or tf.constant(1), jit_compile=True, autograph=False)()
    assert {name: one[:2] for name, one in found.items()} == {
        "eager": (False, False),
        "function": (False, False),
        "branch": (False, False),
        "loop": (True, False),
        "xla": (False, True),
    }
    assert found["loop"][2] is found["branch"][2] is found["function"][2] is not found["xla"][2]


@on_ranks("tensorflow", n=1, fresh=True)
def test_seeds_and_generators_go_on_where_they_were(hk, world):
    import keras
    import tensorflow as tf

    from hvdkit.tensorflow import private
    from hvdkit.tf_shared.keras_layers import keras_generator

    assert private.eager_seeds() is private.global_generator() is keras_generator() is None
    tf.random.set_seed(3)
    state = private.eager_seeds()
    tf.random.normal([1])
    assert private.eager_seeds() != state
    private.set_eager_seeds(state)
    assert private.eager_seeds() == state
    assert private.global_generator() is None and tf.random.get_global_generator() is private.global_generator()
    made = keras_generator(make=True)
    assert made is keras_generator()
    before = np.array(made.state)
    keras.random.normal([2])
    assert not np.array_equal(before, made.state)


@on_ranks("tensorflow", n=1)
def test_models_and_data_sets_have_the_parts_that_are_looked_for(hk, world):
    import keras
    import tensorflow as tf

    from hvdkit.tensorflow import private
    from hvdkit.tf_shared.keras_layers import layers_of, untrained_of

    layers = keras.layers
    inner = keras.Sequential([keras.Input((2,)), layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((2,)), inner, layers.Dense(1)])
    flat = layers_of(model)
    norm = inner.layers[0]
    assert norm in flat and model in flat
    norm.trainable = False
    assert untrained_of(norm) == [norm.moving_mean, norm.moving_variance] != norm.non_trainable_variables
    masked = layers.Masking()(np.zeros((1, 2, 3), np.float32))
    assert private.has_mask([masked]) and not private.has_mask(tf.zeros(3))
    numbers = private.DatasetOver(tf.data.Dataset.range(4).batch(2))
    assert isinstance(numbers, tf.data.Dataset) and [len(one) for one in numbers.map(lambda x: x + 1)] == [2, 2]
