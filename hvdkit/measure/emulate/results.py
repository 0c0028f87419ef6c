"""The file that keeps what was measured: every collective of every trial."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.common.files import replacing
from hvdkit.errors import DataError, DataNotFoundError
from hvdkit.measure.emulate import plan as plans
from hvdkit.measure.emulate.check import ALLREDUCE, REDUCE_SCATTER
from hvdkit.measure.emulate.plan import Plan

_MARK = "emulate results"
VERSION = 1
_ASKED = {"engine": str, "collective": str, "algorithm": str, "ranks": int, "hosts": int, "check": bool}
"""What readers of a file rely on; the rest of ``asked`` is for people."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective of one trial; times in seconds.

    Attributes:
        trial: from 0, the warm-up left out.
        index: position in ``plan.collectives``.
        nbytes: that each rank gives.
        skew_s: from the first rank's arrival to the last one's, >= 0.
        transfer_s: from the last rank's arrival until the last rank is done, >= 0.
        slowest_s: the longest of the ranks' own durations, arrival to completion.
        slowest_rank: whose that is.
        ranks_s: every rank's own duration, by rank. The rank that came last has the shortest.
    """

    trial: int
    index: int
    nbytes: int
    skew_s: float
    transfer_s: float
    slowest_s: float
    slowest_rank: int
    ranks_s: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "trial": self.trial,
            "index": self.index,
            "size": self.nbytes,
            "skew_s": self.skew_s,
            "transfer_s": self.transfer_s,
            "slowest_s": self.slowest_s,
            "slowest_rank": self.slowest_rank,
            "ranks_s": list(self.ranks_s),
        }


@dataclass
class Results:
    """What was measured.

    Attributes:
        asked: engine, collective, algorithm, ranks, hosts (a number), check, ...: see ``schema.json``.
        environment: versions, cores and how it was launched.
        plan: what was replayed.
        samples: in the order of trials and of the plan.
        notes: what a reader of the numbers should know, full sentences.
    """

    asked: dict[str, Any]
    environment: dict[str, Any]
    plan: Plan
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write(path: Path, results: Results, summary: dict[str, Any] | None = None) -> None:
    """Write the file; an older one stays whole until the new one is complete.

    Args:
        path: the file.
        results: what was measured.
        summary: what follows from it (``analysis.analyse(results).as_json()``), None where nothing was measured.
    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    head = {
        "hvdkit": _MARK,
        "version": VERSION,
        "asked": results.asked,
        "environment": results.environment,
        "notes": results.notes,
        "plan": results.plan.as_json(),
        "summary": None if summary is None else _completed(summary, results),
    }
    text = json.dumps(head, indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(one.as_json(), allow_nan=False)}" for one in results.samples)
    with replacing(path) as file:  # a line for each sample, so that a long file can be read and compared
        file.write(f'{text[:-2]},\n "samples": [\n{lines}\n ]\n}}\n'.encode())


def _completed(summary: dict[str, Any], results: Results) -> dict[str, Any]:
    """The summary with nccl-tests' two other columns: the operation, and how many elements were wrong."""
    adds = results.asked.get("collective") in (ALLREDUCE, REDUCE_SCATTER)
    more = {"redop": "sum" if adds else "none", "wrong": 0 if results.asked.get("check") else None}
    return {**summary, "rows": [{**more, **row} for row in summary["rows"]]}


def read(path: Path) -> Results:
    """Read a file of ``write``.

    Raises:
        DataNotFoundError: there is none.
        DataError: it cannot be read, is something else, or holds what cannot be.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if content["hvdkit"] != _MARK or content["version"] != VERSION:
            raise ValueError("it says that it is something else")
        asked = dict(content["asked"])
        for name, kind in _ASKED.items():
            if not isinstance(asked[name], kind) or (kind is int and asked[name] < 1):
                raise ValueError(f"its {name} is {asked[name]!r}")
        plan = plans.from_json(content["plan"])
        samples = [_sample(value, plan, asked["ranks"]) for value in content["samples"]]
        return Results(asked, dict(content["environment"]), plan, samples, [str(note) for note in content["notes"]])
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"No results at {str(path)!r}; expected a file that 'hvdkit emulate --json' wrote."
        ) from error
    except KeyError as error:
        raise DataError(f"{path} is not a file of 'hvdkit emulate' (version {VERSION}): {error} is missing.") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, DataError) as error:
        raise DataError(f"{path} is not a file of 'hvdkit emulate' (version {VERSION}): {error}.") from error


def _sample(value: dict[str, Any], plan: Plan, ranks: int) -> Sample:
    times_of = ("skew_s", "transfer_s", "slowest_s")
    skew_s, transfer_s, slowest_s = (value[name] for name in times_of)
    own = tuple(value["ranks_s"])
    sample = Sample(
        value["trial"], value["index"], value["size"], skew_s, transfer_s, slowest_s, value["slowest_rank"], own
    )
    whole = (sample.trial, sample.index, sample.nbytes, sample.slowest_rank)
    times = (sample.skew_s, sample.transfer_s, sample.slowest_s, *sample.ranks_s)
    if (
        any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in whole)
        or any(isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf for at in times)
        or len(sample.ranks_s) != ranks
        or sample.slowest_rank >= ranks
        or sample.index >= len(plan.collectives)
        or sample.nbytes != plan.collectives[sample.index].nbytes
    ):
        raise ValueError(f"a sample is {value!r}, with {ranks} ranks and {len(plan.collectives)} collectives a step")
    return sample
