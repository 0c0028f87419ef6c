"""Where a ``Trial`` looks into a script as it is: its loaders, its optimizers, and what makes ranks unlike one process.

Loaded by path in the script's Python, as ``step_marks`` is (``observe/startup``): each function is called when the
module that it is given has just been imported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hvdkit.observe import step_marks
from hvdkit.observe.trial import current


def torch_loaders(module: ModuleType) -> None:
    """A ``DataLoader``'s batches, and the seeds of its workers; ``torch.utils.data.dataloader``."""

    def begin(original: Any, self: Any, loader: Any) -> None:
        current().drawn(functools.partial(original, self, loader))

    step_marks.wrap(module._BaseDataLoaderIter, "__init__", begin)
    step_marks.wrap(module._BaseDataLoaderIter, "__next__", _given)


def _given(original: Any, self: Any, *arguments: Any) -> Any:
    return current().batch(functools.partial(original, self, *arguments), self)


def torch_optimizers(module: ModuleType) -> None:
    """An optimizer's steps; ``torch.optim.optimizer``."""

    def parameters(optimizer: Any) -> list[Any]:
        return [one for group in optimizer.param_groups for one in group["params"]]

    own: list[Any] = []  # the script's rates, from which its scheduler goes on, where it is given others

    def begin(optimizer: Any) -> None:
        trial = current()
        rate = trial.rate()
        own[:] = [] if rate is None else [group["lr"] for group in optimizer.param_groups]
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (rate / float(own[0])) if float(own[0]) else rate
        found = parameters(optimizer)
        weights = [_values(one) for one in found]
        trial.begin(optimizer, weights, _gradients([one.grad for one in found], weights))

    def end(optimizer: Any) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        for group, before in zip(optimizer.param_groups, own, strict=False):
            group["lr"] = before
        weights = [_values(one) for one in parameters(optimizer)]
        current().end(optimizer, weights, rate, float(own[0]) if own else None)

    step_marks.around_torch_steps(module, begin, end)


def _gradients(found: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """As many numbers as of the weights, 0 where there is no gradient."""
    return [0 * weight if one is None else _values(one) for one, weight in zip(found, weights, strict=True)]


def torch_dropout(module: ModuleType) -> None:
    """Dropout drops nothing where the trial says so; ``torch.nn.functional``."""

    def keep(original: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        return original(value, *arguments, **options) if current().drops() else value

    for name in ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"):
        step_marks.wrap(module, name, keep)


def torch_batch_norm(module: ModuleType) -> None:
    """BatchNorm over this process' samples alone; ``torch.nn.modules.module``."""

    def look(layer: Any, _inputs: Any) -> None:
        kind = type(layer)
        if layer.training and "BatchNorm" in kind.__name__ and "Sync" not in kind.__name__:
            current().note("BatchNorm")

    module.register_module_forward_pre_hook(look)


def tensorflow_iterators(module: ModuleType) -> None:
    """The batches of ``tf.data``, and so those of ``fit``; ``tensorflow.python.data.ops.iterator_ops``."""

    def give(original: Any, self: Any, *arguments: Any) -> Any:
        return _given(original, self, *arguments) if step_marks.eager() else original(self, *arguments)

    for name in ("__next__", "get_next"):
        step_marks.wrap(module.OwnedIterator, name, give)


def tensorflow_eagerly(module: ModuleType) -> None:
    """Batches and weights have values only outside of a graph; ``...polymorphic_function.eager_function_run``."""
    module.run_functions_eagerly(True)


def torch_seeds(module: ModuleType) -> None:
    """PyTorch begins with the same seed in every process; ``torch.random``."""
    module.default_generator.manual_seed(current().seed)


def tensorflow_seeds(module: ModuleType) -> None:
    """TensorFlow begins with another seed in every run; ``tensorflow.python.framework.random_seed``."""
    module.set_seed(current().seed)

    def seeds(original: Any, *arguments: Any) -> Any:
        current().drawing()
        graph, operation = original(*arguments)
        if step_marks.eager() or operation is None:
            return graph, operation
        return graph, (operation + current().draws) % 2**31  # within a map of tf.data

    step_marks.wrap(module, "get_seed", seeds)


def keras_seeds(module: ModuleType) -> None:
    """Keras' layers draw by generators of their own; ``keras.src.random.seed_generator``."""

    def seeds(original: Any, *arguments: Any, **options: Any) -> Any:
        current().drawing()
        found = original(*arguments, **options)
        if step_marks.eager():
            return found
        import tensorflow as tf

        return found + tf.cast(current().draws, found.dtype)  # within a map of tf.data

    step_marks.wrap(module.SeedGenerator, "next", seeds)


def keras_dropout(module: ModuleType) -> None:
    """Dropout drops nothing where the trial says so; ``keras.src.layers.regularization.dropout``."""

    def call(original: Any, self: Any, value: Any, training: bool = False) -> Any:
        return original(self, value, training=training and current().drops())

    step_marks.wrap(module.Dropout, "call", call)


def keras_batch_norm(module: ModuleType) -> None:
    """BatchNormalization over this process' samples alone; ``keras.src.layers.normalization.batch_normalization``."""

    def look(layer: Any, _inputs: Any, training: Any = None, *_: Any, **__: Any) -> None:
        if training and layer.trainable:
            current().note("BatchNorm")

    step_marks.before(module.BatchNormalization, "call", look)


def keras_optimizers(module: ModuleType) -> None:
    """An optimizer's steps; ``keras.src.optimizers.base_optimizer``."""
    under_way: list[Any] = []

    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if under_way or not all(one is None or hasattr(one, "numpy") or hasattr(one, "dense_shape") for one in grads):
            return original(self, grads, trainable_variables)
        under_way.append(self)
        try:
            trial = current()
            variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
            weights = [_values(one) for one in variables]
            own, rate = None, trial.rate()
            if rate is not None and hasattr(self._learning_rate, "assign"):  # no schedule
                own, self.learning_rate = float(_values(self.learning_rate)), rate
            if any(hasattr(one, "dense_shape") for one in grads):
                import tensorflow as tf

                trial.note("sparse")
                # As hvdkit reduces an embedding's rows: Keras' Adam squares each row before it adds them up.
                grads = [tf.convert_to_tensor(one) if hasattr(one, "dense_shape") else one for one in grads]
            trial.begin(self, weights, _gradients(grads, weights))
            done = original(self, grads, trainable_variables)
            used = float(_values(self.learning_rate))
            if own is not None:
                self.learning_rate = own
            trial.end(self, [_values(one) for one in variables], used, own)
        finally:
            under_way.clear()
        return done

    step_marks.wrap(module.BaseOptimizer, "apply", apply)


def _values(tensor: Any) -> Any:
    """The numbers of a tensor or a variable."""
    return tensor.detach().cpu().float().numpy() if hasattr(tensor, "detach") else tensor.numpy()


def keras_epochs(module: ModuleType) -> None:
    """Epochs of ``fit``, and what it evaluates within them; ``keras.src.callbacks.callback_list``."""

    def begin(callbacks: Any, *_: Any, **__: Any) -> None:
        current().batches = callbacks.params.get("steps") if callbacks.params else None

    step_marks.before(module.CallbackList, "on_epoch_begin", begin)
    step_marks.before(module.CallbackList, "on_epoch_end", lambda *_, **__: current().epoch())
    step_marks.before(module.CallbackList, "on_test_begin", lambda *_, **__: setattr(current(), "evaluating", True))
    step_marks.before(module.CallbackList, "on_test_end", lambda *_, **__: setattr(current(), "evaluating", False))
