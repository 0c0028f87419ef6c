"""``python -m hvdkit.measure.plan.live_model QUESTION REPLY``: makes a model and measures what it needs in memory.

QUESTION is JSON (see ``memory``), REPLY the file to write; frameworks are imported in this process only. PyTorch's
steps are followed operation by operation at two batch sizes; of a Keras model the variables and the shapes of its
layers' outputs are counted.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hvdkit.common.units import ITEM_SIZES, count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import Made, framework_of, make, reply, torch_forward, torch_loss, user_code
from hvdkit.measure.plan.memory import STATES


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The measured terms, and with ``question["measure"]`` what the allocator really held.

    Raises:
        InvalidArgumentError: the factory fails, or its model cannot be measured.
    """
    asked = question["module"], question["factory"], question["input_shape"]
    real = make(*asked) if question["measure"] else None
    on_meta = question["device"] == "meta" and importlib.util.find_spec("torch") is not None
    with importlib.import_module("torch").device("meta") if on_meta else nullcontext():
        made = make(*asked)  # so that a model for "meta" never takes the memory of its weights
    framework = framework_of(made.model, question["framework"])
    if framework == "tensorflow":
        raise InvalidArgumentError("it gave a tf.Module, whose layers are not known; expected a torch or Keras model.")
    found = {"framework": framework, **(of_torch if framework == "torch" else of_keras)(made, question)}
    if real is not None:
        if framework != "torch":
            raise InvalidArgumentError("--measure counts PyTorch's allocations; leave it out for a Keras model.")
        found["measured_peak"] = peak_of_allocator(real, question)
    return found


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


def of_torch(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
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
    fused = _fused_attention() if question["device"] == "meta" else nullcontext()
    with _failures_told(made, batch, question["device"]), fused, live.following():
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


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention on meta by the kernel of CPUs, which as those of GPUs keeps no matrix of attention; meta's own does.

    PyTorch has no setting for it, so that its function is replaced: a model that imported the function by its name
    keeps the other, and is estimated too high.
    """
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
              is_causal: bool = False, **options: Any) -> Any:  # fmt: skip
        if attn_mask is not None or options.get("enable_gqa"):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, is_causal=is_causal, scale=options.get("scale"))[0]

    functions: Any = torch.nn.functional
    functions.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = attention


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
            found = torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")
        else:
            found = value.detach()[torch.arange(batch) % given]
        return found.requires_grad_(value.requires_grad)

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


_VIEWS = ("InputLayer", "Flatten", "Reshape")
"""Layers of Keras whose output is their input."""


def of_keras(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
    """The terms at ``question["batch"]`` samples; activations are the outputs of the layers, an estimate.

    Raises:
        InvalidArgumentError: the model is not built, so that its shapes are not known.
    """
    if not made.model.built and made.input_shape is not None:
        made.model.build((None, *made.input_shape[1:]))
    if not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input layer, or --input-shape."
        )
    gradients = _bytes_of_variables(made.model.trainable_variables)
    numbers = sum(math.prod(variable.shape) for variable in made.model.trainable_variables)
    return {
        "parameters": _bytes_of_variables(made.model.variables),
        "gradients": gradients,
        "states": gradients * STATES[question["optimizer"]],
        "activations": sum(times * _outputs(layer, question["batch"]) for layer, times in _layers(made.model)),
        "gradient_size": gradients / numbers if numbers else 4.0,
        "peak": None,
    }


def _bytes_of_variables(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) * ITEM_SIZES.get(str(variable.dtype), 4) for variable in variables)


def _layers(model: Any) -> Iterable[tuple[Any, int]]:
    """The layers in it, also those of models in it, and how often a step calls each."""
    for layer in model.layers:
        times = _calls(model, layer)
        if hasattr(layer, "layers"):
            yield from ((inner, times * inner_times) for inner, inner_times in _layers(layer))
        elif type(layer).__name__ not in _VIEWS:
            yield layer, times


def _calls(model: Any, layer: Any) -> int:
    graph = getattr(model, "_functional", None) or model  # a Sequential keeps its graph there
    depths = getattr(graph, "_nodes_by_depth", None) or {}
    return sum(node.operation is layer for nodes in depths.values() for node in nodes) or 1


def _outputs(layer: Any, batch: int) -> int:
    try:
        output = layer.output
    except (AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the output shape of layer {layer.name!r} is not known; expected a Sequential or functional model, whose "
            "layers are connected."
        ) from error
    tensors = output if isinstance(output, list | tuple) else [output]
    shapes = [[batch if length is None else length for length in tensor.shape] for tensor in tensors]
    return sum(math.prod(shape) * ITEM_SIZES.get(str(layer.compute_dtype), 4) for shape in shapes)


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
