"""What a job of ``hvdkit launch --torch-profile`` gets, and what it left. The ranks' part: ``steps/torch_profile``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hvdkit.run.launch.rank import STACKS_DIRECTORY
from hvdkit.steps.torch_profile import VARIABLE

STEPS = (10, 2, 5)
"""Steps that are left out, traced and thrown away, recorded: as ``hvdkit.torch.profile`` has them."""
OPTION, FILES = "--torch-profile", "trace-*-of-*.json.gz"


def variables(directory: Path, steps: tuple[int, int, int], python_path: str) -> dict[str, str]:
    """The environment variables of the ranks: every Python of theirs then starts with hvdkit's ``sitecustomize``.

    Args:
        python_path: PYTHONPATH as it would be otherwise, "" for nothing.
    """
    return {VARIABLE: f"{','.join(map(str, steps))}:{directory}", "PYTHONPATH": with_ours(python_path)}


def with_ours(python_path: str) -> str:
    """PYTHONPATH with hvdkit's ``sitecustomize`` first."""
    return os.pathsep.join([str(STACKS_DIRECTORY), *filter(None, [python_path])])


def outcome(directory: Path, files: Sequence[Path]) -> str:
    """A sentence on what a job left.

    Args:
        files: the traces of this job.
    """
    count = len(files)
    if not count:
        return (
            "no rank wrote a profile: none took enough steps of a PyTorch optimizer (--torch-profile-steps), or its "
            "Python ignores PYTHONPATH (python -I and -S)."
        )
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    return f"PyTorch profile of {ranks}; look at it with 'hvdkit trace summary {directory}'."
