"""Runs a script in the place of another: ``as_script SOURCE SCRIPT.py ARGUMENT ...``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from hvdkit.observe import trial


def main(source: str, script: str) -> None:
    """Run what SOURCE holds as SCRIPT.py would run: with its name, directory and arguments, from fixed seeds."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = script
    sys.argv[:] = [script, *sys.argv[3:]]
    sys.path.insert(0, str(Path(script).resolve().parent))  # -P has left it out
    here = trial.current()
    trial.seed(here.seed)
    try:
        exec(compile(Path(source).read_bytes(), script, "exec"), vars(module))  # noqa: S102 - the user's own script
    finally:
        here.write()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
