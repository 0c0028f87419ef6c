"""Measures how a training scales with the number of ranks, and says how sure the numbers are.

Why this room exists: one run at each number of ranks, compared by eye, takes noise, warm-up and too few cores for
scaling. Here whole jobs are repeated in random order, every number has an interval, and what cannot be told is said.

::

    subject ───── what is measured, and where: command, settings, versions, cores, commit
    measurement ─ one job: seconds per step and where they go, from the steps that its ranks recorded
    accounting ── one more job: what Horovod did meanwhile, from its timeline
       └── scaling   which job runs next; goes on where an earlier call was interrupted
             └── results   the file that keeps what was measured
    intervals ─── medians and their bootstrap intervals
    laws ──────── Amdahl, Gustafson and the Universal Scalability Law, fitted
       └── analysis  speed-up, efficiency, fits and remarks
             ├── tables    as a table, Markdown, CSV
             ├── plots     drawn; report: as an HTML page with everything else
             └── comparison  of two results; side_by_side: as a table, also for ``hvdkit emulate compare``
    cli, scaling_cli, show_cli   what is typed
    synthetic_cli   starts the synthetic benchmark of a framework, a program to measure (``steps.synthetic``)

``scaling`` takes whatever runs a job as a callable, so that it can be tested without processes. The form of the file
is in docs/json.md.
"""
