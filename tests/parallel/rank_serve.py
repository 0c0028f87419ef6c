"""What a rank that many tests use does: it runs the functions it is sent, one after the other. See ``ranks.py``.

Usage: rank_serve ADDRESS ADAPTER   ADDRESS: of who sends the functions; ADAPTER: of hvdkit
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

LONGEST_VALUE = 200
MPI = "hvdkit.arrays.mpi"  # holds a communicator to the end of the process
RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


def main() -> None:
    address, adapter = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    faulthandler.register(signal.SIGUSR1)  # says where a rank that hangs is
    fresh = Fresh(f"hvdkit.{adapter}")
    with Client(address, "AF_UNIX") as driver:
        driver.send((int(next((os.environ[name] for name in RANK if name in os.environ), 0)), os.getpid()))
        while (job := driver.recv()) is not None:
            with contextlib.suppress(FileNotFoundError):
                os.chdir(job["directory"])
            driver.send(Job(driver, fresh, job).run())
            if not job["check"]:
                return  # these ranks are of one test alone: what they leave behind ends with them, as with a program
            fresh.restore()


class Job:
    """A function and its arguments; those that only a rank can give, by the names of its parameters, are added here."""

    def __init__(self, driver: Connection, fresh: "Fresh", job: dict[str, Any]) -> None:
        self._driver, self._fresh, self._job = driver, fresh, job
        self._world: Any = None

    def run(self) -> tuple[str, Any]:
        """("done", the pickled result) or ("failed", what happened)."""
        try:
            with warnings.catch_warnings(), pytest.MonkeyPatch.context() as self._monkeypatch:
                function = getattr(module_of(Path(self._job["file"])), self._job["function"])
                result = pickle.dumps(self._call(function, self._job["arguments"]))
            if self._job["check"]:
                self._check()
                self._fresh.check()
        except BaseException as error:
            return "failed", told(error)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
        return "done", result

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        for name in inspect.signature(function).parameters:
            if name not in arguments and hasattr(self, f"_give_{name}"):
                arguments[name] = getattr(self, f"_give_{name}")()
        return function(**arguments)

    def _give_hk(self) -> ModuleType:
        return self._fresh.adapter()

    def _give_on(self) -> ModuleType:
        return importlib.import_module(f"training_{self._give_hk().__name__.rpartition('.')[2]}")

    def _give_world(self) -> Any:
        self._world = self._world or self._give_hk().init()
        return self._world

    def _give_monkeypatch(self) -> pytest.MonkeyPatch:
        return self._monkeypatch

    def _give_everyone(self) -> Callable[[Any], list[Any]]:
        return lambda value: [pickle.loads(one) for one in self._ask("gather", pickle.dumps(value))]  # noqa: S301

    def _give_alone(self) -> Callable[..., Any]:
        def alone(function: FunctionType, fresh: bool = False, **arguments: Any) -> Any:
            wanted = {"file": inspect.getfile(function), "function": function.__name__, "arguments": arguments}
            return pickle.loads(self._ask("alone", (fresh, pickle.dumps(wanted))))  # noqa: S301

        return alone

    def _ask(self, what: str, value: Any) -> Any:
        self._driver.send((what, value))
        return self._driver.recv()

    def _check(self) -> None:
        """Is Horovod as it was, and has every rank called what the others have called?"""
        if self._world is None:
            return
        horovods = [sys.modules[name] for name in ("horovod.torch", "horovod.tensorflow") if name in sys.modules]
        if horovods and not any(hvd.is_initialized() for hvd in horovods):
            raise RuntimeError("the test has shut Horovod down; a test that does so says fresh=True")
        hk = self._give_hk()
        again = hk.init()
        mean = hk.average_metrics({"after the test": float(again.rank)}, again)["after the test"]
        if (again.rank, again.size) != (self._world.rank, self._world.size) or mean != (again.size - 1) / 2:
            raise RuntimeError(f"after the test this is {again} and the ranks' numbers have the mean {mean}")


def module_of(file: Path) -> ModuleType:
    """A test's file as a module, imported once in a rank."""
    if file.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


def told(error: BaseException) -> str:
    """The traceback of an error, with the local variables of the tests' own frames."""
    found = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in found.stack:
        mine = Path(frame.filename).parent == Path(__file__).parent and frame.filename != __file__
        shown = {name: " ".join(value.split())[:LONGEST_VALUE] for name, value in (frame.locals or {}).items() if mine}
        frame.locals = {name: value for name, value in shown.items() if not value.startswith(("<module", "<function"))}
    return "".join(found.format())


class Fresh:
    """Puts back what a test may leave behind, so that the next one finds a process that has just begun.

    Of hvdkit: what was empty, or None, when it was imported. Of Horovod and MPI nothing: whoever ends these needs ranks
    of its own.
    """

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._environment, self._path = dict(os.environ), list(sys.path)
        self._empty: list[tuple[ModuleType, str]] = []
        self._functions: dict[tuple[str, str], Any] = {}
        self._x64 = jax.config.jax_enable_x64 if (jax := sys.modules.get("jax")) else False

    def adapter(self) -> ModuleType:
        """hvdkit's adapter, which is imported by the first who asks: some tests are about a process without."""
        first = self._adapter not in sys.modules
        module = importlib.import_module(self._adapter)
        if first:
            self._empty = [(module, name) for module, name, value in states() if value is None or not value]
            self._note_functions()
        return module

    def check(self) -> None:
        """Is every function and class of hvdkit and Horovod as it was when its module was first seen, or hvdkit's?"""
        for (module, name), value in self._functions.items():
            now = vars(sys.modules[module]).get(name)
            if now is not value and not str(getattr(now, "__module__", "")).startswith("hvdkit."):
                raise RuntimeError(f"the test has left {module}.{name} replaced; monkeypatch puts it back")
        self._note_functions()

    def _note_functions(self) -> None:
        for module, held in [*sys.modules.items()]:
            if module.partition(".")[0] in ("hvdkit", "horovod"):
                functions = {name: one for name, one in vars(held).items() if isinstance(one, FunctionType | type)}
                self._functions.update({(module, name): one for name, one in functions.items()})

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._path
        if private := sys.modules.get("hvdkit.keras.private"):
            private.undo()  # clearing what it remembers would leave Keras guarded, and guarded twice after init()
        if watch := sys.modules.get("hvdkit.observe.allreduce_counts"):
            watch.COUNTS._made = 0  # a test in which one rank fails leaves other numbers, and the watch goes on
        if seeds := sys.modules.get(f"{self._adapter}.seeds"):
            seeds.CURRENT.seeds = None
        for module, name in self._empty:
            value = getattr(module, name)
            if isinstance(value, list | set | dict | WeakSet):
                value.clear()
            else:
                setattr(module, name, None)
        for framework in ("torch", "keras", "tensorflow", "jax"):
            if framework in sys.modules:
                getattr(self, f"_restore_{framework}")(sys.modules[framework])
        random.seed()
        np.random.seed()
        gc.collect()
        gc.freeze()  # what is left is not searched again, after each of the tests that follow

    def _restore_torch(self, torch: Any) -> None:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(int(self._environment["OMP_NUM_THREADS"]))
        torch.seed()

    def _restore_keras(self, keras: Any) -> None:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.utils.clear_session(free_memory=False)

    def _restore_tensorflow(self, tf: Any) -> None:
        tf.config.run_functions_eagerly(False)
        tf.random.set_seed(None)
        # As long as nothing has made the global generator there is none, and checkpoints hold one state less.
        importlib.import_module("tensorflow.python.ops.stateful_random_ops").global_generator = None

    def _restore_jax(self, jax: Any) -> None:
        jax.config.update("jax_enable_x64", self._x64)


def states() -> Iterator[tuple[ModuleType, str, Any]]:
    """The variables of hvdkit's modules that hold what happened: "_name", a container or None."""
    for module in [one for name, one in sys.modules.items() if name.startswith("hvdkit.") and name != MPI]:
        for name, value in vars(module).items():
            private = name.startswith("_") and not name.startswith("__")
            if private and (value is None or isinstance(value, list | set | dict | WeakSet)):
                yield module, name, value
