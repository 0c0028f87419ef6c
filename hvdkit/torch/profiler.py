"""PyTorch's profiler on every rank: a trace and a table of operators, of some steps of a training.

In a script: ``with profile("profile") as steps:`` around the loop and ``steps.step()`` at its end. For a script as it
is, a step being one ``step()`` of an optimizer::

    hvdkit launch -n 2 -- python -m hvdkit.torch.profiler --directory profile train.py --epochs 1
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, record_function, schedule

from hvdkit.errors import DataError, DataNotFoundError, HvdkitError, InvalidArgumentError

_LOG = logging.getLogger("hvdkit")
_ROWS = 50


@contextlib.contextmanager
def profile(
    directory: str | os.PathLike[str], wait: int = 10, warmup: int = 2, active: int = 5
) -> Iterator[torch.profiler.profile]:
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
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgumentError(f"{name} is a number of steps from {least} on, got {value!r}.")
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The directory {str(path)!r} for profiles cannot be created: {error.strerror}.") from error
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    written: list[Path] = []
    with (
        torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=lambda profiler: written.append(_write(profiler, path)),
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
    original = holder.synchronize

    @functools.wraps(original)
    def synchronize(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return original(*arguments, **options)

    own = "synchronize" in vars(holder)
    holder.synchronize = synchronize
    if own:
        undo.callback(setattr, holder, "synchronize", original)
    else:
        undo.callback(delattr, holder, "synchronize")


def _write(profiler: torch.profiler.profile, directory: Path) -> Path:
    rank, size = _place()
    trace = directory / f"trace-{rank}-of-{size}.json.gz"
    profiler.export_chrome_trace(str(trace))
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=_ROWS)
    (directory / f"operators-{rank}-of-{size}.txt").write_text(table, encoding="utf-8")
    return trace


def _place() -> tuple[int, int]:
    """Rank and size as Horovod or else torch.distributed has them; of one process alone where neither was started."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--directory", default="profile", show_default=True, metavar="DIR", help="Where every rank writes.")
@click.option("--wait", default=10, show_default=True, metavar="N", help="Steps that are left out first.")
@click.option("--warmup", default=2, show_default=True, metavar="N", help="Steps traced and thrown away.")
@click.option("--active", default=5, show_default=True, metavar="N", help="Steps that are recorded.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(directory: str, wait: int, warmup: int, active: int, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as it is and profile some of its optimizer steps, on every rank.

    \b
    Example:
      hvdkit launch -n 2 -- python -m hvdkit.torch.profiler --directory profile train.py --epochs 1
    """
    if not script.is_file():
        raise DataNotFoundError(f"There is no script {str(script)!r}.")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    with profile(directory, wait, warmup, active) as profiler, _after_each_optimizer_step(profiler.step):
        runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _after_each_optimizer_step(action: Callable[[], None]) -> Iterator[None]:
    """Horovod's optimizer calls the ``step()`` that it wraps, and PyTorch's hooks run in both: the outer one counts."""
    depth = 0

    def begin(*_: object) -> None:
        nonlocal depth
        depth += 1

    def end(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            action()

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    """The command line; a user's mistake is one sentence and no stack trace, an error of the script is the script's."""
    try:
        run.main(prog_name="python -m hvdkit.torch.profiler", standalone_mode=False)
    except click.UsageError as error:
        click.echo(f"hvdkit: {error.format_message()}", err=True)
        sys.exit(2)
    except HvdkitError as error:
        click.echo(f"hvdkit: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
