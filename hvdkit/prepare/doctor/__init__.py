"""Says what is installed, what does not fit together, and how to fix it; of one machine, or inside a job.

::

    cli.py        the command ``hvdkit doctor``: facts and findings as text and as JSON
    facts.py      what can be known about an environment: frozen values, built by hand in tests
    probe.py      gathers them: looks at the machine, starts child processes with a time limit, and trains on 2 ranks
                  that ``hvdkit launch`` starts; ``hvdkit test`` shows that step by step
    inside.py     runs in a child process; the only file that imports frameworks, Horovod and mpi4py
    checks.py     a finding and how it is shown; the table of checks for one machine
    job.py        ``--job``: what each rank of a job says of itself, the table of checks for a job, text and JSON
"""
