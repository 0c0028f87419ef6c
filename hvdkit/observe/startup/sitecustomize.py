"""Loaded by every Python of a rank at its start: gets it ready for what is asked, then runs the user's own one.

A signal handler for stacks has to be registered inside the process, a profiler to be started there, and a script on
plain Horovod does not call hvdkit.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_RUN_EAGERLY = "tensorflow.python.eager.polymorphic_function.eager_function_run"
_STRATEGY = "tensorflow.python.distribute.collective_all_reduce_strategy"
_ASKED = (
    ("HVDKIT_STACKS", "steps/stalls", "hand_in_stacks_when_asked", None),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_init", "horovod.common.basics"),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_killed_workers", "multiprocessing.popen_fork"),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_process_groups", "torch.distributed.distributed_c10d"),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_strategies", _STRATEGY),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_jax", "jax._src.distributed"),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_torch_steps", "torch.optim.optimizer"),
    ("HVDKIT_STACKS", "observe/launch_reports", "report_keras_steps", "keras.src.optimizers.base_optimizer"),
    ("HVDKIT_TORCH_PROFILE", "observe/torch_profile", "profile_steps", "torch.optim.optimizer"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "torch_loaders", "torch.utils.data.dataloader"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "torch_optimizers", "torch.optim.optimizer"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "torch_saving", "torch.serialization"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "torch_evaluation", "torch.nn.modules.module"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "horovod_waits", "horovod.torch.mpi_ops"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "tensorflow_iterators", "tensorflow.python.data.ops.iterator_ops"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "keras_fit", "keras.src.callbacks.callback_list"),
    ("HVDKIT_MARK_STEPS", "observe/step_marks", "keras_saving", "keras.src.models.model"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "torch_seeds", "torch.random"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "torch_loaders", "torch.utils.data.dataloader"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "torch_optimizers", "torch.optim.optimizer"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "torch_dropout", "torch.nn.functional"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "torch_batch_norm", "torch.nn.modules.module"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "tensorflow_eagerly", _RUN_EAGERLY),
    ("HVDKIT_TRIAL", "observe/trial_marks", "tensorflow_seeds", "tensorflow.python.framework.random_seed"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "tensorflow_iterators", "tensorflow.python.data.ops.iterator_ops"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "keras_seeds", "keras.src.random.seed_generator"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "keras_dropout", "keras.src.layers.regularization.dropout"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "keras_batch_norm", "keras.src.layers.normalization.batch_normalization"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "keras_optimizers", "keras.src.optimizers.base_optimizer"),
    ("HVDKIT_TRIAL", "observe/trial_marks", "keras_epochs", "keras.src.callbacks.callback_list"),
)
"""What a variable asks for: a file of hvdkit, a function in it, and a module whose import it waits for."""


class _AfterImport(MetaPathFinder):
    """Finds a module as Python itself does, and does something with it once it has been executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As ``importlib`` has it; None for every other module."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        others = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport)]
        waiting = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, waiting), None) or PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _run(file: str, function: str, *arguments: ModuleType) -> None:
    """Run a function of hvdkit by its file's path: hvdkit itself need not be installed for this Python."""
    spec = importlib.util.spec_from_file_location(f"_hvdkit_{Path(file).name}", _HERE.parents[1] / f"{file}.py")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, function)(*arguments)


def _run_the_one_behind() -> None:
    """The ``sitecustomize`` that this one hides, of the user or the distribution."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


# Only as sitecustomize: not when it is imported by its full name, to be looked at.
if __name__ == "sitecustomize":
    for variable, file, function, awaited in _ASKED:
        if not os.environ.get(variable):
            continue
        if awaited is None:
            _run(file, function)
        else:
            sys.meta_path.insert(0, _AfterImport(awaited, functools.partial(_run, file, function)))
    _run_the_one_behind()
