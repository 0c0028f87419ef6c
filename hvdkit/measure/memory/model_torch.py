"""What a PyTorch model allocates in a training step, followed operation by operation at two batch sizes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import Made, torch_forward, torch_loss, user_code


def _optimizer(name: str, parameters: Any) -> Any:
    import torch

    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
    kind, options = kinds[name]
    return kind(parameters, lr=1e-6, **options)


class _Live:
    """Bytes of the tensors that are alive, after every operation; each storage is counted once."""

    def __init__(self) -> None:
        self.bytes = 0
        self.course: list[int] = []
        self._known: set[int] = set()

    def add(self, tree: Any) -> None:
        """Count tensors that were made before."""
        for tensor in _tensors(tree):
            self._count(tensor.untyped_storage())

    def following(self) -> Any:
        """A context in which the result of every operation is counted."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(_, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N805
                given = function(*args, **(kwargs or {}))
                self.add(given)
                self.course.append(self.bytes)
                return given

        return Mode()  # type: ignore[no-untyped-call]

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.bytes += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def measure(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
    """The terms at ``question["batch"]`` samples, from steps at two smaller batch sizes.

    Inputs whose first length is that of the first input are repeated or cut to a batch size; others stay as they are.

    Every operation's live bytes are taken as linear in the batch, so that the peak may move to another operation.

    Raises:
        InvalidArgumentError: the model cannot be run at these batch sizes.
    """
    first, second = max(2, question["batch"] // 4), max(3, question["batch"] // 2)  # BatchNorm needs two
    if question["device"] == "meta":
        made = _on_meta(made)
    courses = [_course(made, batch, question) for batch in (first, second)]
    wanted = question["batch"]
    lives, terms = zip(*courses, strict=True)
    same = len(lives[0]) == len(lives[1])
    alike = lives if same else [[max(live)] for live in lives]
    return {
        **terms[1],
        "batches": [first, second],
        "same_operations": same,
        "activations": _line(terms[0]["activations"], terms[1]["activations"], first, second, wanted),
        "peak": max(_line(a, b, first, second, wanted) for a, b in zip(*alike, strict=True)),
    }


def peak_of_allocator(made: Made, question: Mapping[str, Any]) -> int:
    """The largest number of bytes that PyTorch's CPU allocator held in real steps at ``question["batch"]`` samples.

    Raises:
        InvalidArgumentError: the model cannot be run with so many.
    Source: the memory events of ``torch.profiler`` (profile_memory), counted from before the model is made.
    """
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._pytree import tree_map

    inputs = _inputs(made, question["batch"])
    with (
        _failures_told(made, question["batch"], "cpu"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        model = _copy(made.model)
        optimizer = _optimizer(question["optimizer"], model.parameters())
        batch = tree_map(lambda one: one.clone() if _is_tensor(one) else one, inputs)
        for _ in range(2):
            _step(made, model, optimizer, batch)
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _course(made: Made, batch: int, question: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Run two steps of a copy at this batch size: the second one's live bytes by operation, and the terms in bytes."""
    inputs = _inputs(made, batch)
    model = _copy(made.model)
    optimizer = _optimizer(question["optimizer"], model.parameters())
    live = _Live()
    own = [*model.parameters(), *model.buffers()]
    live.add(own)
    live.add(inputs)
    with _failures_told(made, batch, question["device"]), live.following():
        _step(made, model, optimizer, inputs)
        live.course.clear()
        with _saved_for_backward(own) as saved:
            _step(made, model, optimizer, inputs)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    numbers = sum(one.numel() for one in gradients)
    size = _bytes(gradients)
    return live.course, {
        "parameters": _bytes(own),
        "gradients": size,
        "states": _bytes(_tensors(dict(optimizer.state))),
        "activations": sum(saved.values()),
        "gradient_size": size / numbers if numbers else 4.0,
    }


def _failures_told(made: Made, batch: int, device: str) -> AbstractContextManager[None]:
    """What the model raises, as one sentence."""
    other = " --input-shape makes float32 zeros: return (model, inputs) for others." if made.inputs is None else ""
    return user_code(
        f"a step with {count_text(batch, 'sample')} on {device}",
        "a model, and a loss function where there is one, that take any batch size (and --device cpu where an "
        f"operation needs values).{other}",
    )


def _step(made: Made, model: Any, optimizer: Any, inputs: Any) -> None:
    optimizer.zero_grad()
    called = Made(model, inputs, made.loss)
    torch_loss(called, torch_forward(called)).backward()
    optimizer.step()


@contextmanager
def _saved_for_backward(own: list[Any]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps, without the parameters and buffers themselves."""
    import torch

    excluded = {one.untyped_storage()._cdata for one in own}
    saved: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _inputs(made: Made, batch: int) -> Any:
    """The model's inputs at this batch size: its own, repeated or cut, else zeros of ``--input-shape``."""
    import torch
    from torch.utils._pytree import tree_map

    if made.inputs is None:
        if made.input_shape is None:
            raise InvalidArgumentError(
                "the model's activations depend on its inputs; give --input-shape, or return (model, inputs)."
            )
        where = next((one.device for one in made.model.parameters()), torch.device("cpu"))
        return torch.zeros((batch, *made.input_shape[1:]), device=where)

    tensors = [one for one in _tensors(made.inputs) if one.dim() > 0]
    given = len(tensors[0]) if tensors else 0

    def resized(value: Any) -> Any:
        if not _is_tensor(value) or value.dim() == 0 or len(value) != given:
            return value
        if value.device.type == "meta":
            return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")
        return value[torch.arange(batch) % given]

    return tree_map(resized, made.inputs)


def _on_meta(made: Made) -> Made:
    from torch.utils._pytree import tree_map

    model = _copy(made.model).to("meta")
    inputs = tree_map(lambda one: one.to("meta") if _is_tensor(one) else one, made.inputs)
    return Made(model, inputs, made.loss, made.input_shape)


def _copy(model: Any) -> Any:
    return copy.deepcopy(model).train()


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _tensors(tree: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if _is_tensor(leaf)]


def _bytes(tensors: list[Any]) -> int:
    """Of their storages, each counted once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


def _line(at_first: int, at_second: int, first: int, second: int, wanted: int) -> int:
    """The value at ``wanted`` of the line through two points."""
    return round(at_first + (at_second - at_first) * (wanted - first) / (second - first))
