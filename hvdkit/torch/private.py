"""Every use of what PyTorch and Python do not promise; ``tests/parallel/test_torch_private.py`` tests each."""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number for each graph that backward computes, also for one within another; -1 outside of them. Nothing public says
that a backward has begun, or ended by an error."""

foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies many small tensors in a third of the time that ``Tensor.copy_`` takes for each."""

overlaps_itself: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap
"""Not 0 where elements share memory (``expand``), into which nothing may be written; no public name asks for it."""


at_the_end_of_backward: Callable[[Callable[[], None]], None]
at_the_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Has autograd call something when the graph that it computes now is done. What is public, a hook, is called before."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the outer graph while one within it ends, as activation checkpointing has it; None elsewhere."""

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether somebody profiles: ``record_function`` costs microseconds also where nobody does."""


def eagerly(function: _Function) -> _Function:
    """Where a step is compiled as a whole, dynamo would trace what autograd and the optimizer call.

    As ``torch.compiler.disable``, whose wrapper costs each hook microseconds, compiled or not. This marks the code,
    which must be the function's own: what a decorator has wrapped shares its code with others.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):  # before PyTorch 2.7
        return cast(_Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]
    return function


def put_hook(handle: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Put another hook in the place of one on a parameter, also while that is frozen and takes no new ones."""
    handle.hooks_dict_ref()[handle.id] = hook


def call_first_after_step(optimizer: Any, hook: Callable[..., None]) -> None:
    """Call a hook when an optimizer has stepped, before all that were registered until now."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


gradient_hooks: Callable[[Any], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks that see a parameter's gradient after it was added up, and may change it; a dict or None."""


python_owners: Callable[[Any], int] = sys.getrefcount
"""References from Python to a tensor. Nothing public says who keeps a gradient, which must not become the next one."""

storage_owners: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors share a memory, by its ``storage_of``: a detached gradient does."""


def storage_of(tensor: torch.Tensor) -> int:
    """A tensor's memory for ``storage_owners``, as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


_tensor_owners: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 0)  # from PyTorch 2.5


def owners(gradients: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """How many hold each gradient in Python and as a tensor, and its memory; beside them it is the program's own."""
    in_memory = map(storage_owners, map(storage_of, gradients))
    return list(zip(map(python_owners, gradients), map(_tensor_owners, gradients), in_memory, strict=True))


@functools.cache
def owners_of_new(lists: int) -> tuple[int, int, int]:
    """``owners`` of a gradient that backward has just made, while it is in so many lists."""
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    held = [[probe.grad] for _ in range(lists)]
    return owners(held[0])[0]


def variables_of_callers(but: str) -> Iterator[Any]:
    """What the functions that are running hold by a name, nearest first, without those in files below ``but``.

    Nothing public says what else a program holds when it calls ``broadcast_state``.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(but):
            yield from (*frame.f_locals.values(), *frame.f_globals.values())
        frame = frame.f_back


def free_cycles() -> None:
    """Free what only holds itself: a model in DistributedDataParallel keeps a process group alive, which would hang."""
    gc.collect()
