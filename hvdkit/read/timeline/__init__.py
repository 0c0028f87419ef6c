"""Reads the file that Horovod writes with HOROVOD_TIMELINE, says where the time went and what to try.

::

    from hvdkit.read import timeline
    for operation in timeline.read("timeline.json"):
        print(operation.tensor, operation.kind, operation.bytes)
    for cause in timeline.summarize("timeline.json").causes:
        print(cause.sentence(), cause.advice)
"""

from hvdkit.read.timeline.reader import CycleMark, Operation, Phase, Recording, read
from hvdkit.read.timeline.results import TimelineSummary
from hvdkit.read.timeline.summary import summarize

__all__ = ["CycleMark", "Operation", "Phase", "Recording", "TimelineSummary", "read", "summarize"]
