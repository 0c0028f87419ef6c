"""Loaded by every Python of a rank at its start: gets it ready for what is asked, then runs the user's own one.

A signal handler for stacks has to be registered inside the process, a profiler to be started there, and a script on
plain Horovod does not call hvdkit.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ASKED = {
    "HVDKIT_STACKS": ("stalls", "hand_in_stacks_when_asked"),
    "HVDKIT_TORCH_PROFILE": ("torch_profile", "profile_when_asked"),
}
"""What a variable asks for: a file of hvdkit/steps and a function in it."""


def _run(file: str, function: str) -> None:
    """Run a function of hvdkit by its file's path: hvdkit itself need not be installed for this Python."""
    spec = importlib.util.spec_from_file_location(f"_hvdkit_{file}", _HERE.parents[2] / "steps" / f"{file}.py")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, function)()


def _run_the_one_behind() -> None:
    """The ``sitecustomize`` that this one hides, of the user or the distribution."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


# Only as sitecustomize: not when it is imported by its full name, to be looked at.
if __name__ == "sitecustomize":
    for variable, where in _ASKED.items():
        if variable in os.environ:
            _run(*where)
    _run_the_one_behind()
