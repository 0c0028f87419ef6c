"""What all tests find, and how they are shared out to pytest-xdist's workers with ``--dist loadfile``."""

import contextlib
import importlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hvdkit.jobs.launch.lines import SESSIONS

# A slow machine fails no property, nor does the example of an odd day: HVDKIT_FUZZ draws new ones.
settings.register_profile(
    "hvdkit",
    deadline=None,
    derandomize="HVDKIT_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hvdkit")

# Builds of PyTorch for GPUs bring triton, which ends a process that has loaded TensorFlow before it: tensorflow#124205.
with contextlib.suppress(ImportError):
    importlib.import_module("triton")

# Another environment's mpirun is no match for this one's Horovod.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# Nor does what an mpirun that was killed has left in the temporary directory stop one of the same process id.
_SESSIONS = tempfile.TemporaryDirectory(prefix="hvdkit-tests-", ignore_cleanup_errors=True)
os.environ[SESSIONS] = _SESSIONS.name

ON_RANKS = re.compile(r"[\[-](torch|tensorflow|keras(-torch|-jax)?|arrays)-\d+-(gloo|mpi)\b")
"""The name of a test on ranks that stay alive (parallel/ranks.py)."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes all tests of a file; but those on ranks of one framework, whichever files they are in."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFrameworkOrFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = ON_RANKS.search(nodeid)
            return found[1] if found else nodeid.partition("::")[0]

    return ByFrameworkOrFile(config, log) if config.getvalue("dist") == "loadfile" else None
