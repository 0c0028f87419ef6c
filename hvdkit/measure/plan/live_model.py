"""``python -m hvdkit.measure.plan.live_model QUESTION REPLY``: makes a model and measures what it needs in memory.

QUESTION is JSON (see ``memory``), REPLY the file to write; PyTorch is imported in this process only. A step of the
model is followed operation by operation.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model import Made, framework_of, make, reply, user_code

_ANY_BATCH = (
    "a model, and a loss function where there is one, that take any batch size (and --device cpu where an operation "
    "needs values)."
)
"""What is expected of what ``--model`` names where a step of it fails."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The terms at ``question["batch"]`` samples, from two steps with so many, of which the second counts.

    Inputs whose first length is that of the first input are repeated or cut to the batch size; others stay as they are.

    Returns:
        The terms, in bytes, and with ``question["measure"]`` what the allocator really held.
    Raises:
        InvalidArgumentError: the factory fails, or its model cannot be run at this batch size.
    """
    factory = question["module"], question["factory"], question["input_shape"]
    real = make(*factory) if question["measure"] else None
    on_meta = question["device"] == "meta" and importlib.util.find_spec("torch") is not None
    with importlib.import_module("torch").device("meta") if on_meta else nullcontext():
        made = make(*factory)  # so that a model for "meta" never takes the memory of its weights
    if framework_of(made.model) != "torch":
        raise InvalidArgumentError(
            "it gave a Keras model, whose steps cannot be followed; give --parameters (model.count_params())."
        )
    if made.inputs is None:
        raise InvalidArgumentError(
            "the model's activations depend on its inputs; give --input-shape, or return (model, inputs)."
        )
    if question["device"] == "meta":
        from torch.utils._pytree import tree_map

        inputs = tree_map(lambda leaf: leaf.to("meta") if _is_tensor(leaf) else leaf, made.inputs)
        made = Made(made.model.to("meta"), inputs, made.loss)
    found = _followed(made, question)
    return found if real is None else {**found, "measured_peak": peak_of_allocator(real, question)}


def _optimizer(name: str, parameters: Any) -> Any:
    import torch

    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[name](parameters, lr=1e-6, **({"momentum": 0.9} if name == "momentum" else {}))


class _Live:
    """Bytes of the tensors that are alive, and the most after any operation; each storage is counted once."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
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
                self.peak = max(self.peak, self.bytes)
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
        user_code(f"a step with {count_text(question['batch'], 'sample')} on cpu", _ANY_BATCH),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        model = copy.deepcopy(made.model).train()
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


def _followed(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
    """Run two steps: the terms of the second one, and the most that was alive at once in it, in bytes."""
    inputs, model = _inputs(made, question["batch"]), made.model.train()
    optimizer = _optimizer(question["optimizer"], model.parameters())
    live = _Live()
    own = [*model.parameters(), *model.buffers()]
    live.add(own)
    live.add(inputs)
    fused = _fused_attention() if question["device"] == "meta" else nullcontext()
    step = f"a step with {count_text(question['batch'], 'sample')} on {question['device']}"
    with user_code(step, _ANY_BATCH), fused, live.following():
        _step(made, model, optimizer, inputs)
        live.peak = live.bytes
        with _saved_for_backward(own) as saved:
            _step(made, model, optimizer, inputs)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    numbers = sum(one.numel() for one in gradients)
    size = _bytes(gradients)
    return {
        "parameters": _bytes(own),
        "gradients": size,
        "states": _bytes(_tensors(dict(optimizer.state))),
        "activations": sum(saved.values()),
        "gradient_size": size / numbers if numbers else 4.0,
        "peak": live.peak,
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


def _step(made: Made, model: Any, optimizer: Any, inputs: Any) -> None:
    optimizer.zero_grad()
    Made(model, inputs, made.loss).torch_loss().backward()
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
    """The model's inputs at this batch size: its own, repeated or cut."""
    import torch
    from torch.utils._pytree import tree_map

    tensors = [tensor for tensor in _tensors(made.inputs) if tensor.dim() > 0]
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


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
