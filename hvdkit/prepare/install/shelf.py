"""Wheels of Horovod for a whole site or an image: a directory that one person fills and others install from.

::

    DIR/<key>/horovod-0.28.1-...whl   the wheel
              manifest.json           its SHA-256 and, field by field, what it was built for and with
"""

from __future__ import annotations

import json
from pathlib import Path

from hvdkit.common import files
from hvdkit.errors import InstallError
from hvdkit.prepare.install.cache import MANIFEST, Cache
from hvdkit.prepare.install.facts import BuildFacts
from hvdkit.prepare.install.plan import BuildPlan, plan_of_ready
from hvdkit.prepare.install.requirements import Options

_TEXT_BYTES = 1 << 20
"""A manifest is much smaller."""


def shelf(directory: Path) -> Cache:
    """A directory of wheels, which the user named: it may be another's, but not all the world's to write."""
    return Cache(directory.absolute(), ".", named=True)


def find(directory: Path, facts: BuildFacts, options: Options) -> tuple[Path, BuildPlan]:
    """The wheel in a directory that fits here, and what it is.

    Raises:
        InstallError: there is none, or it is not what was put there.
    """
    misfits = []
    for manifest in sorted(directory.glob(f"*/{MANIFEST}")):
        key = manifest.parent.name
        try:
            fields = json.loads(files.content(manifest, most=_TEXT_BYTES))["key"]
            plan = plan_of_ready(facts, options, key, fields)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            misfits.append(f"{key[:12]} cannot be read ({error})")
            continue
        if isinstance(plan, BuildPlan):
            wheel = shelf(directory).get(key)
            if wheel is not None:
                return wheel, plan
        else:
            misfits.append(f"{key[:12]} is for {plan}")
    found = "; ".join(misfits) if misfits else "it has no wheel"
    raise InstallError(
        f"No wheel of Horovod in {directory} fits this environment: {found}. Make one in an environment like this "
        f"with 'hvdkit install --wheel {directory}', or install what it was built for."
    )
