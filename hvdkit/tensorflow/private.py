"""What hvdkit uses of TensorFlow that is not its to promise: the only file of this binding that does.

What is used, why, and what serves without it:

- ``tf.clip_by_*`` replaced: gradients that a rank clips by its own norm, which no mean can mend, are an error where an
  optimizer averages them. Without: the optimizer's ``clipnorm=``, or a distributed tape.
- ``tf.GradientTape.gradient`` replaced: a loss of one number for each sample, which TensorFlow adds up, is one warning.
  Without: ``tf.reduce_mean`` of the loss.
- Names and outer graphs of graphs: Horovod takes a name once at a time, so that the turns of a loop average one after
  the other, and equal models of one function get names of their own. Without: eager steps.
- XLA's control flow: an error in place of XLA's own, which names no cause. Without: no ``jit_compile=True``.
- The eager context's seeds and the global generators: a resumed training draws what it would have drawn. Without: a
  ``tf.random.Generator`` in the model.
- ``_keras_mask``: a mean over what a mask leaves is none over samples. Without: a loss with ``reduction=None``.
- ``tf.data``'s data sets: one of hvdkit's own is a ``tf.data.Dataset``. Without: ``Dataset.from_generator``, slower.

``tests/parallel/test_tensorflow_private.py`` fails when one of them is no longer there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util, stateful_random_ops
from tensorflow.python.util import dispatch

from hvdkit.steps.gradients import CLIPPED

_CLIPPING = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
_DISPATCHED = getattr(dispatch, "_TYPE_BASED_DISPATCH_SIGNATURES", {})
"""Where ``tf.experimental.dispatch_for_api`` looks a function up; no public name leads there."""
_SUMMED = "_hvdkit_summed"
WARNED: list[tuple[int | None, ...]] = []
"""The shape of the loss that this process has been warned of."""


def mark() -> None:
    """Mark from now on what TensorFlow's functions clip, and what tapes take of several numbers."""
    if not hasattr(tf.GradientTape.gradient, _SUMMED):
        tf.GradientTape.gradient = _marking_sums(tf.GradientTape.gradient)
    for name in _CLIPPING:
        plain = getattr(tf, name)
        if not hasattr(plain, CLIPPED):
            marking = _marking_clipped(plain)
            if plain in _DISPATCHED:
                _DISPATCHED[marking] = _DISPATCHED[plain]
            setattr(tf, name, marking)


def _marking_clipped(plain: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(plain)
    def clip(*args: Any, **kwargs: Any) -> Any:
        clipped = plain(*args, **kwargs)
        gradients = clipped[0] if isinstance(clipped, tuple) else [clipped]  # beside them the norm, as it was given
        for one in gradients:
            if isinstance(one, (tf.Tensor, tf.IndexedSlices)):
                setattr(one, CLIPPED, True)
        return clipped

    setattr(clip, CLIPPED, False)
    return clip


def _marking_sums(plain: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(plain)
    def gradient(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        gradients = plain(tape, target, sources, output_gradients, *args, **kwargs)
        shape = _summed(target) if output_gradients is None else None
        for one in tf.nest.flatten(gradients) if shape is not None else ():
            if isinstance(one, tf.Tensor):
                setattr(one, _SUMMED, shape)
        return gradients

    setattr(gradient, _SUMMED, None)
    return gradient


def _summed(target: Any) -> Any:
    """The shape of a target's first tensor of several numbers; None where each is one."""
    shapes = [one.shape for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    return next((tuple(one) for one in shapes if one.rank and one.num_elements() != 1), None)


def warn_of_gradients(gradients: Sequence[Any], ranks: int) -> None:
    """Say once that gradients which are about to be averaged are of such a loss."""
    for one in gradients:
        _warn(getattr(one, _SUMMED, None), ranks)


def warn_of_target(target: Any, ranks: int) -> None:
    """The same of what a distributed tape is given."""
    _warn(_summed(target), ranks)


def _warn(shape: tuple[int | None, ...] | None, ranks: int) -> None:
    if shape is None or ranks == 1 or WARNED:
        return
    WARNED.append(shape)
    warnings.warn(
        f"a tape was given a loss of shape {shape}, whose numbers TensorFlow adds up: where they are one for each "
        f"sample, a step of {ranks} ranks, which averages, is 1/{ranks} of one process's on all their samples; give "
        "it their mean (tf.reduce_mean), or distribute op='sum'.",
        stacklevel=4,
    )


# Graphs ---------------------------------------------------------------------------------------------------------------


def is_compiled_by_xla() -> bool:
    """Whether operations that are made now are compiled, all of them: TensorFlow's own test for ``jit_compile``."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_in_loop() -> bool:
    """Whether operations that are made now are of a loop's body, which graphs tell by its name alone."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and not getattr(graph, "name", "").startswith("while_body"):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def outermost_graph() -> Any:
    """The graph of the ``tf.function`` that is traced, whatever branch or loop of it is."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


# Random numbers -------------------------------------------------------------------------------------------------------


def eager_seeds() -> tuple[Any, ...] | None:
    """What gives the eager ``tf.random`` operations their seeds, a state of ``random.Random``; None until one is set.

    Without it eager dropout of a resumed training would begin anew.
    """
    context.ensure_initialized()
    return context.context()._rng.getstate() if hasattr(context.context(), "_rng") else None


def set_eager_seeds(state: tuple[Any, ...]) -> None:
    """Go on from what ``eager_seeds`` returned."""
    if not hasattr(context.context(), "_rng"):
        tf.random.set_seed(0)
    context.context()._rng.setstate(state)


def global_generator() -> Any:
    """TensorFlow's, or None where there is none yet: asked by its public name, it makes one and draws a seed."""
    return stateful_random_ops.global_generator


# Models and data ------------------------------------------------------------------------------------------------------


def has_mask(output: Any) -> bool:
    """Whether Keras hands a mask on with an output, which its losses read from there."""
    return any(hasattr(part, "_keras_mask") for part in tf.nest.flatten(output))


class DatasetOver(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """A ``tf.data.Dataset`` of hvdkit's own that gives what a pipeline gives; there is no public way to be one."""

    def __init__(self, pipeline: tf.data.Dataset) -> None:
        super().__init__(pipeline, pipeline._variant_tensor)
