"""Reads records of what MPI did on every rank: ours (``hvdkit launch --mpi-profile``), IBM mpitrace's and mpiP's.

Why this room exists: the timeline shows what Horovod did on rank 0. Which MPI calls that made on each rank, how many of
them only negotiate, and what the gradients themselves cost, only a library between the program and MPI can see.

::

    model ─────── a profile of a job: its ranks, and of each the calls of one routine and size, with their purpose
       ├── reading ── (mpitrace, mpip)   from files, whatever wrote them
       ├── measures    totals, sizes with bus bandwidth, spread over the ranks
       ├── causes      what costs the job time, and what stands out
       └── cli         the command: tables, and the same as JSON
"""
