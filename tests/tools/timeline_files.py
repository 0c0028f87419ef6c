"""Timelines made for the tests of hvdkit timeline's tools."""

import json
from pathlib import Path

DATA = Path(__file__).parent.parent / "data" / "timelines"
ATPESC = DATA / "atpesc-2023-cpu-8ranks.json"
REAL = sorted(DATA.glob("*.json"))
EPOCH = 1_700_000_000_000_000


def metadata(names, epoch=EPOCH):
    """The first events of a file: its start, then a name for each pid from 1."""
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": epoch}}]
    for pid, name in enumerate(names, start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
    return events


def allreduce(pid, ts, negotiate=10, collective=100, memcpy=None, shape="[25]"):
    """The events of one operation: negotiation, one microsecond, then the phases without a gap."""
    events = [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": ts, "pid": pid},
        {"ph": "E", "ts": ts + negotiate, "pid": pid},
        {"ph": "B", "name": "ALLREDUCE", "ts": (now := ts + negotiate + 1), "pid": pid},
    ]
    phases = [("MPI_ALLREDUCE", collective)]
    if memcpy is not None:
        phases = [("MEMCPY_IN_FUSION_BUFFER", memcpy), *phases, ("MEMCPY_OUT_FUSION_BUFFER", memcpy)]
    for name, duration in phases:
        events.append({"ph": "B", "name": name, "ts": now, "pid": pid})
        now += duration
        events.append({"ph": "E", "ts": now, "pid": pid})
    events.append({"ph": "E", "ts": now, "pid": pid, "args": {"dtype": "float32", "shape": shape}})
    return events


def write(path, events):
    """A file as Horovod writes it."""
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "]\n")
    return path
