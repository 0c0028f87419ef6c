"""Starts a command on N processes of this machine, over MPI or over Gloo.

::

    command, facts ── (machine, horovod, mpi)     what is asked for, and what there is
       └── plan ── (open_mpi, hydra, horovodrun)  command line and environment, with a reason for each setting
             ├── show                             the plan as text: --dry-run, --explain
             └── supervise ── (output, outcome)   one process that watches the job
                     ⇅
                   rank                           one process beside each rank

``plan`` is pure: facts in, command line and environment out, through one small module per launcher (``open_mpi``,
``hydra``, ``horovodrun``). ``supervise`` starts that command line with ``rank`` put before the user's command: each
rank's output and exit status come back over a socket of hvdkit's own. The launchers' own reports are not used because
they lose information: Open MPI glues the unfinished last lines of two ranks together, Hydra mixes ranks within a line,
horovodrun dies on bytes that are not UTF-8 and exits with 1 whatever the status of the rank was.
"""
