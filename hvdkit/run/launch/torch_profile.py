"""What a job of ``hvdkit launch --torch-profile`` gets, and what it left. The ranks' part: ``steps/torch_profile``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.run.launch.model import Request, Setting
from hvdkit.run.launch.rank import STACKS_DIRECTORY
from hvdkit.steps.torch_profile import VARIABLE

STEPS = (10, 2, 5)
"""Steps that are left out, traced and thrown away, recorded: as ``hvdkit.torch.profile`` has them."""
OPTION, FILES = "--torch-profile", "trace-*-of-*.json.gz"


def settings(request: Request, environ: Mapping[str, str]) -> list[Setting]:
    """What the ranks are told: every Python of theirs then starts with hvdkit's ``sitecustomize``."""
    if request.torch_profile is None:
        return []
    steps = ",".join(map(str, request.torch_profile_steps or STEPS))
    before = request.variables.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
    variables = {VARIABLE: f"{steps}:{request.torch_profile}", "PYTHONPATH": with_ours(before)}
    return [Setting("--torch-profile: each rank profiles itself and writes there", variables=variables)]


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
