"""Batches of arrays, whoever takes their rows: TensorFlow, of a copy, or NumPy, of the array itself."""

import numpy as np
import pytest
from ranks import on_ranks

SAMPLES = 10


@pytest.mark.parametrize("where", ["copied", "large rows", "in place", "mapped"])
@on_ranks("tensorflow")
def test_rows_are_those_of_the_arrays(hk, world, everyone, tmp_path, where):
    import tensorflow as tf

    from hvdkit.tensorflow import data

    width = data.LARGE // 4 if where == "large rows" else 3
    x = np.arange(SAMPLES * width, dtype=np.float32).reshape(SAMPLES, width)
    if where == "mapped":
        path = tmp_path / f"{world.rank}.npy"
        np.save(path, x)
        x = np.load(path, mmap_mode="r")
    limit = data.SMALL
    data.SMALL = limit if where in ("copied", "mapped") else 0
    try:
        loader = hk.shard((x, np.arange(SAMPLES)), world, 2)
        copied = isinstance(data.within_tensorflow(x), tf.Tensor)
    finally:
        data.SMALL = limit
    assert copied == (where in ("copied", "large rows"))
    for _ in range(2):  # epochs
        taken = []
        for images, numbers in loader:
            np.testing.assert_array_equal(images, x[numbers])
            taken += numbers.numpy().tolist()
        whole = [number for part in everyone(taken) for number in part]
        assert len(whole) == len(set(whole)) == SAMPLES - SAMPLES % (2 * world.size)


@on_ranks("tensorflow", "keras", n=2)
def test_slices_of_tensors_are_arrays_whatever_their_size(hk, world, everyone):
    import tensorflow as tf

    from hvdkit.steps.streams import StreamInEpochs
    from hvdkit.tf_shared import tf_streams

    slices = tf.data.Dataset.from_tensor_slices(({"x": np.arange(SAMPLES)}, np.zeros((SAMPLES, 2))))
    limit, tf_streams.IN_MEMORY = tf_streams.IN_MEMORY, 0
    try:
        loaders = hk.shard(slices, world, 2), hk.shard(slices.prefetch(1), world, 2)
        strings = hk.shard(tf.data.Dataset.from_tensor_slices(["a", "b", "c", "d"]), world, 2)
    finally:
        tf_streams.IN_MEMORY = limit
    assert [isinstance(one, StreamInEpochs) for one in (*loaders, strings)] == [False, True, True]
    for loader in loaders:
        taken = [int(number) for x, y in loader for number in np.asarray(x["x"])]
        assert len({number for part in everyone(taken) for number in part}) == 2 * len(taken) == 8
