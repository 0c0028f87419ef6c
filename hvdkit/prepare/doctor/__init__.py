"""Says what is installed, what does not fit together, and how to fix it; of one machine, or inside a job.

::

    cli.py        the command ``hvdkit doctor``
    facts.py      what can be known about an environment: frozen values, built by hand in tests
    inside.py     runs in a child process; the only file that imports frameworks, Horovod and mpi4py
    probe.py      starts those processes with a time limit, and puts the facts together
    host.py       facts that need no child: cores, accelerators, environment variables, ``mpirun``
    two_ranks.py  trains on 2 ranks that ``hvdkit launch`` starts; ``hvdkit test`` shows the same step by step
    finding.py    a finding, and how it is shown
    checks.py     the table of checks for one machine
    report.py     facts and findings as text and as JSON
    job.py        ``--job``: what each rank of a job says of itself, the table of checks for a job, text and JSON
"""
