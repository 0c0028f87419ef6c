"""Says what is installed, what does not fit together, and how to fix it; of one machine, or inside a job.

::

    cli.py        the command ``hvdkit doctor``: facts and findings as text and as JSON
    facts.py      what can be known about an environment: frozen values, built by hand in tests
    host.py       facts that need no child: cores, accelerators, environment variables, ``mpirun``
    probe.py      starts child processes with a time limit, trains on 2 ranks that ``hvdkit launch`` starts (``hvdkit
                  test`` shows the same step by step), and puts the facts together
    inside.py     runs in a child process; the only file that imports frameworks, Horovod and mpi4py
    finding.py    a finding, and how it is shown; ``hvdkit check`` and a launch take it without the checks
    checks.py     the table of checks for one machine
    job.py        ``--job``: what each rank of a job says of itself, the table of checks for a job, text and JSON
"""
