"""Which MPI a version text belongs to, and which of them can start each other's programs."""

from __future__ import annotations

import re

_PATTERNS = (
    ("Open MPI", r"^Open MPI v([\d.]+\w*)"),
    ("Open MPI", r"\((?:Open MPI|OpenRTE)\) ([\d.]+\w*)"),
    ("IBM Spectrum MPI", r"IBM Spectrum MPI\D*([\d.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library(?:.*Version)?\D*([\d.]*)"),
    ("Cray MPICH", r"CRAY MPICH version ([\d.]+)"),
    ("MVAPICH", r"MVAPICH2?\D* Version\s*:?\s*([\d.]+\w*)"),
    ("MPICH", r"^MPICH Version\s*:\s*([\d.]+\w*)"),
    ("MPICH", r"^HYDRA build details:\s*Version:\s*([\d.]+\w*)"),
)
"""Name -> pattern of MPI_Get_library_version's or ``mpirun --version``'s text; the first that is found counts."""

_FAMILIES = {
    "Open MPI": "Open MPI",
    "IBM Spectrum MPI": "Open MPI",
    "MPICH": "MPICH",
    "Intel MPI": "MPICH",
    "Cray MPICH": "MPICH",
    "MVAPICH": "MPICH",
}
"""Implementations that share a way to tell a process its rank (PRRTE's PMIx, Hydra's PMI)."""


def identify(text: str) -> tuple[str, str]:
    """Implementation and version in a version text, ("", "") when it is not known.

    >>> identify("Open MPI v5.0.11, package: Open MPI user@localhost Distribution")
    ('Open MPI', '5.0.11')
    """
    for name, pattern in _PATTERNS:
        found = re.search(pattern, text.strip(), re.MULTILINE)
        if found:
            return name, found.group(1).rstrip(".")
    return "", ""


def same_family(one: str, other: str) -> bool:
    """Whether programs of one implementation know their rank when the other's launcher starts them.

    True also when one of them is unknown: nothing can be said against it.
    """
    if one not in _FAMILIES or other not in _FAMILIES:
        return True
    return _FAMILIES[one] == _FAMILIES[other]


def major(version: str) -> str:
    """First number of a version: "5" of "5.0.11"."""
    return version.partition(".")[0]
