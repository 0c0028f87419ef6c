"""Traces made for the tests of hvdkit trace; times in milliseconds."""

import gzip
import json

MS = 1000.0


def event(name, start, length, cat="cpu_op", tid=7, pid=42, **arguments):
    """A complete event."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid,
        "ts": start * MS, "dur": length * MS, "args": arguments,
    }  # fmt: skip


def step(number, start, length):
    return event(f"ProfilerStep#{number}", start, length, "user_annotation")


def data(start, length):
    return event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, length, "user_annotation")


def gloo(start, length, tid=7):
    return event("gloo:all_reduce", start, length, "user_annotation", tid)


def wait(start, length):
    return event("hvdkit:allreduce_wait", start, length, "user_annotation")


def kernel(name, start, length, stream=7):
    return event(name, start, length, "kernel", tid=stream, pid=0, stream=stream)


def text(*events, rank=None, size=2, behind=True):
    """The JSON as PyTorch writes it: events in the middle, some entries around them."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}]}
    if rank is not None:
        head["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": size, "pg_config": [{"a": [1]}, {}]}
    body = ",\n".join("  " + json.dumps(one, indent=1) for one in events)
    tail = ',\n  "traceName": "x.json",\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 1759000000000000000'
    return json.dumps(head)[:-1] + ',\n  "traceEvents": [\n' + body + "\n  ]" + (tail if behind else "") + "\n}\n"


def write(path, *events, **options):
    content = text(*events, **options).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
