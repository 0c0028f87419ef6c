"""How the ranks' gradients become one in TensorFlow; the inside of ``hvdkit.tensorflow.distribute``.

What happens to gradients is needed in every step, eagerly and in graphs, and shares nothing with names, checkpoints
and data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.core import compression, listeners
from hvdkit.core.communicator import OverHorovod
from hvdkit.core.layout import NO_FLAGS, ControlWord, Flags, is_held, read_flags
from hvdkit.errors import InvalidArgumentError, whole
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.steps import agreement, passes
from hvdkit.steps.gradients import BFLOAT16_RANKS, GradientOptions, obstacle_of_type, refuse_clipped
from hvdkit.tensorflow import private
from hvdkit.tensorflow.divergence import Counter, counted_in_graph, look
from hvdkit.tensorflow.state import native
from hvdkit.tf_shared.keras_layers import plain_path
from hvdkit.tf_shared.tf_ranks import IN_ANY_GRAPH

_OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
_SENT = (tf.float16, tf.float32, tf.float64)  # what every Horovod adds up
_WIDE = _SENT[1:]  # what compression="auto" makes shorter
_DONE = "_hvdkit_reduced"
SHOWN: dict[str, str] = {}
"""What is said of a gradient to those who look on, by place and name, and what is shown of it."""
ROWS: dict[str, Any] = {}
"""The type of the indices of the gradients that this rank has had as ``tf.IndexedSlices``."""
TRIALS: dict[Any, GraphTrial] = {}
"""By the name of some gradients, how they are reduced and their shapes; eagerly and in every graph."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced; one value for all steps of a training, so that nothing is traced twice.

    Attributes:
        options: op, compression and predivide factor.
        groups: number of groups that are reduced together, >= 1. One group is sent when the last gradient is ready,
            and adds up in the same order in every run; more groups travel while others are still computed.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense tensors.
        process_set: Horovod's set of ranks to reduce over.
    Raises:
        InvalidArgumentError: groups < 1, ranks that Horovod does not know, or over which Adasum cannot work.
    """

    options: GradientOptions
    groups: int
    sparse_as_dense: bool
    process_set: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", whole("groups", self.groups, 1))
        if self.process_set.included() is None or self.process_set.process_set_id is None:
            raise InvalidArgumentError("Horovod does not know these ranks yet; call init() before distribute().")
        self.options.require_possible(
            self.process_set.size(),
            all_ranks=self.process_set.process_set_id == 0,
            over_mpi=hvd.mpi_enabled(),
            adds_bfloat16=self.process_set.size() <= BFLOAT16_RANKS and _adds_bfloat16(),
        )


class DistributedTape:
    """A ``tf.GradientTape`` whose ``gradient`` is reduced over the ranks; everything else is the tape's own."""

    def __init__(self, tape: tf.GradientTape, reduction: Reduction) -> None:
        self._local_tape = tape
        self._reduction = reduction

    def __enter__(self) -> DistributedTape:
        self._local_tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._local_tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local_tape, name)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it takes seconds, to no end
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """``tf.GradientTape.gradient``, then reduced over the ranks; None where no rank's target depends on a source.

        Every rank must ask for the same sources. Eagerly, a rank whose target does not depend on a source counts as
        zeros where another rank's does. A rank knows that a gradient is ``tf.IndexedSlices`` after its own first one;
        with ``sparse_as_dense`` it need not. In ``tf.function``, and with Adasum, a source must be connected on all
        ranks or on none.

        Raises:
            InvalidArgumentError: a source that is no variable, or a gradient that cannot be reduced.
            AgreementError: (eagerly; in ``tf.function`` an error of TensorFlow's) the ranks' variables differ.
        """
        if self._reduction.options.op == "average" and output_gradients is None:
            private.warn_of_target(target, self._reduction.process_set.size())
        flat = tf.nest.flatten(sources)
        _require_variables(flat)
        # TensorFlow makes zeros for an unconnected tf.Variable, but not for a Keras 3 variable.
        local = self._local_tape.gradient(target, [*map(native, flat)], output_gradients, unconnected_gradients)
        names = [_source_name(source) for source in flat]
        with tf.control_dependencies(_looked(flat, local, self._reduction)):
            reduced = reduce_gradients(local, flat, names, self._reduction)
        for gradient in reduced:
            if gradient is not None:
                setattr(gradient, _DONE, True)
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *_: Any, **__: Any) -> Any:
        """Refused: it would be this rank's alone.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "a distributed tape averages what gradient() returns, and a jacobian would be this rank's alone; take it "
            "with a tf.GradientTape that is not distributed, and distribute the optimizer or average what you make of "
            "it (hvd.allreduce)."
        )

    batch_jacobian = jacobian


def _source_name(source: Any) -> str:
    return f"{plain_path(source)} {source.shape}"  # of a tf.Variable the shape may be unknown


def _require_variables(sources: Sequence[Any]) -> None:
    for source in sources:
        if not hasattr(source, "assign"):
            raise InvalidArgumentError(
                f"a distributed tape averages over the ranks, and got a tensor of shape {source.shape} as source, of "
                "which each rank has another (an input, an activation); take its gradient with a tf.GradientTape that "
                "is not distributed, or make what is trained a tf.Variable."
            )


def _looked(variables: Sequence[Any], gradients: Sequence[Any], reduction: Reduction) -> list[Any]:
    """``divergence.look``; in ``tf.function`` what is to end before the gradients are exchanged."""

    def exchanged() -> list[str]:
        taking = _taking(gradients, variables, reduction)
        rows = [not reduction.sparse_as_dense and isinstance(gradients[at], tf.IndexedSlices) for at in taking]
        return [f"{_source_name(variables[at])}{' in rows' * sparse}" for at, sparse in zip(taking, rows, strict=True)]

    looked = look(variables, reduction.process_set, exchanged)
    return [] if looked is None else [looked]


def reduce_once(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction) -> list[Any]:
    """Reduce the gradients that an optimizer is about to apply.

    Raises:
        InvalidArgumentError: a distributed tape has reduced them already, one was clipped, or cannot be reduced.
    """
    failure = None
    try:
        if reduction.process_set.included() and reduction.process_set.size() > 1:
            refuse_clipped(gradients, also=", or distribute the tape and clip what its gradient() returns,")
            if reduction.options.op == "average":
                private.warn_of_gradients(gradients, reduction.process_set.size())
        if any(getattr(gradient, _DONE, False) for gradient in gradients):
            raise InvalidArgumentError(
                "a distributed tape has averaged these gradients already; distribute the tape or the optimizer, not "
                "both."
            )
    except InvalidArgumentError as error:
        failure = error
    return reduce_gradients(gradients, variables, ["optimizer"] * len(gradients), reduction, failure)


def look_and_reduce_once(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction) -> list[Any]:
    """``reduce_once``, and ``divergence.look`` before it."""
    known = all(one is not None for one in variables)  # where Keras has as many variables as gradients
    with tf.control_dependencies(_looked(variables, gradients, reduction) if known else []):
        return reduce_once(gradients, variables, reduction)


def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    names: Sequence[str],
    reduction: Reduction,
    failure: InvalidArgumentError | None = None,
) -> list[Any]:
    """The ranks' gradients combined; None stays None where no rank has a gradient.

    Eagerly the group is the same whatever is None here: zeros go in its place, and a control word
    (``hvdkit.core.layout``) says so, and whether this rank failed. A graph is traced once for all steps, so what is
    None in it is left out, as it must be on every rank.

    Args:
        gradients: ``tf.Tensor``, ``tf.IndexedSlices`` or None each; of the same variables on every rank, in the same
            order.
        variables: what each is the gradient of; read where that is None.
        names: one for each; with the order they make the name under which the ranks find each other, so that ranks
            that trace or run other things in between cannot mix up gradients.
        failure: why this rank's gradients are not to be reduced.
    Raises:
        InvalidArgumentError: ``failure``, or a gradient that cannot be reduced.
        AgreementError: (eagerly) that is so on another rank.
    """
    eager, fills = tf.executing_eagerly(), _fills(reduction)
    if not eager and private.is_compiled_by_xla():
        raise InvalidArgumentError(
            "gradients are averaged in a function with jit_compile=True, and Horovod has no XLA operations; leave it "
            "out there; a function of the forward pass alone may keep it."
        )
    taking = _taking(gradients, variables, reduction)
    steps().count()
    if not taking or not reduction.process_set.included():
        return list(gradients)
    taken = [names[position] for position in taking]
    readable = re.sub(r"[^A-Za-z0-9.]+", ".", taken[0].split(" ")[0])
    group = f"hvdkit.gradients.{readable}.{agreement.digest(np.array(taken)) & 0xFFFFFFFF:08x}"
    tensors = []
    for number, position in enumerate(taking):
        try:
            if gradients[position] is None:
                tensors.append(_zeros(variables[position], f"{group}.{number}"))
            elif failure is None:
                tensors.append(_reducible(gradients[position], names[position], reduction))
        except InvalidArgumentError as error:
            failure = error
    if failure is not None:
        if not fills or any(variables[position] is None for position in taking):
            raise failure
        tensors = [
            _zeros(variables[position], f"{group}.{number}")
            if gradients[position] is None
            else _nothing_of(gradients[position], variables[position], reduction)
            for number, position in enumerate(taking)
        ]
    say_ready(tensors, taken)
    absent = [number for number, position in enumerate(taking) if gradients[position] is None]
    results = list(gradients)
    if not eager:
        with counted_in_graph(reduction.process_set) as ended:
            received, _ = _reduce(tensors, group, reduction, None)
            ended(received)
    else:
        # An argument even where it is as ever: TensorFlow would exchange a constant in the first call only.
        word = tf.constant(_control_word(len(taking), absent, failure)) if fills else None
        with COUNTS.allreduce([reduction.process_set]):
            received, heard = _function(group, reduction)(tensors, word)
        if word is not None and (numbers := heard.numpy())[0] > 0:
            if read_flags(numbers).failed:
                OverHorovod(hvd, tf.constant, reduction.process_set).raise_together(failure)
            received = [one if is_held(numbers, number) else None for number, one in enumerate(received)]
    for position, reduced in zip(taking, received, strict=True):
        results[position] = reduced
    return results


def _control_word(gradients: int, absent: Sequence[int], failure: Exception | None) -> Any:
    """What this rank says beside its gradients, float32 (n,)."""
    control = ControlWord(gradients)
    if absent or failure is not None:
        word = control.usual.copy()
        control.write(word, NO_FLAGS if failure is None else Flags(failed=1.0), absent)
        return word
    return control.usual


def _nothing_of(gradient: Any, variable: Any, reduction: Reduction) -> Any:
    """What a rank that fails sends in the place of a gradient, so that the others do not wait for it."""
    variable = native(variable)
    if isinstance(gradient, tf.IndexedSlices) and not reduction.sparse_as_dense:
        rows = tf.zeros([0, *variable.shape[1:]], variable.dtype)
        return tf.IndexedSlices(rows, tf.zeros([0], gradient.indices.dtype), tf.shape(variable))
    return tf.zeros_like(variable)


@lru_cache(maxsize=1)
def steps() -> Counter:
    """Counts how often gradients were combined, each time for a step."""
    return Counter()


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def expect_steps() -> None:
    """Have ``passes`` look at ``steps``."""
    passes.expect_steps(steps().total)


def _fills(reduction: Reduction) -> bool:
    """Whether zeros go in the place of a gradient that is None here."""
    return tf.executing_eagerly() and reduction.options.op != "adasum"


def _taking(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction) -> list[int]:
    """The places of the gradients that are exchanged."""
    fills = _fills(reduction)
    return [
        position
        for position, gradient in enumerate(gradients)
        if gradient is not None or (fills and _is_floating(variables[position]))
    ]


def _is_floating(variable: Any) -> bool:
    return variable is not None and bool(tf.as_dtype(native(variable).dtype).is_floating)


def _zeros(variable: Any, name: str) -> Any:
    """What stands in for a gradient that this rank lacks: no rows where it has met ``tf.IndexedSlices`` before."""
    variable = native(variable)
    if name not in ROWS:
        return tf.zeros_like(variable)
    rows = tf.zeros([0, *variable.shape[1:]], variable.dtype)
    return tf.IndexedSlices(rows, tf.zeros([0], ROWS[name]), tf.shape(variable))


def say_ready(gradients: Sequence[Any], names: Sequence[str]) -> None:
    """Have those who look on told when these gradients are there, and which are not finite; nothing where nobody does.

    In a function an operation of its own says so, for which no other one waits: what is measured stays as it is.
    """
    if not listeners.wanted():
        return
    values = [tf.nest.flatten(gradient, expand_composites=True)[0] for gradient in gradients]
    keys = [name if name.partition(" ")[0] not in ("optimizer", "tensor") else str(n) for n, name in enumerate(names)]
    SHOWN.update((key, f"parameter {key}" if key.isdecimal() else key.partition(" ")[0]) for key in keys)
    norms = []
    if listeners.MONITORS:
        wide = [one if one.dtype in (tf.float32, tf.float64) else tf.cast(one, tf.float32) for one in values]
        norms = [tf.stack([tf.cast(tf.nn.l2_loss(one), tf.float64) for one in wide])]

    def say(*found: Any) -> None:
        listeners.ready()
        for place in np.flatnonzero(~np.isfinite(found[0])) if found else ():
            listeners.looked(keys[place], float("nan"))

    if tf.executing_eagerly():
        say(*(one.numpy() for one in norms))
        return
    with tf.control_dependencies(values):
        tf.numpy_function(say, norms, [], name="hvdkit_ready")


def _reducible(gradient: Any, name: str, reduction: Reduction) -> Any:
    if isinstance(native(gradient), tf.Variable):  # in which gradients were accumulated
        gradient = tf.convert_to_tensor(native(gradient))
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        raise InvalidArgumentError(
            f"the gradient of {name} must be a tensor or IndexedSlices, got {type(gradient).__name__}."
        )
    if not gradient.dtype.is_floating:
        raise InvalidArgumentError(f"the gradient of {name} must be floating point, got {gradient.dtype.name}.")
    if obstacle := obstacle_of_type(gradient.dtype.name):
        raise InvalidArgumentError(f"the gradient of {name} cannot travel: {obstacle}")
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if reduction.sparse_as_dense:
        return tf.convert_to_tensor(gradient)
    if reduction.options.op == "adasum":
        raise InvalidArgumentError(f"the gradient of {name} is sparse; op='adasum' needs sparse_as_dense=True.")
    return gradient


@lru_cache(maxsize=1024)
def _function(name: str, reduction: Reduction) -> Callable[[list[Any], Any], tuple[list[Any], Any]]:
    """``_reduce`` as a ``tf.function``, the same one in every step."""
    function: Callable[[list[Any], Any], tuple[list[Any], Any]] = tf.function(
        lambda tensors, word: _reduce(tensors, name, reduction, word), autograph=False, reduce_retracing=True
    )
    return function


def _reduce(tensors: Sequence[Any], name: str, reduction: Reduction, word: Any) -> tuple[list[Any], Any]:
    """What the ranks' tensors become, and the word.

    Args:
        word: this rank's control word, which goes with the first group that is not packed; None: nobody asks.
    """
    results, heard, packs = list(tensors), None, reduction.options.compression == "int8"
    turn = _turn(tensors, name, reduction) if reduction.options.compression == "auto" else None
    dense: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[position] = _reduce_slices(tensor, f"{name}.{position}", reduction)
        else:
            dense.setdefault(_sent_as(tensor.dtype, reduction), []).append(position)
    for sent_as, positions in dense.items():  # one operation takes one type
        parts = np.array_split(positions, max(1, min(reduction.groups, len(positions))))
        for number, part in enumerate(parts):
            sent = [tf.cast(tensors[position], sent_as) for position in part]
            carries_word = word is not None and heard is None and not packs
            if carries_word:
                sent.append(tf.cast(word, sent_as))
            call = f"{name}.{sent_as.name}.{number}"
            if turn is not None and sent_as in _WIDE:
                received = _as_tried(turn, sent, call, reduction, has_word=carries_word)
            else:
                received = (_packed if packs else _allreduce)(sent, call, reduction)
            if carries_word:
                heard = received.pop()
            for position, tensor in zip(part, received, strict=True):
                results[position] = tf.cast(tensor, tensors[position].dtype)
    if word is not None and heard is None:
        (heard,) = _allreduce([word], f"{name}.word", reduction)
    _end_with_this_turn(results)
    return results, heard


def _kinds(reduction: Reduction) -> tuple[str, ...]:
    return compression.kinds_of(bfloat16=reduction.process_set.size() <= BFLOAT16_RANKS and _adds_bfloat16())


class GraphTrial(compression.CompressionTrial):
    """Tells graphs what was chosen, so that they ask Python no more.

    Args:
        kinds: see ``CompressionTrial``.
    Attributes:
        chosen: int32 (), its place among the kinds; -1 until it is over.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self.chosen = tf.Variable(-1, trainable=False)
        super().__init__(kinds)

    def start(self) -> None:
        super().start()
        with tf.init_scope():
            self.chosen.assign(-1)


def _turn(tensors: Sequence[Any], name: str, reduction: Reduction) -> Any:
    """The place among ``_kinds`` of how gradients travel in this step, int32 ()."""
    kinds, ranks = _kinds(reduction), OverHorovod(hvd, tf.constant, reduction.process_set)
    key = name, reduction, *(str(one.shape) for one in tensors)
    if key not in TRIALS:
        TRIALS[key] = GraphTrial(kinds)
    trial = TRIALS[key]

    def turn() -> Any:
        decided, place = trial.turn(ranks), kinds.index(trial.kind)
        if decided:
            trial.chosen.assign(place)
        if decided and trial.kind != "int8":
            compression.drop(f"{name}.")
        return np.int32(place)

    def asked() -> Any:
        return tf.ensure_shape(tf.numpy_function(turn, [], tf.int32, name="hvdkit_turn"), [])

    waits = list(tensors) if reduction.groups == 1 else []  # of several groups the first ones leave before the last
    with tf.control_dependencies(tf.nest.flatten(waits, expand_composites=True)):
        chosen = trial.chosen.read_value()
        return tf.cond(chosen < 0, asked, lambda: chosen)


def _as_tried(turn: Any, tensors: list[Any], name: str, reduction: Reduction, *, has_word: bool) -> list[Any]:
    """As ``_allreduce``, in the way whose turn it is.

    Args:
        has_word: whether the last tensor is the control word, which is never packed.
    """

    def as_bfloat16() -> list[Any]:
        received = _allreduce([tf.cast(one, tf.bfloat16) for one in tensors], f"{name}.bf16", reduction)
        return [tf.cast(one, tensors[0].dtype) for one in received]

    def as_int8() -> list[Any]:
        own, words = (tensors[:-1], tensors[-1:]) if has_word else (tensors, [])
        received = _packed([tf.cast(one, tf.float32) for one in own], name, reduction)
        heard = _allreduce(words, f"{name}.word", reduction) if words else []
        return [*(tf.cast(one, tensors[0].dtype) for one in received), *heard]

    ways = {"none": lambda: _allreduce(tensors, name, reduction), "bf16": as_bfloat16, "int8": as_int8}
    received = tf.switch_case(turn, [ways[kind] for kind in _kinds(reduction)], name=f"{name}.ways")
    for one, tensor in zip(received, tensors, strict=True):
        one.set_shape(tensor.shape)
    return list(received)


def _sent_as(dtype: Any, reduction: Reduction) -> Any:
    wanted = reduction.options.compression
    if wanted in ("fp16", "int8"):  # what is packed is so on the host, from float32
        return tf.float16 if wanted == "fp16" else tf.float32
    if wanted == "bf16" and dtype in _WIDE:
        return tf.bfloat16
    if dtype == tf.bfloat16 and reduction.process_set.size() <= BFLOAT16_RANKS and _adds_bfloat16():
        return dtype
    return dtype if dtype in _SENT else tf.float32


@cache
def _adds_bfloat16() -> bool:
    """Whether Horovod's operations take it: ``hvdkit install`` builds it in, and one of ``--plain`` refuses it.

    Asked in a graph that never runs.
    """
    with tf.Graph().as_default():
        try:
            hvd.allreduce(tf.zeros(1, tf.bfloat16), op=hvd.Sum, name="hvdkit.bfloat16")
        except TypeError:
            return False
    return True


def _allreduce(tensors: list[Any], name: str, reduction: Reduction) -> list[Any]:
    factor = reduction.options.gradient_predivide_factor
    options = {
        "op": _OPS[reduction.options.op],
        "process_set": reduction.process_set,
        "prescale_factor": 1.0 / factor,
        "postscale_factor": factor,
        **IN_ANY_GRAPH,
    }
    if reduction.options.op == "adasum":  # Horovod's grouped form of it fails
        return [hvd.allreduce(tensor, name=f"{name}.{number}", **options) for number, tensor in enumerate(tensors)]
    return list(hvd.grouped_allreduce(tensors, name=name, **options))


def _packed(tensors: list[Any], name: str, reduction: Reduction) -> list[Any]:
    """As ``_allreduce``, in 8 bits; packed and added up on the host."""
    among: dict[str, Any] = {"process_set": reduction.process_set, **IN_ANY_GRAPH}
    ranks = OverHorovod(hvd, tf.constant, reduction.process_set)
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)

    def packing(length: int) -> compression.Packing:
        saves = reduction.process_set.process_set_id == 0
        return compression.packing_of("int8", name, length, ranks, saves=saves)

    def add_up(received: Any, length: Any) -> Any:
        factor = 1 / ranks.size() if reduction.options.op == "average" else 1.0
        return packing(int(length)).add_up(received, factor)[None]

    def unpack(gathered: Any, length: Any) -> Any:
        values = np.empty(int(length), np.float32)
        packing(len(values)).unpack(gathered, values)
        return values

    length = tf.size(flat)
    rows = tf.numpy_function(lambda values: packing(len(values)).pack(values), [flat], tf.uint8)
    received = hvd.alltoall(tf.ensure_shape(rows, [None, None]), name=f"{name}.parts", **among)
    mine = tf.ensure_shape(tf.numpy_function(add_up, [received, length], tf.uint8), [1, None])
    gathered = hvd.allgather(mine, name=f"{name}.mean", **among)
    values = tf.ensure_shape(tf.numpy_function(unpack, [gathered, length], tf.float32), flat.shape)
    parts = tf.split(values, tf.stack([tf.size(tensor) for tensor in tensors]), num=len(tensors))
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]


def _end_with_this_turn(reduced: Sequence[Any]) -> None:
    """Have a loop of a graph reduce turn by turn: Horovod takes a name once at a time.

    Turns run beside one another where none depends on the one before (accumulation), but each operation with a side
    effect ends before the next turn begins, and what it waits for.
    """
    if private.is_in_loop():
        with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
            tf.timestamp()


def _reduce_slices(slices: tf.IndexedSlices, name: str, reduction: Reduction) -> tf.IndexedSlices:
    """All ranks' rows, each index once: adaptive optimizers square every row, so repeats must be added before."""
    ROWS[name] = slices.indices.dtype
    ranks = {"process_set": reduction.process_set, **IN_ANY_GRAPH}
    sent = tf.cast(slices.values, _sent_as(slices.dtype, reduction))
    values = tf.cast(hvd.allgather(sent, name=f"{name}.values", **ranks), slices.dtype)
    indices = hvd.allgather(slices.indices, name=f"{name}.indices", **ranks)
    if reduction.options.op == "average":
        values /= tf.cast(hvd.size_op(reduction.process_set.process_set_id), slices.dtype)
    with tf.device("/CPU:0"):  # a GPU adds in any order, and the ranks would end a bit apart
        rows, places = tf.unique(indices)
        summed = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(summed, rows, slices.dense_shape)
