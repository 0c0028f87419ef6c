"""PyTorch's profiler on every rank: a trace and a table of operators, of some steps of a training.

In a script: ``with profile("profile") as steps:`` around the loop and ``steps.step()`` at its end. For a script as it
is, with or without Horovod, a step being one ``step()`` of an optimizer: ``hvdkit launch --torch-profile``.

Also run by path in Pythons that have no hvdkit (``observe/startup``), and in those that never import PyTorch: nothing
but the standard library is imported at import time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "HVDKIT_TORCH_PROFILE"
"""``WAIT,WARMUP,ACTIVE:DIRECTORY``: asks for a profile of every process that takes steps of an optimizer."""

_LOG = logging.getLogger("hvdkit")
_ROWS = 50


@contextlib.contextmanager
def profile(directory: str | os.PathLike[str], wait: int = 10, warmup: int = 2, active: int = 5) -> Iterator[Any]:
    """Profile some steps of a training loop; ``step()`` of the result is called at the end of each.

    Every rank R of N writes ``trace-R-of-N.json.gz`` (for ``hvdkit trace summary``, chrome://tracing, Perfetto and
    ``hvdkit timeline merge``) and ``operators-R-of-N.txt``, a table of the operators by the time that they take
    themselves.

    Horovod exchanges gradients in a thread of its own, which the profiler does not see. So the waits for it have names
    in the trace: ``hvdkit:allreduce_wait`` is ``synchronize()`` of a distributed optimizer, once a step, and
    ``hvdkit:collective_wait`` any other. Data loading has PyTorch's own, ``enumerate(DataLoader)...``.

    Args:
        directory: created where it is missing.
        wait: steps that are left out first, >= 0; the very first ones are unlike the others.
        warmup: steps that are then traced and thrown away, >= 0, since the profiler's own start costs time.
        active: steps that are recorded, >= 1.
    Yields:
        PyTorch's profiler.
    Raises:
        InvalidArgumentError: a count that cannot be.
        DataError: the directory cannot be created.
    Source: PyTorch's documentation of ``torch.profiler.schedule``.
    """
    import torch
    from torch.profiler import ProfilerActivity, schedule

    path = Path(directory)
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            from hvdkit.errors import InvalidArgumentError  # not at import time, see above

            raise InvalidArgumentError(f"{name} is a number of steps from {least} on, got {value!r}.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        from hvdkit.errors import DataError

        raise DataError(f"The directory {str(path)!r} for profiles cannot be created: {error.strerror}.") from error
    place = _place()  # a script may leave its process group before the end
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    written: list[Path] = []
    with (
        torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=lambda profiler: written.append(_write(profiler, path, _place() or place)),
            profile_memory=True,
        ) as profiler,
        _named_waits(),
    ):
        yield profiler
    if not written:
        _LOG.warning(
            "hvdkit: no profile was written: the loop ended after %d steps, and step %d is the first to be recorded.",
            profiler.step_num,
            wait + warmup + 1,
        )


@contextlib.contextmanager
def _named_waits() -> Iterator[None]:
    """A range around every wait for Horovod, whenever it is imported: one for each synchronisation, not each tensor."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    with contextlib.ExitStack() as undo:
        named: set[str] = set()

        def name_waits(optimizer: object = None, *_: object) -> None:
            for module in ("horovod.torch", "horovod.torch.mpi_ops"):  # each has a name of its own for the function
                if module not in named and hasattr(sys.modules.get(module), "synchronize"):
                    named.add(module)
                    _name_calls(sys.modules[module], "hvdkit:collective_wait", undo)
            if type(optimizer).__module__ == "horovod.torch.optimizer" and "synchronize" not in vars(optimizer):
                _name_calls(optimizer, "hvdkit:allreduce_wait", undo)

        name_waits()
        undo.callback(register_optimizer_step_pre_hook(name_waits).remove)
        yield


def _name_calls(holder: Any, name: str, undo: contextlib.ExitStack) -> None:
    """Have the profiler see the calls of ``holder.synchronize`` until ``undo`` closes."""
    from torch.profiler import record_function

    original, own = holder.synchronize, "synchronize" in vars(holder)

    def synchronize(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return original(*arguments, **options)

    holder.synchronize = synchronize
    if own:
        undo.callback(setattr, holder, "synchronize", original)
    else:
        undo.callback(delattr, holder, "synchronize")


def _write(profiler: Any, directory: Path, place: tuple[int, int] | None) -> Path:
    import torch

    rank, size = place or (0, 1)
    trace = directory / f"trace-{rank}-of-{size}.json.gz"
    profiler.export_chrome_trace(str(trace))
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=_ROWS)
    (directory / f"operators-{rank}-of-{size}.txt").write_text(table, encoding="utf-8")
    return trace


def _place() -> tuple[int, int] | None:
    """Rank and size as Horovod or else torch.distributed has them; None where neither is started."""
    import torch.distributed as dist

    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def profile_steps(optimizers: ModuleType) -> None:
    """Profile this process as ``VARIABLE`` asks, from the end of the first step of an optimizer on.

    It is the first moment at which PyTorch lets hooks be added, and so the workers of a ``DataLoader`` and other
    programs of the rank are not profiled. Horovod's optimizer calls the ``step()`` that it wraps, and PyTorch's hooks
    run in both: the outer one counts.

    Args:
        optimizers: ``torch.optim.optimizer``, which has just been imported.
    """
    counts, _, directory = os.environ[VARIABLE].partition(":")
    depth = 0
    running = contextlib.ExitStack()
    profiler: Any = None

    def begin(*_: object) -> None:
        nonlocal depth
        depth += 1

    def end(*_: object) -> None:
        nonlocal depth, profiler
        depth -= 1
        if depth == 0:
            if profiler is None:
                profiler = running.enter_context(profile(directory, *map(int, counts.split(","))))
                atexit.register(running.close)  # after Horovod's own, so that it runs before
            profiler.step()

    optimizers.register_optimizer_step_pre_hook(begin)
    optimizers.register_optimizer_step_post_hook(end)
