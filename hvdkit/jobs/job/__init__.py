"""Writes batch scripts for PBS, Slurm, LSF and Cobalt, and MPIJobs for Kubernetes.

::

    options, sites/*.toml ── site       what the user asks for, what a site wants said and gives: the queue that fits
       └── script                       the script, its directives by one row per batch system
    options ── kubernetes               an MPIJob, which no site has a say in

It is a room of its own beside ``launch`` because it starts nothing and runs elsewhere: on a login node, for a machine
that may have another Python, MPI and launcher. All it shares with ``launch`` is the command line that it writes.
"""
