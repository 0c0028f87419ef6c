"""Step 1: which MPI library this process has loaded, for messages that must name it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

_MPI_MAX_LIBRARY_VERSION_STRING = 8192  # the larger of Open MPI's 256 and MPICH's 8192


def loaded_mpi() -> str | None:
    """The version line of the MPI library loaded in this process ("Open MPI v5.0.11, ..."), None without one.

    Source: MPI 4.1, section 9.1.1, MPI_Get_library_version (may be called before MPI_Init).
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if "/libmpi" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path, mode=getattr(ctypes, "RTLD_NOLOAD", 4))
        if hasattr(library, "MPI_Get_library_version"):
            text, length = ctypes.create_string_buffer(_MPI_MAX_LIBRARY_VERSION_STRING), ctypes.c_int()
            library.MPI_Get_library_version(text, ctypes.byref(length))
            return text.value.decode(errors="replace").strip().splitlines()[0].split(",")[0]
    return None


def finds_ranks(environ: Mapping[str, str]) -> bool:
    """Whether the loaded MPI library has what it needs to find the ranks that a launcher started.

    Open MPI 5 knows PMIx only; MPICH and its relatives know PMI and, newer ones, PMIx. Where neither is offered, each
    process becomes rank 0 of 1 ("singleton").

    Args:
        environ: the process environment.
    Source: PMIx standard 4.1, section 3.1 (PMIX_RANK); MPICH, PMI_RANK and PMI_FD of the PMI-1 wire protocol.
    """
    offered = {family for family in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if family in environ}
    if (loaded_mpi() or "").startswith("Open MPI"):
        return "PMIX_RANK" in offered
    return bool(offered)
