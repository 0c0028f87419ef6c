"""Step 1: which MPI library this process has loaded, for messages that must name it."""

from __future__ import annotations

import ctypes
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
