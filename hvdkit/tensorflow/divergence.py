"""Do the ranks still hold the same variables? Looked at now and then where gradients are averaged."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.steps import agreement, divergence
from hvdkit.steps.launchers import is_elastic
from hvdkit.tensorflow import private
from hvdkit.tensorflow.state import native
from hvdkit.tf_shared.keras_layers import plain_path

_FIRST = 8
"""Of the exchanges that are compared: Horovod's recipes broadcast after a step, which may exchange more than once."""
_IN_GRAPHS = 4
"""So many variables, the largest, are looked at in ``tf.function``, where each costs every step some microseconds."""
_COUNTERS: dict[tuple[int, int, int], Counter] = {}
"""By the first variable, the number of them, and the ranks that exchange."""
_NUMBERS = itertools.count()
_ROUNDINGS = {tf.float64: 2**-52, tf.float32: 2**-23, tf.float16: 2**-10, tf.bfloat16: 2**-7}


class Counter:
    """Exchanges of some variables' gradients: eager ones, and those of ``tf.function``, where Python takes 0.1 ms."""

    def __init__(self) -> None:
        self._name = f"hvdkit_exchanges_{next(_NUMBERS)}"
        self.forget()

    def forget(self) -> None:
        """Begin to count."""
        self._eager = 0
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=self._in_graphs(), value=tf.constant(0, tf.int64))

    def count(self) -> Any:
        """Which exchange this is, from 1 on: a number, in ``tf.function`` a tensor."""
        if tf.executing_eagerly():
            self._eager += 1
            return self._eager
        with tf.device("CPU:0"):
            mine = self._in_graphs()
            tf.raw_ops.AssignAddVariableOp(resource=mine, value=tf.constant(1, tf.int64))
            return tf.raw_ops.ReadVariableOp(resource=mine, dtype=tf.int64)

    def total(self) -> int:
        """How many there were; outside of graphs."""
        return self._eager + self.in_graphs()

    def _in_graphs(self) -> Any:
        # One handle a graph: by it TensorFlow counts in the order of the program, which is the same on every rank.
        if tf.executing_eagerly():
            return self._handle()
        graph: Any = tf.compat.v1.get_default_graph()
        held = getattr(graph, "_hvdkit_counters", {})
        if self._name not in held:
            graph._hvdkit_counters = {**held, self._name: self._handle()}
        return graph._hvdkit_counters[self._name]

    def in_graphs(self) -> int:
        """How many were counted in ``tf.function`` so far; also in a second thread."""
        with tf.init_scope(), tf.device("CPU:0"):
            return int(tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=tf.int64))

    def _handle(self) -> Any:
        # Found by its name: a tf.Variable that no model holds would keep a function from being exported.
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=self._name)


_BEGUN_AND_ENDED: list[Counter] = []
"""Allreduces begun and ended in graphs, where Python does not run; made with the first, since it starts TensorFlow."""


def _counts_in_graphs() -> tuple[int, int]:
    if not _BEGUN_AND_ENDED:
        return 0, 0
    begun, ended = _BEGUN_AND_ENDED
    return begun.in_graphs(), ended.in_graphs()


COUNTS.in_graphs(_counts_in_graphs)


@contextlib.contextmanager
def counted_in_graph(process_set: Any) -> Iterator[Callable[[Any], None]]:
    """In here gradients are averaged in ``tf.function``; what is yielded takes them, once."""
    if process_set.process_set_id != 0:
        yield lambda _: None
        return

    if not _BEGUN_AND_ENDED:
        _BEGUN_AND_ENDED.extend((Counter(), Counter()))
    begun, ended = _BEGUN_AND_ENDED

    def received(results: Any) -> None:
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            ended.count()

    with tf.control_dependencies([begun.count()]):
        yield received


def forget() -> None:
    """Ranks have joined, or Horovod has started anew with others: all begin to count."""
    for counter in _COUNTERS.values():
        counter.forget()


def _and_forget(plain: Callable[[], Any]) -> Callable[[], Any]:
    def join() -> Any:
        last = plain()
        forget()
        return last

    return join


hvd.join = _and_forget(hvd.join)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it takes seconds, to no end
def look(variables: Iterable[Any], process_set: Any, exchanged: Callable[[], Sequence[str]]) -> Any:
    """Called with every exchange of the variables' gradients, before it; a collective at the 1st, 8th, 16th and so on.

    Args:
        variables: whose gradients are exchanged; what is no variable of floating type is left out.
        process_set: Horovod's set of ranks that exchange.
        exchanged: says what this rank is about to exchange; ranks that say something else would wait for each other.
    Returns:
        None; in ``tf.function`` a tensor that is there when the ranks have compared.
    Raises:
        AgreementError: on every rank: they exchange different gradients, or their variables differ. In
            ``tf.function`` TensorFlow raises an error of its own with these words.
    """
    sources = [native(one) for one in variables]
    graph = not tf.executing_eagerly()
    grows = graph and is_elastic()
    if not sources or not process_set.included() or (process_set.size() < 2 and not grows):
        return None
    counter = _counter(sources[0], len(sources), process_set)
    exchange = None if graph else counter.count()
    if not graph and not _is_due(exchange):
        return None
    named = [(plain_path(one), one) for one in sources if isinstance(one, tf.Variable) and one.dtype.is_floating]
    if graph:
        named = sorted(named, key=lambda pair: -(pair[1].shape.num_elements() or 0))[:_IN_GRAPHS]
    if not named:
        return None
    names, ours = zip(*named, strict=True)
    ranks = process_set.process_set_id
    call = f"hvdkit.parameters.{ranks}.{agreement.digest(np.array(names)) & 0xFFFFFFFF:08x}"
    if not graph:
        if exchange == 1:
            _compare_exchanged(exchanged(), exchange, process_set, f"hvdkit.exchanged.{ranks}")
        else:
            _compare(ours, names, exchange, process_set, call)
        return None
    gradients, first_call, call = exchanged(), _among_equals(f"hvdkit.exchanged.{ranks}"), _among_equals(call)

    def compare() -> Any:
        return tf.cond(
            exchange == 1,
            lambda: _compare_exchanged(gradients, exchange, process_set, first_call),
            lambda: _compare(ours, names, exchange, process_set, call),
        )

    with tf.control_dependencies([ours[0].value()]):  # after the step before, where a function takes several
        exchange = counter.count()
    return tf.cond(_is_due(exchange), compare, lambda: False)


def _is_due(exchange: Any) -> Any:
    return divergence.is_due(exchange) & ((exchange >= _FIRST) | (exchange == 1))


def _among_equals(call: str) -> str:
    """Models of the same layers in one function may compare at once, and Horovod tells them apart by name alone."""
    graph = private.outermost_graph()
    graph._hvdkit_calls = [*getattr(graph, "_hvdkit_calls", []), call]
    return f"{call}.{graph._hvdkit_calls.count(call)}"


def _counter(first: Any, number: int, process_set: Any) -> Counter:
    # Ranks outside a process set count for themselves what they exchange of the same variables.
    key = id(first), number, process_set.process_set_id
    if key not in _COUNTERS:
        _COUNTERS[key] = Counter()
        weakref.finalize(first, _COUNTERS.pop, key, None)
    return _COUNTERS[key]


def _compare(ours: Sequence[tf.Variable], names: Sequence[str], exchange: Any, process_set: Any, call: str) -> Any:
    mine = tf.reshape([number for one in ours for number in _fingerprint(one)], [-1])
    sent = tf.concat([tf.ones(3, tf.float64), mine, mine**2], 0)
    roundings = [_ROUNDINGS.get(one.dtype, 1.0) for one in ours]

    def check(seen: Any, exchanges: Any) -> Any:  # TensorFlow keeps it, and what it holds, forever
        divergence.raise_if_diverged(np.asarray(seen), names, roundings, int(exchanges))
        return np.True_

    return _compared(check, sent, exchange, process_set, call)


def _compare_exchanged(gradients: Sequence[str], exchange: Any, process_set: Any, call: str) -> Any:
    """As of ``_compare``, at the first exchange."""
    mark = float(agreement.digest(np.array(gradients)) & 0xFFFFF)

    def check(seen: Any, _: Any) -> Any:
        divergence.require_same_exchange(np.asarray(seen), gradients)
        return np.True_

    # A constant would be reduced where TensorFlow optimizes the graph, also of a rank that traces it anew alone.
    sent = tf.cast(exchange, tf.float64) * tf.constant([1.0, mark, mark**2], tf.float64)
    return _compared(check, sent, exchange, process_set, call)


def _compared(check: Callable[[Any, Any], Any], sent: Any, exchange: Any, process_set: Any, call: str) -> Any:
    # Without the scopes of the graph around it, which may be another on another rank.
    whole = hvd.allreduce(sent, op=hvd.Sum, name=call, process_set=process_set, ignore_name_scope=True)
    return check(whole, exchange) if tf.executing_eagerly() else tf.numpy_function(check, [whole, exchange], tf.bool)


def _fingerprint(variable: tf.Variable) -> tuple[Any, Any]:
    """Of a variable its norm, and a sum of that size, float64 () each."""
    value = variable.value()
    wide = value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)
    size = tf.cast(tf.maximum(tf.size(wide), 1), tf.float64)
    norm = tf.sqrt(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64))
    return norm, tf.cast(tf.reduce_sum(wide), tf.float64) / tf.sqrt(size)
