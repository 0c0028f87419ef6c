"""Records what MPI did on every rank, and reads such records: ours, IBM mpitrace's and mpiP's.

Why this room exists: the timeline shows what Horovod did on rank 0. Which MPI calls that made on each rank, how many of
them only negotiate, and what the gradients themselves cost, only a library between the program and MPI can see.

::

    interposer/ ─ C: stands between a program and MPI, counts calls, writes mpi_profile.RANK.json
       └── library    compiles it with the MPI's own mpicc, once, and keeps it
    recording ─── hvdkit launch --mpi-profile: what a job gets, and what it left
    model ─────── a profile of a job: its ranks, and of each the calls of one routine and size, with their purpose
       ├── reading ── (mpitrace, mpip)   from files, whatever wrote them
       ├── measures    totals, sizes with bus bandwidth, spread over the ranks
       ├── causes      what costs the job time, and what stands out
       └── cli         the command: tables, and the same as JSON
"""
