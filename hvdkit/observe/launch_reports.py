"""What a rank says of itself to ``hvdkit launch``, seen from what its script imports: whom it met, and what it lost.

Loaded by path in Pythons that may have no hvdkit (``observe/startup``), as ``steps/stalls`` is, which carries it. Each
function here is called when a module has just been imported.
"""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location("_hvdkit_stalls", Path(__file__).parents[1] / "steps" / "stalls.py")
stalls: Any = importlib.util.module_from_spec(_SPEC)  # type: ignore[arg-type]
_SPEC.loader.exec_module(stalls)  # type: ignore[union-attr]


def report_init(basics: Any) -> None:
    """Have each ``init`` of Horovod reported; ``horovod.common.basics``."""
    init = stalls.reported_init()(basics.HorovodBasics.init)

    @functools.wraps(init)
    def initialized(self: Any, *arguments: Any, **options: Any) -> Any:
        done = init(self, *arguments, **options)
        _report_joined(self.size())
        return done

    basics.HorovodBasics.init = initialized


def report_process_groups(module: Any) -> None:
    """Have it reported that a process group has others; ``torch.distributed.distributed_c10d``."""
    _after_first(module, "init_process_group", lambda *_: _report_joined(module.get_world_size()))


def report_strategies(module: Any) -> None:
    """The same of ``MultiWorkerMirroredStrategy``; its ``collective_all_reduce_strategy``."""
    extended = module.CollectiveAllReduceExtended
    _after_first(extended, "_initialize_multi_worker", lambda strategy, *_: _report_joined(strategy._num_workers))


def report_jax(module: Any) -> None:
    """The same of ``jax.distributed``; ``jax._src.distributed``."""
    _after_first(module.State, "initialize", lambda state, *_: _report_joined(state.num_processes or 1))


def _report_joined(size: int) -> None:
    if size > 1:
        stalls.report(stalls.JOINED)


def report_torch_steps(module: Any) -> None:
    """Have the first step of any optimizer reported; ``torch.optim.optimizer``."""
    report = functools.cache(_report_trained)
    module.register_optimizer_step_post_hook(lambda *_: report())


def report_keras_steps(module: Any) -> None:
    """The same of Keras' optimizers; ``keras.src.optimizers.base_optimizer``."""
    _after_first(module.BaseOptimizer, "apply", lambda *_: _report_trained())


def _report_trained() -> None:
    mpi = sys.modules.get("mpi4py.MPI")  # has finders of its own, so that its import cannot be waited for
    if mpi is not None and mpi.Is_initialized():
        _report_joined(mpi.COMM_WORLD.Get_size())
    stalls.report(stalls.TRAINED)


def _after_first(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """Call ``action`` with the arguments of a function after its first call, and leave the function alone then."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        done = original(*arguments, **options)
        if getattr(owner, name) is call:
            setattr(owner, name, original)
            action(*arguments)
        return done

    setattr(owner, name, call)


def report_killed_workers(popen: Any) -> None:
    """Have each process of ``multiprocessing`` reported that a signal killed: PyTorch's loaders often do not say which.

    SIGTERM is not: with it a pool ends its own workers. ``multiprocessing.popen_fork``; spawned ones are of its class.
    """
    poll = popen.Popen.poll

    @functools.wraps(poll)
    def polled(self: Any, *arguments: Any, **options: Any) -> Any:
        known = self.returncode
        status = poll(self, *arguments, **options)
        if known is None and status is not None and status < 0 and status != -signal.SIGTERM:
            stalls.report(b"%b %d %d" % (stalls.KILLED_WORKER, self.pid, -status))
        return status

    popen.Popen.poll = polled
