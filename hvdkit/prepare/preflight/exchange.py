"""Brings the ranks' reports together.

In a job: over Horovod where it connects the ranks, else over mpi4py, else each rank has its own alone. For
``hvdkit launch --preflight``, which outlives the ranks: through files, one for each rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hvdkit.errors import TopologyMismatchError
from hvdkit.prepare.preflight.report import Place, RankReport
from hvdkit.steps import starting
from hvdkit.steps.mpi_library import loaded_mpi

Gather = Callable[[str], list[str]]


def meet(own: RankReport) -> list[RankReport]:
    """The reports of all ranks that this one can reach, by rank; its own alone when it reaches none."""
    own, over_horovod = _ask_horovod(own)
    own, over_mpi = _ask_mpi(own)
    for gather, place in ((over_horovod, own.horovod), (over_mpi, own.mpi)):
        if gather is not None and (place.size == own.size or (place.size or 1) > 1):
            gather("")  # the ranks meet here, so that their clocks are read at the same time
            return _by_rank(gather(_text(replace(own, clock=time.time()))))
    return [replace(own, clock=time.time())]


def write(directory: Path, own: RankReport) -> None:
    """Leave this rank's report for ``read``, complete or not at all."""
    file = directory / f"rank-{own.rank}.json"
    file.with_suffix(".part").write_text(_text(own), encoding="utf-8")
    file.with_suffix(".part").rename(file)


def read(directory: Path) -> list[RankReport]:
    """The reports that ranks have left, by rank."""
    return _by_rank(file.read_text(encoding="utf-8") for file in directory.glob("rank-*.json"))


def _text(report: RankReport) -> str:
    return msgspec.json.encode(report).decode()


def _by_rank(texts: Iterable[str]) -> list[RankReport]:
    return sorted((msgspec.json.decode(text, type=RankReport) for text in texts), key=lambda report: report.rank)


def _ask_horovod(own: RankReport) -> tuple[RankReport, Gather | None]:
    errors = []
    for name in ("torch", "tensorflow"):
        try:
            hvd: Any = importlib.import_module(f"horovod.{name}")
            with contextlib.suppress(TopologyMismatchError):  # a finding of its own
                starting.start(hvd, os.environ)
        except Exception as error:  # an extension can fail in any way, and each is a finding
            errors.append(f"{name}: {_first_line(error)}")
        else:
            library = (loaded_mpi() or "MPI") if hvd.mpi_enabled() else "Gloo"
            local_rank = hvd.local_rank() if own.local_rank is None else own.local_rank
            found = replace(own, horovod=Place(hvd.rank(), hvd.size()), library=library, local_rank=local_rank)
            return found, partial(hvd.allgather_object, name="hvdkit.preflight")
    return replace(own, horovod=Place(error="; ".join(errors))), None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ask_mpi(own: RankReport) -> tuple[RankReport, Gather | None]:
    if own.library == "Gloo":
        return replace(own, mpi=Place(error="not asked: the job runs over Gloo")), None
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except Exception as error:  # a missing package, or a library that does not load
        return replace(own, mpi=Place(error=_first_line(error))), None
    comm = mpi.COMM_WORLD
    return replace(own, mpi=Place(comm.Get_rank(), comm.Get_size())), comm.allgather
