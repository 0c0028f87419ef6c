"""Reads the traces of PyTorch's profiler, of one rank or of all, and says what the time of a step is spent on.

Why this room exists: a timeline (``timeline``) is what Horovod did; a trace is what the training did meanwhile:
operators, kernels, data loading, and the communication of any library.

::

    from hvdkit.read import trace

    found = trace.summarize(["profile/trace-0-of-2.json.gz", "profile/trace-1-of-2.json.gz"])
    for rank in found.ranks:
        print(rank.rank, rank.times.exposed, rank.times.data)

What each module is for: ``reader`` the file to those events that count, as arrays, and what each is (computation,
communication, data), ``summary`` arrays to numbers, ``results`` these, ``causes`` numbers to what costs time,
``merging`` a trace and a timeline on one axis, ``cli`` the commands.
"""

from hvdkit.read.trace.results import Operator, RankTrace, TraceSummary, TraceTimes
from hvdkit.read.trace.summary import summarize

__all__ = ["Operator", "RankTrace", "TraceSummary", "TraceTimes", "summarize"]
