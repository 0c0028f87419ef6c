"""One verdict from everything that was recorded of a job: which cause costs most, how much, and what to do.

A timeline, traces, MPI profiles and the times of the steps each see a part of a job; here they are joined.
"""
