"""Says what is installed, what does not fit together, and how to fix it.

::

    facts.py      what can be known about an environment: frozen values, built by hand in tests
    inside.py     runs in a child process; the only file that imports frameworks, Horovod and mpi4py
    children.py   starts those processes with a time limit; a crash or a hang is an outcome
    probe.py      what each child shall try, and the facts put together
    host.py       facts that need no child: cores, accelerators, environment variables, ``mpirun``
    check_*.py    the checks: facts in, findings out
    report.py     facts and findings as text and as JSON
    cli.py        the command ``hvdkit doctor``, and the table of its checks
"""
