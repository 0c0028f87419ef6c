"""A script in a fork that has imported its framework: what ``python SCRIPT ARGUMENT ...`` does, without the imports.

hvdkit's ``sitecustomize`` acts when a module has been imported; where that is long ago, it acts now. What has copied a
function from such a module before keeps the old one: ``horovod.torch`` has ``synchronize`` and ``init`` so.

Usage: ``Warm.stub("rank_script", SCRIPT, ARGUMENT, ...)``
"""

import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """An error ends it as it ends a program."""
    sys.argv[:] = sys.argv[1:]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(sys.argv[0]).resolve().parent), *filter(None, added)]
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    waiting = [one for one in sys.meta_path if type(one).__name__ == "_AfterImport" and one._name in sys.modules]
    for one in reversed(waiting):  # the first to wait is the last in the list
        sys.meta_path.remove(one)
        one._action(sys.modules[one._name])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
