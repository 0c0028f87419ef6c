"""The steps of a script as it is, for ``hvdkit launch --explain-job`` and ``--monitor``: seen from what it calls.

For ``--explain-job`` that is its loader, its optimizer or ``fit``; a monitor takes PyTorch's optimizer alone from here:
loops over a validation set are none of its steps. Loaded by path at the start of a rank's Python
(``observe/startup``), which calls a function here when a framework has been imported. Where hvdkit cannot be
imported, nothing is recorded. A script that records its steps itself (``record_steps``, ``RecordSteps``) goes first:
then nothing that is seen here counts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

VARIABLE = "HVDKIT_MARK_STEPS"
"""Asks for all this: the file for Horovod's timeline of some steps, or 1 where there is to be none."""
_TIMELINE_STEPS = (20, 70)
"""Steps after which the timeline begins and ends: enough to see what is usual, and a small file."""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a class or module by ``around``, which gets the function itself in front."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, call)


def before(owner: Any, name: str, action: Callable[..., object]) -> None:
    """Call ``action`` before each call of a function of a class or module, with the same arguments."""

    def call(original: Any, *arguments: Any, **options: Any) -> Any:
        action(*arguments, **options)
        return original(*arguments, **options)

    wrap(owner, name, call)


def _mark(
    owner: Any,
    name: str,
    before: Callable[[Any, Any], object] = lambda *_: None,
    after: Callable[[Any, Any], object] = lambda *_: None,
) -> None:
    """Tell the recorder, where there is one, before a call, with its first argument, and after it, with its result."""

    def call(original: Any, *arguments: Any, **options: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(*arguments, **options)
        before(recorder, arguments[0] if arguments else None)
        found = original(*arguments, **options)
        after(recorder, found)
        return found

    wrap(owner, name, call)


def torch_loaders(module: ModuleType) -> None:
    """A batch of a ``DataLoader`` is input; ``torch.utils.data.dataloader`` has just been imported."""

    def next_batch(original: Any, self: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(self)
        recorder.loading()
        more = False
        try:
            batch = original(self)
            more = True
        finally:
            recorder.loaded(more)
        return batch

    wrap(module._BaseDataLoaderIter, "__next__", next_batch)


def torch_optimizers(module: ModuleType) -> None:
    """A step ends with the optimizer's; ``torch.optim.optimizer`` has just been imported, or a monitor begins."""
    if hasattr(module, "hvdkit_marks"):  # --explain-job and --monitor both ask for it
        return
    module.hvdkit_marks = leading = _Leading()  # type: ignore[attr-defined]

    def begin(_: Any) -> None:
        distributed = sys.modules.get("torch.distributed")
        in_process_group = distributed and distributed.is_available() and distributed.is_initialized()
        recorder = _recorder()
        if recorder is not None and not in_process_group:  # DDP's wait is over before the optimizer's step
            recorder.ready()

    def end(optimizer: Any) -> None:
        if not leading.counts(optimizer):
            return
        recorder, listening = _recorder(), sys.modules.get("hvdkit.core.listeners")
        if recorder is not None:
            recorder.stepped()
        for monitor in [] if listening is None else listening.MONITORS:
            if monitor.automatic:
                monitor.stepped()

    around_torch_steps(module, begin, end)


def around_torch_steps(module: ModuleType, begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call two functions with each optimizer before and after its ``step()``.

    Horovod's optimizer calls the ``step()`` that it wraps, and PyTorch's hooks run in both: the outer one counts.
    """
    outer: weakref.ref[Any] | None = None  # after a step that raised, too, as long as its optimizer is in use

    def before(optimizer: Any, *_: object) -> None:
        nonlocal outer
        if outer is None or outer() in (None, optimizer):
            outer = weakref.ref(optimizer)
            begin(optimizer)

    def after(optimizer: Any, *_: object) -> None:
        nonlocal outer
        if outer is not None and outer() is optimizer:
            outer = None
            end(optimizer)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


class _Leading:
    """Which of several optimizers takes the steps of a loop: of a GAN's two one does.

    The first one that steps, until another one steps twice without it: a later phase of the training. One that is
    distributed goes first: the others take steps within its own, as for the tasks of MAML.
    """

    def __init__(self) -> None:
        self._first: weakref.ref[Any] | None = None
        self._since: weakref.WeakSet[Any] = weakref.WeakSet()

    def counts(self, optimizer: Any) -> bool:
        """Whether this optimizer's step is one of the loop."""
        first = None if self._first is None else self._first()
        ahead = _is_distributed(optimizer) - (first is not None and _is_distributed(first))
        if first is None or ahead > 0 or (ahead == 0 and optimizer in self._since):
            self._first, first = weakref.ref(optimizer), optimizer
        if first is not optimizer:
            self._since.add(optimizer)
            return False
        self._since.clear()
        return True


def _is_distributed(optimizer: Any) -> bool:
    """By hvdkit, or by Horovod."""
    return any(hasattr(optimizer, name) for name in ("_hvdkit_distributed", "_allreduce_delay"))


def torch_saving(module: ModuleType) -> None:
    """``torch.save`` is a checkpoint; ``torch.serialization`` has just been imported."""
    wrap(module, "save", _timed("saving"))


def torch_evaluation(module: ModuleType) -> None:
    """From ``eval()`` to ``train()`` of one model nothing is trained; ``torch.nn.modules.module`` has been imported."""

    def train(model: Any, mode: bool = True) -> None:
        recorder = _recorder() if mode else None
        if recorder is not None:
            recorder.evaluating(model, begins=False)

    _mark(module.Module, "eval", before=lambda recorder, model: recorder.evaluating(model, begins=True))
    before(module.Module, "train", train)


def horovod_waits(module: ModuleType) -> None:
    """``synchronize()`` means that local gradients are ready; ``horovod.torch.mpi_ops`` has just been imported."""

    _mark(module, "synchronize", lambda recorder, _: recorder.ready(), lambda recorder, _: recorder.arrived())


def tensorflow_iterators(module: ModuleType) -> None:
    """A turn of a loop over a data set is a step; within Keras' ``fit`` the batch is taken inside of the step."""

    _mark(
        module.OwnedIterator,
        "__next__",
        before=lambda recorder, _: eager() and recorder.asked(by_hand=False),
        after=lambda recorder, _: eager() and recorder.given(by_hand=False),
    )
    _mark(module.OwnedIterator, "get_next", after=lambda recorder, batch: _after(batch, recorder.taken))


def eager() -> bool:
    """Whether TensorFlow computes at once, outside of a graph."""
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def _after(batch: Any, say: Callable[[], None]) -> None:
    """Call ``say`` when a batch is there, also in a graph, where no other operation waits for it."""
    if eager():
        say()
        return
    import tensorflow as tf

    with tf.control_dependencies([*tf.nest.flatten(batch, expand_composites=True)[:1]]):
        tf.numpy_function(say, [], [], name="hvdkit_taken")


def keras_fit(module: ModuleType) -> None:
    """A batch of ``fit`` is a step; ``keras.src.callbacks.callback_list`` has just been imported."""

    callbacks = module.CallbackList
    _mark(callbacks, "on_test_begin", before=lambda recorder, fit: recorder.evaluating(fit, begins=True))
    _mark(callbacks, "on_test_end", before=lambda recorder, fit: recorder.evaluating(fit, begins=False))
    _mark(callbacks, "on_epoch_begin", after=lambda recorder, _: recorder.asked())
    _mark(callbacks, "on_train_batch_begin", before=lambda recorder, _: recorder.given())
    _mark(callbacks, "on_train_batch_end", after=lambda recorder, _: recorder.asked())
    _mark(callbacks, "on_epoch_end", before=lambda recorder, _: recorder.finished())


def keras_saving(module: ModuleType) -> None:
    """A model that is saved is a checkpoint; ``keras.src.models.model`` has just been imported."""
    for name in ("save", "save_weights"):
        wrap(module.Model, name, _timed("saving"))


@functools.cache
def _recorder() -> Any:
    """The recorder that hvdkit's framework bindings use, too; None where there can be none."""
    try:
        from hvdkit.errors import LauncherError
        from hvdkit.observe import step_files
    except ImportError:
        return None
    try:
        found = step_files.recorder()
    except LauncherError:  # init() says it better
        return None
    if found is not None and not found.marked:  # this file is loaded once for each function of it
        found.marked = True
        atexit.register(found.finished)
        for name in ("fsync", "fdatasync"):  # nothing else says of a thread that is blocked that it is a disk
            wrap(os, name, _timed("fsync"))
        if os.environ.get(VARIABLE, "1") != "1":
            found.on_step = _timeline
    return found


def _timed(name: str) -> Callable[..., Any]:
    """For ``wrap``: has the recorder see how long the training thread is in a function."""

    def call(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            recorder = _recorder() if threading.current_thread() is threading.main_thread() else None
            if recorder is not None:
                recorder.event(name, begun, time.perf_counter() - begun)

    return call


def _timeline(steps: int) -> None:
    """Every rank begins and ends it at the same step; rank 0 writes it. Without Horovod there is none."""
    if steps not in _TIMELINE_STEPS:
        return
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is None or not horovod.is_initialized():
            continue
        with contextlib.suppress(ValueError, RuntimeError):  # Horovod says that it cannot, and training goes on
            if steps == _TIMELINE_STEPS[0]:
                horovod.start_timeline(os.environ[VARIABLE])
            else:
                horovod.stop_timeline()
        return
