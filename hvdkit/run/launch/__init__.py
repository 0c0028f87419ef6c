"""Starts a command on N processes, over MPI or over Gloo, on this machine or on several hosts.

::

    command, placement, facts ── (machine)            what is asked for, and what there is
       └── plan ── (mpirun, horovodrun, batch,    command line and environment, with a reason for each setting
             │      recordings)
             ├── direct                           a launcher that goes to other hosts, run by itself
             └── supervise ── (peer,              one process that watches the job
                     ⇅       outcome, stall, shown)
                   rank ── (stacks)               one process beside each rank

``plan`` is pure: facts in, command line and environment out, through ``mpirun``, ``horovodrun`` and, for the launchers
of batch systems, ``batch``. ``supervise`` starts that command line with ``rank`` put before
the user's command: each rank's output and exit status come back over a socket of hvdkit's own. The launchers' own
reports are not used because they lose information: Open MPI glues the unfinished last lines of two ranks together,
Hydra mixes ranks within a line, horovodrun dies on bytes that are not UTF-8 and exits with 1 whatever the status of the
rank was.

``shown`` is all that is seen of the job: ``output`` tags lines, and ``tracebacks`` sorts what the ranks write as they
fail, so that the cause is read last. ``stall`` reads Horovod's reports of collectives that wait, and ``stacks`` is what
makes each Python of a rank ready to show where it stands, or to profile itself.
``start`` starts the launcher itself, for ``direct`` and ``supervise``.
"""
