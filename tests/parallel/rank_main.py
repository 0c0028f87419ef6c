"""What each rank of a parallel test runs: one function of a program file, its result written as JSON.

Usage: python rank_main.py FILE FUNCTION OUT_DIR [JSON-ARGUMENTS]
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

from lean_imports import lean_imports


def main() -> None:
    file, function, out, arguments = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with lean_imports():
        spec.loader.exec_module(module)
    names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")  # before the program may change them
    result = getattr(module, function)(**arguments)
    (out / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
