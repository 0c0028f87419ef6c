"""Any ``tf.data.Dataset`` on real ranks: TFRecords and generators, of unknown length, never read into memory.

Frameworks and hvdkit are imported within, on the ranks.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import on_ranks

import hvdkit

SAMPLES = 203


def numbers(samples: int = SAMPLES) -> Any:
    """The samples (x, number) 0 .. samples - 1, of a length that TensorFlow does not know."""
    import tensorflow as tf

    counted = tf.data.Dataset.range(samples).map(lambda n: (tf.ones(3) * tf.cast(n, tf.float32), n))
    return counted.filter(lambda x, n: n >= 0)


def write_files(directory: Path, files: int = 20, records: int = 12) -> list[str]:
    """TFRecords of the numbers 0, 1, ..., the last file of a twentieth of the others' length."""
    import tensorflow as tf

    names, number = [], 0
    for index in range(files):
        names.append(str(directory / f"{index:02d}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for _ in range(records - index % 3 if index < files - 1 else 1):
                writer.write(str(number).encode())
                number += 1
    return names


def in_files(names: Any) -> Any:
    import tensorflow as tf

    def parse(record: Any) -> Any:
        number = tf.strings.to_number(record, tf.int64)
        return tf.ones(3) * tf.cast(number, tf.float32), number

    return tf.data.TFRecordDataset(names).map(parse)


def taken(batches: Any, everyone: Callable[[Any], list[Any]]) -> list[list[tuple[list[int], list[float]]]]:
    """Step by step, what each rank got: numbers and weights, those of weight 0 left out."""
    mine = []
    for x, y, *w in batches:
        weights = w[0].numpy() if w else np.ones(len(y), np.float32)
        assert (x.numpy()[:, 0] == y.numpy()).all() and len(weights) == len(y)
        mine.append((y.numpy()[weights > 0].tolist(), weights.tolist()))
    ranks = everyone(mine)
    assert len({len(steps) for steps in ranks}) == 1, "the ranks took different numbers of steps"
    return [list(step) for step in zip(*ranks, strict=True)]


def seen(steps: Any) -> list[int]:
    return sorted(number for step in steps for numbers, _ in step for number in numbers)


def rest_of(state: dict[str, Any]) -> list[int]:
    """What one process trains on from a position that several ranks saved."""
    import hvdkit.tensorflow as hk

    loader = hk.shard(numbers(), hk.init(), 4, remainder="exact", shuffle=32, seed=3)
    loader.load_state(state)
    return [int(number) for _, y, _ in loader for number in y]


@on_ranks("tensorflow", n=3)
def test_a_stream_is_what_one_process_reads(hk: Any, world: Any, everyone: Any, alone: Any) -> None:
    one = functools.partial(hk.shard, numbers(), world, 4, remainder="exact", shuffle=32, seed=3)
    loader = one()
    first, second = taken(loader, everyone), taken(loader, everyone)
    for steps in (first, second):
        assert seen(steps) == list(range(SAMPLES))
        for step in steps:
            total = sum(len(numbers) for numbers, _ in step)
            expected = [len(numbers) * world.size / total for numbers, _ in step]
            assert [weights[0] for _, weights in step] == pytest.approx(expected)
    assert first != second and loader.epoch == 2
    order = [numbers for step in first for numbers in zip(*(numbers for numbers, _ in step), strict=False)]
    begin = one()
    for _ in begin:
        break
    state = begin.state()
    assert state["position"] == 4 * world.size and begin.epoch == 1
    begin.load_state(state)
    assert seen(taken(begin, everyone)) == sorted(set(range(SAMPLES)) - set(seen(first[:1])))
    rest = alone(rest_of, state=state)
    assert sorted(rest) == sorted(set(range(SAMPLES)) - set(seen(first[:1])))
    assert rest[: 4 * world.size] == [number for row in order[4:8] for number in row]


@on_ranks("tensorflow", n=2)
def test_a_pass_leaves_nothing_open(hk: Any, world: Any) -> None:
    """Neither a whole one nor one that ends within: its shuffle buffer may be large."""
    import gc

    def still_open(loader: Any, steps: int) -> int:
        for number, _ in enumerate(loader, start=1):
            if number == steps:
                break
        gc.collect()
        return sum(type(one).__name__ in ("OwnedIterator", "PassIterator") for one in gc.get_objects())

    loader = hk.shard(numbers(), world, 4)
    assert len({still_open(loader, steps) for steps in (2, 3, 100, 100)}) == 1


@on_ranks("tensorflow", n=2)
def test_no_tuner_holds_up_the_end_of_an_epoch(hk: Any, world: Any) -> None:
    """TensorFlow's own, whose end an iteration waits for, sleeps as long as the clock was set back meanwhile."""
    from unittest.mock import patch

    from tensorflow.python.data.ops.iterator_ops import OwnedIterator

    plain, iterated = OwnedIterator.__init__, []

    def begun(self: Any, dataset: Any) -> None:
        iterated.append(dataset.options().autotune.enabled)
        plain(self, dataset)

    arrays = hk.shard((np.zeros((16, 2), "float32"), np.arange(16)), world, 4)
    with patch.object(OwnedIterator, "__init__", begun):
        for loader in (arrays, arrays.map(lambda x, _: x), hk.shard(numbers(), world, 4, shuffle=32, seed=3)):
            assert len(list(loader))
            iterated.append("")
    # What people add to it may have something to tune: behind arrays, and the samples of a stream.
    assert iterated == [False, "", None, "", None, False, ""]


@on_ranks("keras", n=2)
def test_no_tuner_holds_up_the_end_of_an_epoch_of_fit(hk: Any, world: Any) -> None:
    data = hk.shard((np.zeros((16, 2), "float32"), np.arange(16)), world, 4)
    assert data.tf_dataset().options().autotune.enabled is False


@on_ranks("tensorflow", n=3)
def test_files_go_on_in_mid_epoch(hk: Any, world: Any, everyone: Any, tmp_path: Path) -> None:
    import keras

    names = everyone(write_files(tmp_path) if world.is_root else None)[0]
    records = len([None for _ in in_files(names)])

    def one(batch_size: int = 4) -> Any:
        files = hk.shard_files(names, world)
        return hk.shard(in_files(files), world, batch_size, remainder="exact", shuffle=8, seed=1)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    checkpoints, loader, steps = hk.Checkpoints(tmp_path / "saved"), one(), []
    mapped = loader.map(lambda x, y, w: (x, y, w)).prefetch(4)
    whole = taken(loader, everyone)
    assert seen(whole) == list(range(records))
    wholly = len(whole)
    for stop in (1, 5, wholly - 1, wholly):
        loader.set_epoch(0)
        steps = []
        for batch in mapped:
            steps.append(batch)
            if len(steps) == stop:
                break
        checkpoints.save(model, optimizer, step=stop, loader=mapped)
        anew = one()
        checkpoints.restore(model, optimizer, loader=anew)
        assert anew.epoch == (1 if stop == wholly else 0)
        if stop < wholly:
            assert seen(taken(steps, everyone) + taken(anew, everyone)) == list(range(records))
        assert seen(taken(anew, everyone)) == list(range(records))
    loader.load_state({**loader.state(), "position": 4 * world.size, "order": 0})
    assert "files of their own" in message(lambda: one(3).load_state(loader.state()))
    assert "stream=samples" in message(lambda: loader.load_state({**loader.state(), "stream": "samples"}))


@on_ranks("tensorflow", n=3)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_the_other_remainders(hk: Any, world: Any, everyone: Any, tmp_path: Path, remainder: str) -> None:
    names = everyone(write_files(tmp_path, 7, 5) if world.is_root else None)[0]
    for samples, dataset in ((22, numbers(22)), (25, in_files(hk.shard_files(names, world)))):
        steps = taken(hk.shard(dataset, world, 4, remainder=remainder, shuffle=False), everyone)
        assert all(len(numbers) == 4 for step in steps for numbers, _ in step)
        flat = [number for step in steps for numbers, _ in step for number in numbers]
        assert len(set(flat)) == len(flat) if remainder == "drop" else len(set(flat)) == samples
    assert len(taken(hk.shard(numbers(22), world, 4, remainder=remainder), everyone)) == (
        22 // (4 * world.size) + (remainder == "pad")
    )


@on_ranks("tensorflow", n=2)
def test_orders_that_differ_are_an_error_on_every_rank(hk: Any, world: Any, everyone: Any) -> None:
    import tensorflow as tf

    x = np.arange(64)
    known = tf.data.Dataset.from_tensor_slices((x, x))
    errors = everyone(message(lambda: hk.shard(known.shuffle(64), world, 4)))
    assert all("AgreementError" in error and "seed" in error for error in errors), errors
    for dataset, batch_size in ((numbers().shuffle(64), 4), (numbers().shuffle(64), 1)):
        loader = hk.shard(dataset, world, batch_size, shuffle=False)
        errors = everyone(message(lambda loader=loader: list(loader)))
        assert all("AgreementError" in error and "shuffle(n, seed=" in error for error in errors), errors
    seeded = hk.shard(numbers().shuffle(64, seed=1), world, 4, remainder="exact")
    assert seen(taken(seeded, everyone)) == list(range(SAMPLES))
    if world.is_root:  # a look at the data on one rank: the next order of this shuffle is another one there
        looked = numbers().shuffle(64, seed=1)
    own = numbers().shuffle(64, seed=1)
    loader = hk.shard(own, world, 4, remainder="exact")
    assert seen(taken(loader, everyone)) == list(range(SAMPLES))
    if world.is_root:
        looked = list(own.take(1))
        assert looked
    assert all("epoch 2" in error for error in everyone(message(lambda: list(loader))))
    own = numbers().shuffle(64, seed=1)
    loader = hk.shard(own, world, 4)
    for number, _ in enumerate(loader):
        if number == 10:
            break
    state = loader.state()
    list(own.take(1))
    loader.load_state(state)
    errors = everyone(message(lambda: list(loader)))
    assert all("when the checkpoint was made" in error for error in errors), errors
    paths = [f"{name}.tfrecord" for name in ("abc" if world.is_root else "acb")]
    listed = tf.data.Dataset.range(8).filter(lambda n: n >= 0)
    files = hk.shard_files(paths, world).flat_map(lambda _: listed)
    assert all("same paths" in error for error in everyone(message(lambda: list(hk.shard(files, world, 2)))))


@on_ranks("tensorflow", n=2)
def test_data_that_fails_on_one_rank_ends_all(hk: Any, world: Any, everyone: Any) -> None:
    import tensorflow as tf

    def fails(n: Any) -> Any:
        tf.debugging.assert_less(n, np.int64(30 if world.rank == 1 else 1000), "broken record")
        return n

    errors = []
    for wait in (False, True):
        loader, told = hk.shard(tf.data.Dataset.range(90).filter(lambda n: n >= 0).map(fails), world, 4), ""
        try:
            for _ in loader:
                if wait:
                    loader.state()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        errors.append(everyone(told))
    for mine, other in errors:
        assert mine.startswith("DataError") and "rank 1" in mine, mine
        assert "broken record" in other, other


@on_ranks("tensorflow", n=2)
def test_what_cannot_be_streamed_is_an_error(hk: Any, world: Any, everyone: Any) -> None:
    import tensorflow as tf

    loader = hk.shard(numbers(), world, 4)
    endless = numbers().repeat()
    lengths = tf.data.Dataset.range(9).map(lambda n: tf.fill([n // 2 * 2], n))
    in_buckets = lengths.bucket_by_sequence_length(lambda text: tf.shape(text)[0], [3, 6], [2, 2, 2])
    attempts = {
        "only .map": lambda: loader.filter(lambda x, y: True),
        "outside and call": lambda: tf.function(lambda: [x for x, _ in loader], autograph=False)(),
        "leave .repeat() out": lambda: hk.shard(endless, world, 2),
        "leave .batch() out": lambda: hk.shard(numbers().batch(2).prefetch(1), world, 2),
        "leave .padded_batch() out. Where their shapes differ, pad": lambda: hk.shard(
            numbers().padded_batch(2), world, 2
        ),
        "First element had shape [0] and element 1 had shape [2]": lambda: list(
            hk.shard(lengths, world, 2, shuffle=False)
        ),
        "with deterministic=False: each rank would": lambda: hk.shard(
            lengths.map(lambda x: x, num_parallel_calls=2, deterministic=False).prefetch(1), world, 2
        ),
        "and these are batches": lambda: hk.shard(numbers().batch(2).map(lambda x, y: (x, y)).shuffle(4), world, 2),
        "drop_remainder=True": lambda: hk.shard(in_buckets, world, 2),
        "image_dataset_from_directory": lambda: hk.shard(numbers().batch(2).cache().shuffle(4).prefetch(1), world, 2),
        "at least one file": lambda: hk.shard_files(["a"], world),
        "batch_size must": lambda: hk.shard(numbers(), world, 0),
        "remainder must": lambda: hk.shard(numbers(), world, 2, remainder="most"),
        "shuffle must": lambda: hk.shard(numbers(), world, 2, shuffle=-1),
        "belong before shard": lambda: hk.check_agreement(tf.Variable(1.0), None, world, loader=loader._source),
        "fewer than 4": lambda: list(hk.shard(numbers(3), world, 4)),
        "fewer than 1": lambda: list(hk.shard(numbers(1), world, 4, remainder="exact")),
    }
    for expected, attempt in attempts.items():
        errors = everyone(message(attempt))
        assert all(expected in error for error in errors), (expected, errors)
    hk.check_agreement(tf.Variable(1.0), None, world, loader=loader)
    advised = lengths.map(lambda x: tf.RaggedTensor.from_tensor(x[tf.newaxis]))
    padded = hk.shard(advised, world, 2, remainder="exact").map(lambda x, w: (x.to_tensor()[:, 0], w))
    rows = everyone([row[row > 0].tolist() for x, w in padded for row in x[w > 0].numpy()])
    assert sorted(itertools.chain(*rows)) == sorted([n] * (n // 2 * 2) for n in range(9))
    ragged = tf.data.Dataset.range(9).map(lambda n: (tf.RaggedTensor.from_row_lengths([n], [1]), tf.as_string(n)))
    batches = list(hk.shard(ragged.filter(lambda *_: True), world, 2, remainder="exact", shuffle=False))
    assert len(batches) == 3 and sum(float(w[0]) > 0 for *_, w in batches) == (3 if world.is_root else 2)


@on_ranks("tensorflow", n=2)
@pytest.mark.parametrize("made", ["slices", "ragged_batch"])
def test_samples_of_any_length_are_ragged_batches(hk: Any, world: Any, everyone: Any, made: str) -> None:
    """Of a ragged tensor's slices, or of what ``ragged_batch(1).unbatch()`` makes; padded per batch behind shard."""
    import tensorflow as tf

    texts = [list(range(1, 2 + number % 5)) for number in range(13)]
    if made == "slices":
        dataset = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(texts), np.arange(13)))
    else:
        dataset = tf.data.Dataset.range(13).filter(lambda n: n >= 0)
        dataset = dataset.map(lambda n: (tf.range(1, 2 + n % 5), n)).ragged_batch(1).unbatch()
    loader = hk.shard(dataset, world, 2, remainder="exact", shuffle=False).map(lambda x, y, w: (x.to_tensor(), y, w))
    found = []
    for x, y, w in loader:
        assert x.shape[1] == max(1 + int(one) % 5 for one in y)
        found += [(int(one), [int(word) for word in row if word]) for row, one, by in zip(x, y, w, strict=True) if by]
    assert sorted(one for rank in everyone(found) for one in rank) == list(enumerate(texts))


@on_ranks("tensorflow", n=2)
def test_a_shuffle_made_after_broadcast_state_is_told_why(hk: Any, world: Any, everyone: Any) -> None:
    """Its seed is one of two: the other is TensorFlow's own, which is the rank's from then on."""
    import tensorflow as tf

    hk.seed_everything(3, world)
    early = numbers().shuffle(64, seed=1)
    hk.broadcast_state(tf.Variable(1.0), None)
    assert seen(taken(hk.shard(early, world, 4, remainder="exact"), everyone)) == list(range(SAMPLES))
    late = [numbers().shuffle(64, seed=1), tf.data.Dataset.range(64).shuffle(64, seed=1)]
    for dataset in late:
        errors = everyone(message(lambda dataset=dataset: list(hk.shard(dataset, world, 4, shuffle=False))))
        assert all("After seed_everything make what shuffles before broadcast_state" in error for error in errors)


@on_ranks("keras", smoke=("keras-torch",))
@pytest.mark.parametrize("remainder", ["drop", "exact"])
def test_keras_trains_on_a_stream(hk: Any, world: Any, alone: Any, remainder: str) -> None:
    data = hk.shard(numbers(), world, 4, remainder=remainder, shuffle=32, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran out of data")  # Keras' end, not the ranks'
        _, model = trained(hk, data, epochs=2, verbose=0)
    found = np.concatenate([np.ravel(one) for one in model.get_weights()])
    expected = alone(trained_alone, size=world.size, remainder=remainder)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert data.epoch == 2 and data.position.samples == 0
    assert int(np.asarray(model.optimizer.iterations.value)) == 2 * (SAMPLES // 8 + (remainder == "exact"))


def trained(hk: Any, data: Any, callbacks: Any = (), **options: Any) -> tuple[Any, Any]:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(1e-6, momentum=0.9)), "mse")
    return model.fit(data, callbacks=list(callbacks), **options).history, model


def trained_alone(size: int, remainder: str) -> Any:
    """One process with the n-fold batch of the same order."""
    import hvdkit.keras as hk

    data = hk.shard(numbers(), hk.init(), 4 * size, remainder=remainder, shuffle=32, seed=3)
    _, model = trained(hk, data, epochs=2, verbose=0)
    return np.concatenate([np.ravel(one) for one in model.get_weights()])


@on_ranks("keras", "keras-torch")
def test_keras_goes_on_in_mid_epoch(hk: Any, world: Any, everyone: Any, tmp_path: Path) -> None:
    names = everyone(write_files(tmp_path) if world.is_root else None)[0]

    def one() -> Any:
        files = hk.shard_files(names, world)
        return hk.shard(in_files(files), world, 4, remainder="exact", shuffle=8, seed=1)

    _, whole = trained(hk, one(), epochs=2, verbose=0)
    with pytest.raises(RuntimeError, match="ended here"):
        trained(hk, one(), [hk.Checkpoint(tmp_path / "saved", every=3), failing(6)], epochs=2, verbose=0)
    data = one()
    _, model = trained(hk, data, [hk.Checkpoint(tmp_path / "saved", every=3)], epochs=2, verbose=0)
    assert data.epoch == 2
    for mine, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def failing(batch: int) -> Any:
    import keras

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            if number == batch:
                raise RuntimeError("the job was ended here")

    return Fails()


@on_ranks("keras-torch")
def test_keras_shows_why_a_stream_cannot_go_on(hk: Any, world: Any, everyone: Any) -> None:
    data = hk.shard(numbers().shuffle(64), world, 4)
    errors = everyone(message(lambda: trained(hk, data, epochs=1, verbose=0)))
    assert all(error.startswith("AgreementError: the ranks read") for error in errors), errors


@on_ranks("keras-torch")
def test_other_backends_take_dense_numbers(hk: Any, world: Any, everyone: Any) -> None:
    data = hk.shard(numbers().map(lambda x, n: (tf_string(n), n)), world, 4)
    errors = everyone(message(lambda: trained(hk, data, verbose=0)))
    assert all("no ragged tensors and no strings" in error for error in errors), errors


def tf_string(number: Any) -> Any:
    import tensorflow as tf

    return tf.strings.as_string(number)


def by_class(hk: Any, world: Any, remainder: str, plain: bool = False) -> Any:
    """A training with class weights; what plain Keras gives for all samples."""
    import keras
    import tensorflow as tf

    def labelled(x: Any, n: Any) -> Any:
        return x / 100.0, tf.cast(n % 3 == 0, tf.float32)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(
        keras.optimizers.SGD(0.1) if plain else hk.distribute(keras.optimizers.SGD(0.1)), "binary_crossentropy"
    )
    data = numbers(61).map(labelled)
    data = data.batch(8) if plain else hk.shard(data, world, 8 // world.size, remainder=remainder, shuffle=False)
    model.fit(data, epochs=2, verbose=0, class_weight={0: 0.5, 1: 4.0})
    return np.concatenate([np.ravel(one) for one in model.get_weights()])


@on_ranks("keras", "keras-torch")
def test_class_weights_are_those_of_keras(hk: Any, world: Any, everyone: Any, alone: Any) -> None:
    found = by_class(hk, world, "exact")
    np.testing.assert_allclose(found, alone(by_class, remainder="exact", plain=True), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(by_class(hk, world, "drop"), alone(by_class, remainder="drop"), rtol=2e-5, atol=1e-6)
    weighted = hk.shard(numbers().map(lambda x, n: (x, n, 1.0)), world, 4)
    errors = everyone(message(lambda: trained(hk, weighted, class_weight={0: 1.0}, verbose=0)))
    assert all("multiply the weights of the classes" in error for error in errors), errors


MEGABYTE = 2**20
ROOM = 336
"""Of these, what a rank may take beside what it has when it begins; its files hold more, TensorFlow's threads 150."""


def train_in_little_memory(hk: Any, world: Any, everyone: Any, names: list[str], samples: int) -> None:
    """Half an epoch, the rest of it from the saved position, and the next one."""
    import resource

    import tensorflow as tf

    def parse(record: Any) -> Any:
        return tf.io.decode_raw(record, tf.uint8), tf.strings.to_number(tf.strings.substr(record, 0, 8), tf.int64)

    def one() -> Any:
        files = tf.data.TFRecordDataset(hk.shard_files(names, world), compression_type="GZIP")
        return hk.shard(files.map(parse), world, 4, remainder="exact", shuffle=8)

    def numbers_of(batches: Any, most: int = 10**6) -> list[int]:
        found: list[int] = []
        for number, (x, y, w) in enumerate(batches, start=1):
            assert x.shape[1] == MEGABYTE
            found += y.numpy()[w.numpy() > 0].tolist()
            if number == most:
                break
        return found

    status = Path("/proc/self/status").read_text().split()
    held = int(status[status.index("VmData:") + 1]) * 1024
    limit = held + ROOM * MEGABYTE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with pytest.raises(MemoryError):
        np.zeros(samples // world.size * MEGABYTE, np.uint8)
    loader = one()
    first = numbers_of(loader, 40)
    anew = one()
    anew.load_state(loader.state())
    rest, second = numbers_of(anew), numbers_of(anew)
    for parts in (everyone(first + rest), everyone(second)):
        assert sorted(number for part in parts for number in part) == list(range(samples))
    assert anew.epoch == 2


@pytest.mark.parallel
def test_records_beyond_the_memory(run_job: Callable[..., Any], tmp_path: Path) -> None:
    """20 files, of which some are up to a twentieth shorter."""
    tf = pytest.importorskip("tensorflow")
    names, number = [], 0
    for index in range(20):
        names.append(str(tmp_path / f"{index:02d}.tfrecord.gz"))
        with tf.io.TFRecordWriter(names[-1], tf.io.TFRecordOptions("GZIP", compression_level=1)) as writer:
            for _ in range(40 - index % 3):
                writer.write(f"{number:08d}".encode().ljust(MEGABYTE, b"."))
                number += 1
    run_job("tensorflow", train_in_little_memory, names=names, samples=number)


def passes(data: Any) -> list[list[float]]:
    """The samples of two epochs."""
    return [np.concatenate([np.ravel(batch) for batch in data]).tolist() for _ in range(2)]


@on_ranks("tensorflow", "keras")
def test_a_random_map_draws_anew_in_each_epoch(hk: Any, world: Any) -> None:
    """Also of data so few that they are kept in memory; one before shard would be another on each rank."""
    import tensorflow as tf

    def noise(x: Any) -> Any:
        return x + tf.random.uniform(tf.shape(x))

    few = tf.data.Dataset.from_tensor_slices(np.zeros(8, "float32"))
    first, second = passes(hk.shard(few, world, 2, shuffle=False).map(noise))
    assert len(first) == 4 and first != second
    with pytest.raises(hvdkit.AgreementError, match="random maps behind shard"):
        passes(hk.shard(few.map(noise), world, 2, shuffle=False))


@on_ranks("tensorflow", "keras", n=1)
def test_a_random_map_before_shard_is_no_constant(hk: Any, world: Any) -> None:
    import tensorflow as tf

    few = tf.data.Dataset.from_tensor_slices(np.zeros(8, "float32"))
    first, second = passes(hk.shard(few.map(lambda x: x + tf.random.uniform(())), world, 2, shuffle=False))
    assert len(first) == 8 and first != second
    shuffled = hk.shard(tf.data.Dataset.range(8).shuffle(8, seed=3), world, 2, shuffle=False)
    assert len(shuffled) == 4  # arrays still
