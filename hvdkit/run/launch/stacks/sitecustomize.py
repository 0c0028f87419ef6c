"""Loaded by every Python of a rank at its start: makes it ready to hand in its stacks, then runs the user's own one.

A signal handler has to be registered inside the process, and a script on plain Horovod does not call hvdkit.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run(path: Path) -> None:
    """Run a file of hvdkit by its path: hvdkit itself need not be installed for this Python."""
    spec = importlib.util.spec_from_file_location("_hvdkit_stalls", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.hand_in_stacks_when_asked()


def _run_the_one_behind() -> None:
    """The ``sitecustomize`` that this one hides, of the user or the distribution."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


# Only as sitecustomize: not when it is imported by its full name, to be looked at.
if __name__ == "sitecustomize":
    _run(_HERE.parents[1] / "steps" / "stalls.py")
    _run_the_one_behind()
