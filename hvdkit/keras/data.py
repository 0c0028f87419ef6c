"""A rank's part of a data set for Keras' ``fit``, on every backend; the inside of ``hvdkit.keras.shard``."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import keras
import numpy as np

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.keras import state
from hvdkit.steps import passes
from hvdkit.steps.shards import Batch, InEpochs, Shard, require_loader
from hvdkit.steps.streams import StreamInEpochs


def as_arrays(dataset: Any) -> tuple[Any, ...]:
    """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, checked; each part an array or a structure of arrays.

    Raises:
        InvalidArgumentError: not arrays, or arrays of several lengths.
    """
    parts = tuple(dataset) if isinstance(dataset, (tuple, list)) else (dataset,)
    arrays: tuple[Any, ...] = keras.tree.map_structure(_array, keras.tree.lists_to_tuples(parts))
    lengths = sorted({leaf.shape[0] for leaf in keras.tree.flatten(arrays)})
    if len(lengths) != 1:
        raise InvalidArgumentError(f"the arrays must have one length, got {', '.join(map(str, lengths)) or 'none'}.")
    if len(arrays) > 3:
        raise InvalidArgumentError(
            f"shard needs arrays as x, (x, y) or (x, y, sample_weight), got {len(arrays)} of them; several inputs are "
            "one x, as ((a, b), y)."
        )
    return arrays


def _array(value: Any) -> Any:
    """What rows can be taken of: NumPy's arrays, tensors of torch and jax, ragged ones of TensorFlow."""
    backend = keras.backend.backend()
    name = type(value).__name__
    if name == "RaggedTensor" and backend == "tensorflow":
        return value
    if name in ("RaggedTensor", "SparseTensor"):
        dense = "it.to_tensor()" if name == "RaggedTensor" else "tf.sparse.to_dense(it)"
        raise InvalidArgumentError(f"shard takes no tf.{name} on Keras' {backend} backend; give {dense}.")
    if not getattr(value, "shape", ()):
        raise InvalidArgumentError(
            f"shard needs NumPy arrays as x, (x, y) or (x, y, sample_weight), got {name}; {_instead_of(value)}."
        )
    array = value if keras.ops.is_tensor(value) and backend != "tensorflow" else np.asarray(value)
    if backend != "tensorflow" and isinstance(array, np.ndarray) and array.dtype.kind in "OSU":
        raise InvalidArgumentError(
            f"shard takes no strings on Keras' {backend} backend, whose tensors hold none; give numbers, such as "
            "np.asarray(TextVectorization()(strings))."
        )
    return array


def _instead_of(value: Any) -> str:
    """What to give in the place of data that has no rows to choose from."""
    classes = {f"{one.__module__.split('.')[0]}.{one.__name__}" for one in type(value).__mro__}
    if "torch.DataLoader" in classes:
        if keras.backend.backend() == "torch":
            return "give fit a DataLoader of this rank's part: hvdkit.torch.shard(loader.dataset, world, batch_size)"
        return (
            "give its samples as arrays, shard(tuple(map(np.stack, zip(*loader.dataset))), world, batch_size), many of "
            "them as a tf.data.Dataset.from_generator(lambda: iter(loader.dataset), output_signature=...), or set "
            "KERAS_BACKEND=torch and give fit hvdkit.torch.shard(loader.dataset, world, batch_size)"
        )
    if isinstance(value, keras.utils.PyDataset):
        return (
            "a PyDataset makes its own batches: have it make this rank's (len = batches // world.size, item i = batch "
            "i * world.size + world.rank), and give it to fit as it is"
        )
    if callable(value) or hasattr(value, "__next__"):
        return (
            "what comes one after the other has no rows to choose from: make it a tf.data.Dataset.from_generator(make, "
            "output_signature=...), on the tensorflow backend, and shard that"
        )
    return "give lists as np.asarray(...)"


class ShardedData(InEpochs, keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's part of every global batch; a new order in each epoch. Made by ``hvdkit.keras.shard``.

    A ``keras.utils.PyDataset`` for ``fit`` and ``evaluate``, and an iterable of batches for loops of your own.

    Attributes:
        share: which samples are this rank's.
    """

    hvdkit_batches = True

    def __init__(self, arrays: tuple[Any, ...], share: Shard) -> None:
        super().__init__(workers=1, use_multiprocessing=False)  # passes are told apart by reads that come in order
        self._begin(share)
        self._arrays = arrays
        self._weights: Any = None
        if len(arrays) == 3:
            self._weights = keras.tree.map_structure(_as_weights, arrays[2])
        elif share.remainder == "exact":
            self._weights = np.ones(share.n_samples, keras.config.floatx())
        self._maps: tuple[Callable[..., Any], ...] = ()
        self._plan: list[Batch] = []
        self.in_fit = self._training = False
        self._read = 0

    def __len__(self) -> int:
        return len(self.share)

    @property
    def num_batches(self) -> int:
        """What Keras reads in the pass that begins; outside of ``fit``, and for its progress line, a whole epoch."""
        return self.share.steps_left(self._next.samples) if self.in_fit else len(self)

    @property
    def steps_done(self) -> int:
        """Steps of the next pass that were taken before this process went on in mid-epoch."""
        return len(self) - self.share.steps_left(self._next.samples)

    @property
    def ends_with_filler(self) -> bool:
        """Whether this rank has no sample of its own in the last step of the pass that is under way."""
        share = self.share
        left = (share.n_samples - self.position.samples) % share.global_batch
        return share.remainder == "exact" and 0 < left <= share.world.rank

    def fills(self, batch: int) -> bool:
        """Whether this rank has no sample of its own in a batch of the epoch."""
        return self.ends_with_filler and batch == len(self) - 1

    def advance(self, steps: int) -> None:
        """Count steps that were trained in the pass that is under way."""
        passes.go_on_elsewhere()
        for _ in range(steps):
            under_way = self._passes.in_fit
            if under_way is None or self._reached(under_way).epoch > under_way.start.epoch:
                under_way = self._passes.in_fit = self._passes.begin(self._next, self.share)
            under_way.train(1)

    @property
    def parts(self) -> int:
        """1 where a sample is x alone, 2 of ``(x, y)``, 3 of ``(x, y, sample_weight)``."""
        return len(self._arrays)

    def reader(self, class_weight: Mapping[int, float] | None = None) -> ShardedData:
        """A copy for one ``fit``, which may look at batches and read ahead without moving the position.

        Args:
            class_weight: of ``fit``: what each sample counts by its class, times what it counts anyway.
        Raises:
            InvalidArgumentError: y is no array of classes, or the data have weights of the user's own.
        """
        reader = copy.copy(self)
        reader._begin(self.share)
        reader.in_fit = True
        if class_weight:
            weights = _class_weights(self._arrays[1], class_weight) if len(self._arrays) == 2 else None
            if weights is None:
                _raise_no_classes()
            reader._weights = weights if self._weights is None else self._weights * weights
        return reader

    def map(self, map_func: Callable[..., Any], *_: Any, **__: Any) -> ShardedData:
        """As of ``tf.data.Dataset``, on batches of TensorFlow's tensors: ``(x, y)``, with "exact" ``(x, y, w)``.

        Each batch is mapped when it is read, so that a random map draws anew in every epoch, and on every rank.
        """
        mapped = copy.copy(self)
        mapped._maps = (*self._maps, map_func)
        return mapped

    def prefetch(self, buffer_size: Any = None) -> ShardedData:  # noqa: ARG002
        """Nothing: batches are read ahead already."""
        return self

    def go_to(self, other: ShardedData) -> None:
        """Begin the next pass where ``other`` begins its."""
        self.share = other.share
        for one in (other, self):
            one._go_on_at(other._next)

    def __getitem__(self, index: int) -> Any:
        """Batch ``index`` of the pass that Keras is in; outside of one, of the next pass.

        Keras also looks at the first batches before it trains, and TensorFlow reads ahead in a thread of its own: a
        pass is what begins with batch 0 between Keras' begin and end of an epoch, and it keeps its order to the end.

        Raises:
            InvalidArgumentError: Keras shuffles the batches by itself, on each rank differently.
        """
        if index == 0 or not self._plan:
            self._plan = self._plan_pass()
        if self._training and index not in (0, self._read):
            raise InvalidArgumentError(
                f"batch {index} was read where batch {self._read} was due: fit shuffles the batches, and the ranks' "
                "would no longer belong together; call hvdkit.keras.init() before fit, or fit(shuffle=False)."
            )
        self._read = index + 1
        # To know the batches' types Keras looks at two, and of an epoch there may be one left.
        return self._contents(self._plan[min(index, len(self._plan) - 1)])

    def __iter__(self) -> Iterator[Any]:
        begun = self._passes.begin(self._next, self.share)
        start = begun.start
        return begun.counting(map(self._contents, self.share.batches(start.epoch, start.samples)))

    def on_epoch_begin(self) -> None:
        self._training = True

    def on_epoch_end(self) -> None:
        self._training = False

    def take(self, count: int) -> list[Any]:
        """The first batches of the pass that comes next, for a look; no position moves."""
        batches = self.share.batches(self._next.epoch, self._next.samples)
        return [self._contents(batch) for batch in itertools.islice(batches, count)]

    def evaluation(self, steps: int | None = None) -> Evaluation:
        """What ``evaluate`` and ``predict`` read: each sample once on all ranks together, in the data set's order.

        Batches are as in training, with "exact" of weight 1; a rank may have one less than another. Ranks need not
        read alike, and no position moves.

        Args:
            steps: batches of each rank at most.
        """
        share = replace(self.share, world=state.world())
        return Evaluation(self, [Batch(indices, 1.0) for indices in share.once()[:steps]])

    def tf_dataset(self, plan: Callable[[], list[Batch]] | None = None) -> Any:
        """The same batches made by ``tf.data``, for Keras' tensorflow backend: a pass in each iteration."""
        from hvdkit.tensorflow.data import batches_of
        from hvdkit.tf_shared.tf_data import untuned

        floatx = keras.config.floatx()
        batches = batches_of(
            self._parts,
            plan or self._plan_pass,
            lambda parts, weight, _: self._pack(parts, keras.ops.cast(weight, floatx)),
        )
        for function in self._maps:
            batches = batches.map(function).prefetch(1)
        return untuned(batches)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (*self._arrays[:2], *([] if self._weights is None else [self._weights]))

    def _plan_pass(self) -> list[Batch]:
        """The batches of the pass that begins."""
        following = self._next
        if self.in_fit and self._training:
            self._go_on_at(following.next_epoch())
        return list(self.share.batches(following.epoch, following.samples if self.in_fit else 0))

    def _contents(self, batch: Batch) -> Any:
        rows = keras.tree.map_structure(lambda array: _rows(array, batch.indices), self._parts)
        packed = self._pack(rows, np.asarray(batch.weight, keras.config.floatx()))
        return _mapped(packed, self._maps) if self._maps else packed

    def _pack(self, rows: tuple[Any, ...], weight: Any) -> Any:
        """A batch as ``fit(x, y, sample_weight)`` would make it."""
        if self._weights is None:
            return keras.utils.pack_x_y_sample_weight(*rows)
        y = rows[1] if self.parts > 1 else None
        return rows[0], y, keras.tree.map_structure(lambda one: one * weight, rows[-1])


class Evaluation(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's batches of an evaluation; made by ``ShardedData.evaluation``.

    Attributes:
        samples: of this rank. Without any it has a batch of another rank's all the same, by which the metrics are made.
    """

    hvdkit_batches, in_fit = True, False

    def __init__(self, data: ShardedData, plan: list[Batch]) -> None:
        super().__init__(workers=1, use_multiprocessing=False)
        self.samples = sum(len(batch.indices) for batch in plan)
        self._data, self._plan = data, plan or [Batch(data.share.order(0)[:1], 1.0)]

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> Any:
        return self._data._contents(self._plan[index])

    def __iter__(self) -> Iterator[Any]:
        return (self._data._contents(batch) for batch in (self._plan if self.samples else ()))

    def tf_dataset(self) -> Any:
        """As of ``ShardedData``."""
        return self._data.tf_dataset(lambda: self._plan)


def _mapped(batch: Any, functions: tuple[Callable[..., Any], ...]) -> Any:
    tf = importlib.import_module("tensorflow")
    batch = tf.nest.map_structure(lambda one: None if one is None else tf.convert_to_tensor(one), batch)
    for function in functions:
        batch = function(*batch) if isinstance(batch, tuple) else function(batch)
    if keras.backend.backend() == "tensorflow":
        return batch
    return tf.nest.map_structure(lambda one: None if one is None else np.asarray(one), batch)


def _rows(array: Any, indices: Any) -> Any:
    if type(array).__name__ != "RaggedTensor":
        return array[indices]
    import tensorflow as tf

    return tf.gather(array, indices)


def _class_weights(y: Any, class_weight: Mapping[int, float]) -> Any:
    """What each sample counts by its class, (n,), as Keras reads y: classes (n,) or (n, 1), or one-hot (n, classes)."""
    classes = np.zeros((0, 0)) if keras.tree.is_nested(y) else np.round(keras.ops.convert_to_numpy(y))
    if classes.ndim == 2 and classes.size:
        classes = classes[:, 0] if classes.shape[1] == 1 else np.argmax(classes, axis=1)
    if classes.ndim != 1:
        return None
    found, places = np.unique(classes.astype(np.int64), return_inverse=True)
    return _as_weights(np.array([class_weight.get(int(one), 1.0) for one in found])[places])


def _as_weights(values: Any) -> Any:
    return keras.ops.convert_to_numpy(values).astype(keras.config.floatx())


def reader_of(data: Any, class_weight: Mapping[int, float] | None) -> Any:
    """What one ``fit`` reads of the data of ``shard``; see ``ShardedData.reader``."""
    if isinstance(data, ShardedData):
        return data.reader(class_weight)
    tf, backend = sys.modules["tensorflow"], keras.backend.backend()
    specs = tf.nest.flatten(data.element_spec)
    if backend != "tensorflow" and any(type(one) is not tf.TensorSpec or one.dtype == tf.string for one in specs):
        raise InvalidArgumentError(
            f"Keras' {backend} backend takes no ragged tensors and no strings; .map them to dense numbers before fit."
        )
    if class_weight:
        y = data.element_spec[1] if data.parts == 2 else None
        if not isinstance(y, tf.TensorSpec) or y.shape.rank not in (1, 2):
            _raise_no_classes()
        data = data.map(
            tf.autograph.experimental.do_not_convert(lambda *batch: _with_class_weights(batch, class_weight))
        )
    return data.reader()


def _with_class_weights(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """``_class_weights`` for a stream's batches."""
    tf, (x, y, *w) = sys.modules["tensorflow"], batch
    one_hot = y.shape.rank == 2 and y.shape[1] != 1
    classes = tf.argmax(y, axis=1) if one_hot else tf.cast(tf.round(tf.reshape(y, [-1])), tf.int64)
    weights = tf.ones_like(classes, keras.config.floatx())
    for name, weight in class_weight.items():
        weights = tf.where(classes == name, tf.cast(weight, weights.dtype), weights)
    return x, y, weights * w[0] if w else weights


def _raise_no_classes() -> NoReturn:
    raise InvalidArgumentError(
        "fit(class_weight=...) needs data as (x, y) with one class in y for each sample; multiply the weights of the "
        "classes into the sample_weight of shard((x, y, sample_weight), ...)."
    )


def is_tf_data(dataset: Any) -> bool:
    """Whether it is a ``tf.data.Dataset``; TensorFlow is not imported for it."""
    return "tensorflow" in sys.modules and isinstance(dataset, sys.modules["tensorflow"].data.Dataset)


def streams() -> Any:
    """``hvdkit.tf_shared.tf_streams``.

    Raises:
        MissingFrameworkError: there is no TensorFlow, which other backends can do without.
    """
    try:
        return importlib.import_module("hvdkit.tf_shared.tf_streams")
    except ImportError as error:
        raise MissingFrameworkError(
            "a tf.data.Dataset needs TensorFlow, which cannot be imported; run `pip install tensorflow`."
        ) from error


def with_weights(parts: Any, weights: Any) -> Any:
    """A stream's batch as ``(x, y, w)``, with what its samples counted anyway; ``(x, None, w)`` without y."""
    tf = sys.modules["tensorflow"]
    weights = tf.cast(weights, keras.config.floatx())
    if not isinstance(parts, tuple) or len(parts) < 2:
        return parts, None, weights
    if len(parts) > 2:
        own = tf.cast(parts[2], weights.dtype)
        weights = own * tf.reshape(weights, [-1] + [1] * (len(own.shape) - 1))
    return (*parts[:2], weights)


SHARDED = (ShardedData, StreamInEpochs)
"""What ``shard`` returns: of arrays, and of a ``tf.data.Dataset``."""

_TRAINED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def set_trained_on(model: Any, data: Any) -> None:
    """Note what the ``fit`` that begins trains on, for its callbacks, which Keras does not tell."""
    _TRAINED.pop(model, None)
    if data is not None:
        _TRAINED[model] = data


def trained_on(model: Any) -> Any:
    """What the model's ``fit`` trains on, where that is from ``shard``."""
    return _TRAINED.get(model)


require_sharded = functools.partial(require_loader, kinds=SHARDED)
