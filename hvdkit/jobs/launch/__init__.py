"""Starts a command on N processes, over MPI or over Gloo, on this machine or on several hosts.

::

    options, hosts, facts                         what is asked for, and what there is
       └── plan ── (lines, stage, recordings)     command line and environment, with a reason for each setting
             └── supervise ── (horovodrun, peer,  one process that watches the job, in hvdkit launch
                     ⇅         stall, output)
                   wire                           TCP, with a proof that each side knows the job's secret
                     ⇅
                   rank ── (processes)            one process beside each rank, on whatever host it is

``plan`` is pure: facts in, command line and environment out, through ``lines`` in the words of each launcher.
``supervise`` starts that command line with ``rank`` put before the user's command, whatever the launcher: mpirun,
horovodrun (elastic or not), srun, mpiexec of PALS, aprun, jsrun. All that is known of a rank comes over that
connection: its output, tracebacks and memory, how it ends, what waits in it. All that is done to it goes back over it:
signals, the grace, its end. A rank whose connection ends has lost ``hvdkit launch``, and ends.

The launchers' own reports are not used because they lose information: Open MPI glues the unfinished last lines of two
ranks together, Hydra mixes ranks within a line, horovodrun dies on bytes that are not UTF-8 and exits with 1 whatever
the status of the rank was. Their own ways to pass signals on differ, and none of them waits for ranks that save. What
stays theirs: starting processes on hosts, and, elastic, replacing those that fail.

Where a rank cannot reach ``hvdkit launch`` (a firewall, or a launcher that hands no environment on), it says so and
runs all the same, seen to by the launcher alone. When a rank has lost another, all are asked over their connections: a
host of which none answers is lost. ``hosts`` says why none has come.

``options`` has each option once: its flags and help, what it needs and excludes, and the variables that it sets.

``output`` is all that is seen of the job: it tags lines, and sorts what the ranks write as they fail, so that the cause
is read last. ``stall`` reads Horovod's reports of collectives that wait, and ``observe.startup`` makes each Python of a
rank ready to show where it stands, or to profile itself. ``horovodrun`` has Horovod's own launcher run with another
rendezvous.
"""
