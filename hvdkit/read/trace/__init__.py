"""Reads the traces of PyTorch's profiler, of one rank or of all, and says what the time of a step is spent on.

::

    from hvdkit.read import trace

    found = trace.summarize(["profile/trace-0-of-2.json.gz", "profile/trace-1-of-2.json.gz"])
    for rank in found.ranks:
        print(rank.rank, rank.times.exposed, rank.times.data)
"""

from hvdkit.read.trace.results import Operator, RankTrace, TraceSummary, TraceTimes
from hvdkit.read.trace.summary import summarize

__all__ = ["Operator", "RankTrace", "TraceSummary", "TraceTimes", "summarize"]
