"""Reads the file that Horovod writes with HOROVOD_TIMELINE, says where the time went and what to try.

::

    from hvdkit import timeline

    for operation in timeline.read("timeline.json"):
        print(operation.tensor, operation.kind, operation.bytes)
    summary = timeline.summarize("timeline.json")
    for finding in timeline.diagnose(summary):
        print(finding.sentence, finding.advice)

What each module is for: ``model`` one operation and its phases, ``reader`` and ``assemble`` file to operations as a
stream, ``columns``, ``measures`` and ``summary`` operations to numbers, ``diagnosis`` numbers to sentences, ``show``
and ``cli`` the command.
"""

from hvdkit.read.timeline.diagnosis import Finding, diagnose
from hvdkit.read.timeline.model import CycleMark, Operation, Phase
from hvdkit.read.timeline.reader import Recording, read
from hvdkit.read.timeline.results import Summary
from hvdkit.read.timeline.summary import summarize

__all__ = ["CycleMark", "Finding", "Operation", "Phase", "Recording", "Summary", "diagnose", "read", "summarize"]
