"""Measures how a training scales with the number of ranks, and says how sure the numbers are.

Why this room exists: one run at each number of ranks, compared by eye, takes noise, warm-up and too few cores for
scaling. Here whole jobs are repeated in random order, every number has an interval, and what cannot be told is said.

::

    cli            what is typed
    subject ────── what is measured, and where: command, settings, versions, cores
    jobs ───────── which job runs next; goes on where an earlier call was interrupted
       └── measurement  one job: seconds per step and where they go, from the steps that its ranks recorded
    results        the file that keeps what was measured
    analysis ───── speed-up, efficiency, causes, remarks
       └── laws         Amdahl, Gustafson and the Universal Scalability Law, fitted
    show           tables, the plot

``jobs`` takes whatever runs a job as a callable, so that it can be tested without processes. The form of the file is in
docs/json.md.
"""
