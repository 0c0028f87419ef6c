"""What a PyTorch model allocates in a training step, followed operation by operation at two batch sizes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory.making import Made, user_code
from hvdkit.measure.model_factory.torch_step import forward, loss_of


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


@dataclass
class Course:
    """What one batch size showed.

    Attributes:
        batch: samples.
        live: bytes alive after each operation of a step.
        activations: bytes kept for backward.
        parameters, gradients, states: bytes.
        gradient_size: bytes of a number of a gradient, on average.
    """

    batch: int
    live: list[int] = field(default_factory=list)
    activations: int = 0
    parameters: int = 0
    gradients: int = 0
    states: int = 0
    gradient_size: float = 4.0


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
    same = len(courses[0].live) == len(courses[1].live)
    lives = [one.live if same else [max(one.live)] for one in courses]
    peak = max(_line(a, b, first, second, wanted) for a, b in zip(*lives, strict=True))
    last = courses[1]
    return {
        "batches": [first, second],
        "same_operations": same,
        "parameters": last.parameters,
        "gradients": last.gradients,
        "states": last.states,
        "activations": _line(courses[0].activations, last.activations, first, second, wanted),
        "gradient_size": last.gradient_size,
        "peak": peak,
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


def _course(made: Made, batch: int, question: Mapping[str, Any]) -> Course:
    """Run two steps of a copy at this batch size.

    The second one's live bytes by operation, and the sums of each term.
    """
    inputs = _inputs(made, batch)
    model = _copy(made.model)
    optimizer = _optimizer(question["optimizer"], model.parameters())
    live, found = _Live(), Course(batch)
    own = [*model.parameters(), *model.buffers()]
    live.add(own)
    live.add(inputs)
    with _failures_told(made, batch, question["device"]), live.following():
        _step(made, model, optimizer, inputs)
        live.course.clear()
        with _saved_for_backward(own) as saved:
            _step(made, model, optimizer, inputs)
    found.live, found.activations = live.course, sum(saved.values())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found.parameters = sum(one.untyped_storage().nbytes() for one in _distinct(own))
    found.gradients = sum(one.untyped_storage().nbytes() for one in _distinct(gradients))
    numbers = sum(one.numel() for one in gradients)
    found.gradient_size = found.gradients / numbers if numbers else 4.0
    states = _distinct(_tensors(dict(optimizer.state)))
    found.states = sum(one.untyped_storage().nbytes() for one in states)
    return found


def _failures_told(made: Made, batch: int, device: str) -> AbstractContextManager[None]:
    """What the model raises, as one sentence."""
    samples = "1 sample" if batch == 1 else f"{batch} samples"
    other = " --input-shape makes float32 zeros: return (model, inputs) for others." if made.inputs is None else ""
    return user_code(
        f"a step with {samples} on {device}",
        "a model, and a loss function where there is one, that take any batch size (and --device cpu where an "
        f"operation needs values).{other}",
    )


def _step(made: Made, model: Any, optimizer: Any, inputs: Any) -> None:
    optimizer.zero_grad()
    called = Made(model, inputs, made.loss)
    loss_of(called, forward(called)).backward()
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


def _distinct(tensors: list[Any]) -> list[Any]:
    return list({one.untyped_storage()._cdata: one for one in tensors}.values())


def _line(at_first: int, at_second: int, first: int, second: int, wanted: int) -> int:
    """The value at ``wanted`` of the line through two points."""
    return round(at_first + (at_second - at_first) * (wanted - first) / (second - first))
