"""One verdict from everything that was recorded of a job: which cause costs most, how much, and what to do.

Why this room exists: a timeline, traces, MPI profiles and the times of the steps each see a part of a job. What they
say is compared here, by the time that is lost.

What each module is for: ``sources`` which file is what, ``step_table`` the times of the steps as arrays,
``step_causes`` what these say, ``exchange`` what a timeline adds to them about the allreduce, ``join`` what all of them
say together, ``results`` how the job was started and the answer, ``cli`` the command.
"""

from hvdkit.read.explain.join import explain

__all__ = ["explain"]
