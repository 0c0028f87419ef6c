"""What people give ``hvdkit.keras.shard`` and ``fit``, on real ranks, against one process on the global batch."""

import warnings
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import on_ranks

GLOBAL_BATCH, SAMPLES, FEATURES = 12, 40, 6
X = np.random.default_rng(5).normal(size=(SAMPLES, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64") + (X[:, 0] > 1)
WORDS = np.array([f"word{int(one)}" for one in Y], dtype=object)
LENGTHS = 1 + np.arange(SAMPLES) % 3


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def dense(*inputs: Any) -> Any:
    """The middle of a small model of one or several inputs."""
    import keras

    merged = keras.layers.concatenate(inputs) if len(inputs) > 1 else inputs[0]
    return keras.layers.Dense(8, activation="tanh")(merged)


def classifier(hk: Any = None) -> Any:
    """Compiled, and distributed where hvdkit's adapter is given."""
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, keras.layers.Dense(3)(dense(inputs)))
    optimizer = keras.optimizers.SGD(0.1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hk.distribute(optimizer) if hk else optimizer, loss)
    return model


def autoencoder(custom: bool) -> Any:
    """As in Keras' guides: what it learns from is x alone."""
    import keras

    class Own(keras.Model):
        """Its loss is made of x; ``fit(x)`` gives it the bare array."""

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is None and len(x.shape) == 2
            losses = keras.ops.mean(keras.ops.square(y_pred - x), axis=1)
            return keras.ops.mean(losses if sample_weight is None else losses * sample_weight)

    class Compare(keras.layers.Layer):
        def call(self, x, found):
            self.add_loss(keras.ops.mean(keras.ops.square(found - x)))
            return found

    inputs = keras.Input((FEATURES,))
    found = keras.layers.Dense(FEATURES)(dense(inputs))
    return Own(inputs, found) if custom else keras.Model(inputs, Compare()(inputs, found))


def regularized() -> Any:
    """A classifier with every kind of loss beside that of its targets."""
    import keras

    inner, penalties = autoencoder(custom=False), {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    return keras.Model(inner.inputs, keras.layers.Dense(3, **penalties)(inner.outputs[0]))


def train(hk: Any, world: Any, case: str, remainder: str = "drop") -> list[float]:
    """Two epochs; the weights."""
    import keras

    keras.utils.set_random_seed(0)
    sgd = hk.distribute(keras.optimizers.SGD(0.1, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inputs, fitting = keras.Input((FEATURES,), name="a"), {}
    if case in ("no labels", "no labels, add_loss"):
        model, data, loss = autoencoder(custom=case == "no labels"), X, None
    elif case == "labels, add_loss":
        model, data = regularized(), (X, Y)
    elif case == "dicts":
        other = keras.Input((FEATURES,), name="b")
        hidden = dense(inputs, other)
        outputs = {"k": keras.layers.Dense(3, name="k")(hidden), "l": keras.layers.Dense(3, name="l")(hidden)}
        model, data = keras.Model({"a": inputs, "b": other}, outputs), ({"a": X, "b": X[::-1]}, {"k": Y, "l": Y[::-1]})
        loss = {"k": loss, "l": loss}
    elif case == "lists":
        other = keras.Input((FEATURES,), name="b")
        model = keras.Model([inputs, other], keras.layers.Dense(3)(dense(inputs, other)))
        data = ([X, X[::-1]], Y)
    elif case in ("ragged", "strings"):
        import tensorflow as tf

        vocabulary = [f"word{number}" for number in range(3)]
        words = keras.Input((None,) if case == "ragged" else (1,), dtype="int64" if case == "ragged" else "string")
        find = keras.layers.StringLookup(vocabulary=vocabulary)
        found = words if case == "ragged" else find(words)
        embedded = keras.layers.Embedding(5, 4)(found)
        model = keras.Model(words, keras.layers.Dense(3)(dense(keras.layers.GlobalAveragePooling1D()(embedded))))
        if case == "ragged":
            values = tf.constant(np.arange(LENGTHS.sum()) % 5)
            data = (tf.RaggedTensor.from_row_lengths(values, LENGTHS), Y)
        else:
            data = (tf.constant(WORDS[:, None].tolist()), Y)
    else:
        model, data = keras.Model(inputs, keras.layers.Dense(3)(dense(inputs))), (X, Y)
        if case == "large rows":
            inputs = keras.Input((70, 70))
            flat = keras.layers.Flatten()(inputs)[:, ::700]
            model = keras.Model(inputs, keras.layers.Dense(3)(dense(flat)))
            data = (np.random.default_rng(1).normal(size=(SAMPLES, 70, 70)).astype("float32"), Y)
        if case == "class weights":
            fitting = {"class_weight": {0: 0.5, 1: 3.0}}
        if case == "class weights, one-hot":
            fitting, data = {"class_weight": {0: 0.5, 1: 3.0}}, (X, np.eye(3)[Y])
            loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        if case == "sample weights":
            data = (X, Y, np.linspace(0.5, 2, SAMPLES))
    model.compile(sgd, loss)
    sharded = hk.shard(data, world, GLOBAL_BATCH // world.size, remainder=remainder, seed=3)
    model.fit(sharded, epochs=2, verbose=0, callbacks=[hk.BroadcastState()], **fitting)
    return weights(model)


CASES = [
    ("labels, add_loss", "exact"),
    ("no labels", "drop"),
    ("no labels", "exact"),
    ("no labels, add_loss", "exact"),
    ("dicts", "exact"),
    ("class weights", "exact"),
]
ON_TENSORFLOW = [
    ("lists", "exact"),
    ("large rows", "exact"),
    ("class weights", "drop"),
    ("class weights, one-hot", "exact"),
    ("sample weights", "exact"),
    ("ragged", "exact"),
    ("strings", "exact"),
]


@on_ranks("keras", "keras-torch", smoke=("keras-jax",), n=3)
@pytest.mark.parametrize(("case", "remainder"), CASES)
def test_the_ranks_end_as_one_process_on_the_union_batch(hk, world, everyone, alone, case, remainder):
    found = train(hk, world, case, remainder)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train, case=case, remainder=remainder), rel=1e-5, abs=1e-6)


@on_ranks("keras", n=3)
@pytest.mark.parametrize(("case", "remainder"), ON_TENSORFLOW)
def test_the_same_where_tf_data_makes_the_batches(hk, world, everyone, alone, case, remainder):
    test_the_ranks_end_as_one_process_on_the_union_batch(hk, world, everyone, alone, case, remainder)


WEIGHTED = (X, Y, np.linspace(0.5, 2, SAMPLES))


def train_in_turns(hk: Any, world: Any) -> list[float]:
    """Weights of the samples and of the batches by turns, in steps of one type and of another."""
    import keras

    keras.utils.set_random_seed(0)
    model = regularized()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), classifier().loss)
    for data, remainder in ((WEIGHTED, "drop"), ((X, Y), "exact"), ((X, Y + 0.0), "exact"), (WEIGHTED, "drop")):
        model.fit(hk.shard(data, world, GLOBAL_BATCH // world.size, remainder=remainder, seed=3), verbose=0)
    return weights(model)


@on_ranks("keras", "keras-torch", n=3)
def test_add_loss_is_weighed_by_the_batch_alone(hk, world, everyone, alone):
    found = train_in_turns(hk, world)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train_in_turns), rel=1e-5, abs=1e-6)


@on_ranks("keras-torch")
@pytest.mark.parametrize(("data", "options"), [(WEIGHTED, {}), ((X, Y), {"class_weight": {0: 2.0}})])
def test_add_loss_beside_weights_of_samples_is_refused(hk, world, data, options):
    import keras

    keras.utils.set_random_seed(0)
    model = regularized()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), classifier().loss)
    for _ in range(1 if keras.backend.backend() == "jax" else 2):  # there a step that failed leaves no weights
        error = message(lambda: model.fit(hk.shard(data, world, 4, remainder="exact"), verbose=0, **options))
        assert "a model whose layers call add_loss, which Keras does not weigh by them" in error


def plainly(hk: Any, world: Any) -> list[list[float]]:
    """The same data by hvdkit and by plain Keras, in one process, in order."""
    weighted = {"class_weight": {0: 0.5, 1: 3.0}, "epochs": 2, "verbose": 0, "shuffle": False}
    found = []
    for data, options in (
        ((X, Y), {"batch_size": GLOBAL_BATCH}),
        ((hk.shard((X, Y), world, GLOBAL_BATCH, remainder="exact", shuffle=False),), {}),
    ):
        model = classifier()
        model.fit(*data, **options, **weighted)
        found.append(weights(model))
    return found


@on_ranks("keras-torch", n=1)
def test_class_weights_are_those_of_keras(hk, world):
    plain, sharded = plainly(hk, world)
    assert sharded == pytest.approx(plain, rel=1e-5, abs=1e-6)


def train_mapped(hk: Any, world: Any) -> list[float]:
    """A map after ``shard`` of few samples, which are kept as arrays; in one process after ``batch``."""
    import tensorflow as tf

    double = tf.autograph.experimental.do_not_convert(lambda x, y, *w: (2 * tf.abs(x), 2 - y, *w))
    samples, model = tf.data.Dataset.from_tensor_slices((X, Y)), classifier(hk)
    data: Any = samples.batch(GLOBAL_BATCH).map(double).prefetch(2)
    if hk is not None:
        batch = GLOBAL_BATCH // world.size
        data = hk.shard(samples, world, batch, remainder="exact", shuffle=False).map(double).prefetch(2)
    model.fit(data, epochs=2, verbose=0, callbacks=[hk.BroadcastState()] if hk else [])
    return weights(model)


def train_mapped_alone() -> list[float]:
    return train_mapped(None, None)


@on_ranks("keras", "keras-torch")
def test_a_map_after_shard_is_that_of_one_process(hk, world, everyone, alone):
    found = train_mapped(hk, world)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train_mapped_alone), rel=1e-5, abs=1e-6)


@on_ranks("keras", "keras-torch")
def test_what_cannot_be_sharded_says_what_to_give(hk, world, everyone):
    import keras
    import tensorflow as tf

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return SAMPLES // 4 // world.size

        def __getitem__(self, index: int) -> Any:
            own = slice((index * world.size + world.rank) * 4, (index * world.size + world.rank + 1) * 4)
            return X[own], Y[own]

    backend = keras.backend.backend()
    ragged, sparse = tf.ragged.constant([[1], [2, 3]]), tf.sparse.eye(3)
    for data, part in (
        (Batches(), "item i = batch i * world.size + world.rank"),
        (((x, y) for x, y in zip(X, Y, strict=True)), "tf.data.Dataset.from_generator(make, output_signature=...)"),
        (lambda: iter(X), "tf.data.Dataset.from_generator(make, output_signature=...)"),
        (([[1.0, 2.0]], [1]), "give lists as np.asarray(...)"),
        ((X, Y, Y, Y), "several inputs are one x"),
        (sparse, "tf.sparse.to_dense(it)"),
        *([] if backend == "tensorflow" else [((ragged, Y[:2]), "it.to_tensor()"), ((WORDS, Y), "no strings")]),
    ):
        assert part in message(lambda data=data: hk.shard(data, world, 4))
    model = classifier(hk)
    assert "multiply the weights of the classes" in message(
        lambda: model.fit(hk.shard((X, Y, X[:, 0]), world, 4), class_weight={0: 1.0}, verbose=0)
    )
    model.fit(Batches(), epochs=2, shuffle=False, verbose=0, callbacks=[hk.BroadcastState()])  # the advice
    assert everyone(weights(model)) == [weights(model)] * world.size


@on_ranks("keras-torch", n=3)
def test_a_dataloader_is_sharded_by_hvdkit_torch(hk, world, everyone, alone):
    import torch

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), 4)
    with pytest.raises(ValueError, match=r"hvdkit\.torch\.shard.loader.dataset, world, batch_size"):
        hk.shard(loader, world, 4)
    found = train_loader(hk, world)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train_loader), rel=1e-5, abs=1e-6)


def train_loader(hk: Any, world: Any) -> list[float]:
    """What the error says to give."""
    import torch

    import hvdkit.torch

    world = hvdkit.torch.init()
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    model = classifier(hk)
    sharded = hvdkit.torch.shard(dataset, world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    model.fit(sharded, epochs=2, shuffle=False, verbose=0, callbacks=[hk.BroadcastState()])
    return weights(model)


def train_own_part(hk: Any, world: Any, kind: str, more: int = 0) -> list[float]:
    """Batches that the program makes itself, each rank's part of the global ones; ``more`` of them on the last rank."""
    import keras

    size = GLOBAL_BATCH // world.size
    steps = SAMPLES // GLOBAL_BATCH - 1 + (more if world.rank == world.size - 1 else 0)

    def part(index: int) -> Any:
        first = (index * world.size + world.rank) * size
        return X[first : first + size], Y[first : first + size]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            return part(index)

    def endless() -> Any:
        while True:
            yield from map(part, range(steps))

    options = {"steps_per_epoch": steps} if kind == "generator" else {"shuffle": False}
    if kind == "DataLoader":
        from torch import tensor
        from torch.utils.data import DataLoader, TensorDataset

        x, y = (np.concatenate(one) for one in zip(*map(part, range(steps)), strict=True))
        given: Any = DataLoader(TensorDataset(tensor(x), tensor(y)), size)
    else:
        given = endless() if kind == "generator" else Batches()
    model = classifier(hk)
    model.fit(given, epochs=2, verbose=0, callbacks=[hk.BroadcastState()], **options)
    return weights(model)


@on_ranks("keras-torch", smoke=("keras", "keras-jax"))
@pytest.mark.parametrize("kind", ["generator", "PyDataset", "DataLoader"])
def test_batches_of_the_program_s_own_end_as_in_one_process(hk, world, everyone, alone, kind):
    found = train_own_part(hk, world, kind)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train_own_part, kind=kind), rel=1e-5, abs=1e-6)
    error = message(lambda: train_own_part(hk, world, kind, more=1))
    assert "the ranks would take different numbers of steps per epoch" in error


@on_ranks("keras-torch", smoke=("keras", "keras-jax"), n=3)
@pytest.mark.parametrize(("same", "said"), [((0, 0, 0), "ranks 0-2"), ((1, 0, 1), "ranks 0, 2"), ((0, 1, 2), "")])
def test_the_same_data_on_several_ranks_is_one_warning(hk, world, everyone, same, said):
    model = classifier(hk)
    part = slice(same[world.rank], 37 + same[world.rank])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.fit(X[part], Y[part], batch_size=8, verbose=0)
    mine = [str(one.message) for one in warned if "fit got the same samples on" in str(one.message)]
    found = [text for texts in everyone(mine) for text in texts]
    assert len(found) == (1 if said else 0)
    assert not said or f"the same samples on {said}:" in found[0]


@on_ranks("keras", fresh=True)
def test_a_data_loader_is_refused_with_advice_that_works(hk, world):
    """And hvdkit.torch's own shard is one error, too, after which Horovod goes on."""
    import keras
    import tensorflow as tf
    import torch

    from hvdkit.errors import InvalidArgumentError

    x, y = torch.arange(48.0).reshape(12, 4) / 48, torch.ones(12, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    with pytest.raises(InvalidArgumentError, match="set KERAS_BACKEND=torch"):
        hk.shard(loader, world, 3)
    import hvdkit.torch

    with pytest.raises(InvalidArgumentError, match="has connected the ranks; give that one's shard arrays"):
        hvdkit.torch.shard(loader.dataset, world, 3)
    row = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
    stream = tf.data.Dataset.from_generator(lambda: iter(loader.dataset), output_signature=row)
    arrays = tuple(map(np.stack, zip(*loader.dataset, strict=True)))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    for data in (hk.shard(arrays, world, 3), hk.shard(stream, world, 3)):
        model.fit(data, verbose=0, epochs=2, callbacks=[hk.BroadcastState()])
    assert int(model.optimizer.iterations) == 8
