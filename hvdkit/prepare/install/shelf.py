"""Wheels of Horovod for a whole site or an image: a directory that one person fills and others install from.

::

    DIR/<key>/horovod-0.28.1-...whl   the wheel
              manifest.json           its SHA-256 and, field by field, what it was built for and with
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import InstallError
from hvdkit.prepare.install.cache import MANIFEST, Cache
from hvdkit.prepare.install.facts import BuildFacts
from hvdkit.prepare.install.plan import BuildPlan, plan_of_ready
from hvdkit.prepare.install.requirements import Options

_TEXT_BYTES = 1 << 20
"""A manifest is much smaller."""


@dataclass(frozen=True)
class Shelf:
    """A directory of wheels, which the user named: it may be another's, but not all the world's to write."""

    directory: Path

    @property
    def _cache(self) -> Cache:
        return Cache(self.directory.absolute(), ".", named=True)

    def put(self, wheel: Path, plan: BuildPlan) -> Path:
        """Keep a wheel in place of any other of the same key; returns its path here.

        Raises:
            InstallError: it cannot be written.
        """
        try:
            return self._cache.put(plan.key, wheel, plan.key_fields)
        except OSError as error:
            raise InstallError(
                f"{self.directory} cannot be written ({error.strerror}); name another directory."
            ) from error

    def find(self, facts: BuildFacts, options: Options) -> tuple[Path, BuildPlan]:
        """The wheel that fits here, and what it is.

        Raises:
            InstallError: there is none, or it is not what was put there.
        """
        misfits = []
        for manifest in sorted(self.directory.glob(f"*/{MANIFEST}")):
            key = manifest.parent.name
            try:
                plan = plan_of_ready(facts, options, key, _fields(manifest))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                misfits.append(f"{key[:12]} cannot be read ({error})")
                continue
            if isinstance(plan, BuildPlan):
                wheel = self._cache.get(key)
                if wheel is not None:
                    return wheel, plan
            else:
                misfits.append(f"{key[:12]} is for {plan}")
        found = "; ".join(misfits) if misfits else "it has no wheel"
        raise InstallError(
            f"No wheel of Horovod in {self.directory} fits this environment: {found}. Make one in an environment like "
            f"this with 'hvdkit install --wheel {self.directory}', or install what it was built for."
        )


def _fields(manifest: Path) -> Mapping[str, Any]:
    with manifest.open("rb") as file:
        text = file.read(_TEXT_BYTES)
    fields = json.loads(text)["key"]
    if not isinstance(fields, dict):
        raise TypeError("its key is no object")
    return fields
