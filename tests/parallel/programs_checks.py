"""What the ranks of a start that runs many checks do with each: see checks_of_ranks.py, which reads the results."""

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_checks(checks: Mapping[str, Callable[[], Any]], directory: str, rank: int) -> None:
    """Run the checks in order and write ``NAME.RANK.json`` after each: what this rank found, or its stack trace."""
    for name, check in checks.items():
        try:
            outcome = {"found": check()}
        except Exception:
            outcome = {"failed": traceback.format_exc()}
        (Path(directory) / f"{name}.{rank}.json").write_text(json.dumps(outcome))
