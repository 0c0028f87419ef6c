"""What Keras does not promise and hvdkit needs, and all that hvdkit replaces: checked at import, undone at shutdown.

What ``hvdkit.tensorflow`` needs, too, is used in ``hvdkit.tf_shared``, layers and random generators in its
``keras_layers``.
A version of Keras that was not tested gets one warning; one that lacks a name cannot be used.
``tests/parallel/test_keras_private.py`` tests each.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.core import listeners
from hvdkit.errors import MissingFrameworkError
from hvdkit.steps.streams import StreamInEpochs
from hvdkit.tf_shared.keras_layers import layers_of

TESTED = ("3.15", "3.15")
"""The first and the last version of Keras that the tests ran with."""


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """An attribute of Keras.

    Attributes:
        module: where it is.
        owner: the class that has it; empty: the module itself.
        name: its name.
        why: what hvdkit needs it for.
    """

    module: str
    owner: str
    name: str
    why: str

    def holder(self) -> Any:
        """The class or module that has it."""
        module = importlib.import_module(self.module)
        return getattr(module, self.owner) if self.owner else module

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


FIT = PatchPoint("keras", "Model", "fit", "every fit must be guarded, and Keras has no hook that every fit passes")
TRAIN_ON_BATCH = PatchPoint("keras", "Model", "train_on_batch", "a step without fit must be guarded, too")
EVALUATE = PatchPoint("keras", "Model", "evaluate", "what shard made is to be evaluated on all ranks together")
PREDICT = PatchPoint("keras", "Model", "predict", "what shard made is to be predicted on all ranks together")
APPLY = PatchPoint("keras.optimizers", "Optimizer", "apply", "every step of a loop of the user's own passes it")
REST = PatchPoint(
    "keras.src.trainers.epoch_iterator",
    "EpochIterator",
    "_enumerate_iterator",
    "the first epoch of a fit that goes on is the rest of one, its batches numbered as in the whole",
)
STANDARDIZE = PatchPoint(
    "keras.src.trainers.data_adapters.py_dataset_adapter",
    "PyDatasetAdapter",
    "_standardize_batch",
    "a batch without labels is what fit(x) makes of an array, not a tuple",
)
TF_DATASET = PatchPoint(
    "keras.src.trainers.data_adapters.py_dataset_adapter",
    "PyDatasetAdapter",
    "get_tf_dataset",
    "tf.data copies large rows several times faster than a generator of batches",
)
TF_ITERATOR = PatchPoint(
    "keras.src.backend.tensorflow.trainer",
    "TFEpochIterator",
    "_get_iterator",
    "TensorFlow takes a batch within the step, and the wait for it is to be told from the step's work",
)
LEGACY_FIT = PatchPoint("tf_keras", "Model", "fit", "no model of Keras 2 may train on several ranks unsynchronised")
BUILD = PatchPoint(
    "keras.src.backend.tensorflow.trainer",
    "TensorFlowTrainer",
    "_maybe_symbolic_build",
    "a model's state is shared before its first step, and TensorFlow makes it in this step only",
)
MAKE_STEP = PatchPoint(
    "keras",
    "Model",
    "make_train_function",
    "a backward is averaged in steps, and not in callbacks, where it may be one rank's alone",
)
_OF_BACKEND = {
    "tensorflow": [BUILD, TF_DATASET, TF_ITERATOR],
    "torch": [STANDARDIZE, MAKE_STEP],
    "jax": [STANDARDIZE],
}
NEEDED = (
    FIT,
    TRAIN_ON_BATCH,
    EVALUATE,
    PREDICT,
    APPLY,
    REST,
    *_OF_BACKEND.get(keras.backend.backend(), []),
    PatchPoint("keras", "Model", "_aggregate_additional_loss", "what layers give to add_loss counts as their batch"),
    PatchPoint(
        "keras.src.trainers.compile_utils", "CompileMetrics", "metrics", "each metric's states add up, or do not"
    ),
    PatchPoint("keras", "Model", "_flatten_layers", "which layers normalise batches, and keep statistics"),
    PatchPoint("keras", "Model", "_flatten_metrics_in_order", "evaluate returns a list, unless it is asked for a dict"),
    PatchPoint("keras.src.random.seed_generator", "", "GLOBAL_SEED_GENERATOR", "the random state of a checkpoint"),
    PatchPoint("keras.src.backend.common.global_state", "", "get_global_attribute", "the random state of a checkpoint"),
)
"""What there must be; of Keras 2, which may not be installed, nothing."""

OURS = "hvdkit_batches"
"""An attribute of the data sets that ``shard`` makes, which read and pack their batches themselves."""

WITHOUT_BATCH: WeakSet[Any] = WeakSet()
"""Models whose ``fit`` has yet to look at its data."""

_replaced: dict[PatchPoint, tuple[Any, Any, Any]] = {}
"""The holder, what is there now, and what was, None: a base class's."""


# What Keras knows and does not tell ----------------------------------------------------------------------------------


def unbuilt_layers(model: Any) -> list[Any]:
    """The layers that have yet to make their weights; the model is one of them where it has a ``call``."""
    has_call = type(model).call is not keras.Model.call
    return [layer for layer in layers_of(model, include_self=has_call) if not layer.built]


def own_metrics_of(model: Any) -> Any:
    """The metrics that ``compile`` was given, in its structure: ``model.metrics`` has them only once they are built."""
    compiled = model._compile_metrics
    return [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]


def in_order(model: Any, results: dict[str, Any]) -> Any:
    """Results by name as ``evaluate`` returns them; Keras alone knows the order."""
    return model._flatten_metrics_in_order(results)


def first_epoch_of(model: Any) -> int | None:
    """The epoch with which ``fit`` begins for a callback that resumes, as ``BackupAndRestore`` has it; else None."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_first_epoch(model: Any, epoch: int | None) -> None:
    """Have ``fit`` begin with another epoch: its argument is the caller's, and callbacks have no other way."""
    model._initial_epoch = epoch


def backend_state() -> npt.NDArray[np.uint8]:
    """The state of the backend's own global generator, where it has one, uint8 (length,)."""
    if keras.backend.backend() == "torch":
        import torch

        state: npt.NDArray[np.uint8] = torch.get_rng_state().numpy()
        return state
    generator = None
    if keras.backend.backend() == "tensorflow":  # what the training has made already; asking would make one
        generator = importlib.import_module("tensorflow.python.ops.stateful_random_ops").global_generator
    return np.empty(0, np.uint8) if generator is None else generator.state.numpy().view(np.uint8)


def set_backend_state(contents: npt.NDArray[np.uint8]) -> None:
    """Go on from what ``backend_state`` returned."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_rng_state(torch.from_numpy(contents[: torch.get_rng_state().numel()].copy()))
    elif len(contents):
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(contents.view(np.int64))


# What is replaced ----------------------------------------------------------------------------------------------------


def check(version: str) -> None:
    """Warn of a version of Keras that was not tested.

    Raises:
        MissingFrameworkError: something that hvdkit needs is not there.
    """
    install = f"pip install 'keras=={TESTED[1]}.*'"
    for one in NEEDED:
        try:
            found = hasattr(one.holder(), one.name)
        except (ImportError, AttributeError):
            found = False
        if not found:
            raise MissingFrameworkError(
                f"hvdkit.keras needs {one} ({one.why}), and Keras {version} has none; run `{install}`."
            )
    first, last, mine = (tuple(map(int, text.split(".")[:2])) for text in (*TESTED, version))
    if not first <= mine <= last:
        tested = " to ".join(dict.fromkeys(TESTED))
        warnings.warn(
            f"hvdkit.keras was tested with Keras {tested}, found {version}, whose inside it changes ({FIT}, {REST}); "
            f"should fit fail in it, run `{install}`.",
            stacklevel=2,
        )


def replace(what: PatchPoint, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put another function in the place of one of Keras', until ``undo``; nothing happens the second time.

    Args:
        make: gets Keras' function and returns the one that takes its place.
    """
    if what in _replaced:
        return
    holder = what.holder()
    plain = getattr(holder, what.name)
    own = vars(holder).get(what.name)
    new: Any = functools.wraps(plain)(make(plain))
    setattr(holder, what.name, new)
    _replaced[what] = holder, new, own


def undo() -> None:
    """Give Keras its own functions back, but for those that somebody else has replaced since."""
    for what, (holder, new, own) in _replaced.items():
        if vars(holder).get(what.name) is not new:
            continue
        if own is None:
            delattr(holder, what.name)
        else:
            setattr(holder, what.name, own)
    _replaced.clear()


def go_on_in_mid_epoch(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``REST``."""

    def enumerate_rest(self: Any) -> Any:
        stream = getattr(self.data_adapter, "_dataset", None)
        if isinstance(stream, StreamInEpochs) and stream.in_fit and not self.steps_per_epoch:
            begin = stream.steps_done
            before = backend_state()
            batches = iter(self._get_iterator())
            if begin:  # PyTorch's loaders draw a number when they begin; this one began long ago
                set_backend_state(before)
            for step in itertools.count(begin, self.steps_per_execution):
                if step > begin and not stream.goes_on():  # at an end of its own Keras warns, and notes a length
                    return
                yield step, step + self.steps_per_execution - 1, batches
        data: Any = getattr(self.data_adapter, "py_dataset", None)
        if not (hasattr(data, OURS) and data.in_fit) or self.steps_per_epoch:
            yield from plain(self)
            return
        done, self._num_batches = data.steps_done, len(data)
        drawn = backend_state() if done else None
        for begin, end, batches in plain(self):
            if drawn is not None:  # as above
                set_backend_state(drawn)
                drawn = None
            if begin < len(data) - done:
                yield begin + done, end + done, batches

    return enumerate_rest


def build_by_first_batch(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``BUILD``: before the callbacks of ``fit`` begin, a model has its variables, as on the other backends.

    They are made by tracing ``train_step`` for the first batch's shapes, but where steps are computed eagerly, which a
    trace may not follow, by Keras' own symbolic call if it can. No batch is read, and nothing is computed.
    """

    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if self in WITHOUT_BATCH and unbuilt_layers(self) and self._distribute_strategy is None:
            import tensorflow as tf

            shapes = iterator._distributed_dataset.element_spec
            if self.run_eagerly:
                with contextlib.suppress(Exception):  # it has no call(), say
                    self._symbolic_build(data_batch=shapes)
            if not (self.run_eagerly and self.built):
                step = tf.function(self._autoconvert_optionals(self.train_step), autograph=False)
                try:
                    step.get_concrete_function(shapes)
                except Exception as error:  # which leaves variables without values
                    error.add_note(
                        f"hvdkit traced train_step to build the model {self.name!r}; give it a keras.Input, or call it "
                        "on one batch before fit, and nothing is traced."
                    )
                    raise
                self.built = True  # but for layers that no step uses
        WITHOUT_BATCH.discard(self)
        plain(self, iterator=iterator, data_batch=data_batch)

    return build


def telling_steps(tell: Callable[[bool], None], plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``MAKE_STEP``: ``tell`` is given True where a step begins, and False where it ends."""

    def make_train_function(self: Any, force: bool = False) -> None:
        plain(self, force)
        step = self.train_function
        if hasattr(step, "hvdkit_tells"):
            return

        def told(data: Any) -> Any:
            tell(True)
            try:
                return step(data)
            finally:
                tell(False)

        told.hvdkit_tells = True  # type: ignore[attr-defined]
        self.train_function = told

    return make_train_function


def as_packed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``STANDARDIZE``."""

    def standardize(self: Any, batch: Any) -> Any:
        return batch if hasattr(self.py_dataset, OURS) else plain(self, batch)

    return standardize


def by_tf_data(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TF_DATASET``."""

    def get_tf_dataset(self: Any) -> Any:
        return self.py_dataset.tf_dataset() if hasattr(self.py_dataset, OURS) else plain(self)

    return get_tf_dataset


def saying_when_batches_come(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TF_ITERATOR``: what takes a batch passes a mark, beyond which nothing is read ahead."""

    def get_iterator(self: Any) -> Any:
        import tensorflow as tf

        batches = plain(self)
        if not listeners.MONITORS or not isinstance(batches, tf.data.Dataset):
            return batches

        def mark(*batch: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(_taken, [], tf.bool, name="hvdkit_taken")]):
                given = batch if isinstance(batches.element_spec, tuple) else batch[0]
                return tf.nest.map_structure(lambda one: tf.identity(one) if tf.is_tensor(one) else one, given)

        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return batches.map(mark).with_options(options)

    return get_iterator


def _taken() -> bool:
    listeners.taken()
    return True


# What is clipped before it is averaged, on jax -----------------------------------------------------------------------

_OF_OPTAX = ("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm")
_MARKING = "_hvdkit_marking"
_CLIPPED: dict[int, weakref.ref[Any]] = {}
"""By id: what JAX computes with takes no attributes and has no hash."""


def mark_clipped() -> None:
    """On jax, know what ``jnp.clip`` and optax's functions, if it has been imported, clip from now on.

    Nothing tells of a gradient that is being traced how it was made, and each rank would clip by its own norm.
    """
    import jax.numpy as jnp

    if not hasattr(jnp.clip, _MARKING):
        jnp.clip = _marking(jnp.clip)
    optax = sys.modules.get("optax")
    for name in _OF_OPTAX if optax is not None else ():
        if not hasattr(getattr(optax, name), _MARKING):
            setattr(optax, name, _marking_updates(getattr(optax, name)))


def _marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def clip(*args: Any, **kwargs: Any) -> Any:
        clipped = plain(*args, **kwargs)
        _remember(clipped)
        return clipped

    setattr(clip, _MARKING, True)
    return clip


def _marking_updates(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        transformation = plain(*args, **kwargs)

        def update(*given: Any, **options: Any) -> Any:
            updates, state = transformation.update(*given, **options)
            for one in keras.tree.flatten(updates):
                _remember(one)
            return updates, state

        return transformation._replace(update=update)

    setattr(make, _MARKING, True)
    return make


def is_clipped(gradient: Any) -> bool:
    """Whether a function that is marked has clipped it."""
    return id(gradient) in _CLIPPED


def _remember(clipped: Any) -> None:
    number = id(clipped)
    _CLIPPED[number] = weakref.ref(clipped, lambda _: _CLIPPED.pop(number, None))


check(keras.__version__)
atexit.register(undo)
