"""Finds the settings that make one job fast here, by running it: launcher, cycle time, fusion threshold, threads.

Why this room exists: ``launch`` chooses settings by rule and starts one job; which settings suit a model on a machine
can only be measured, over many short jobs, with statistics that do not take noise for a gain. Each job is a
``hvdkit launch`` of its own, and the result is a file for ``hvdkit launch --tuned``.

::

    run/trials ─── what this machine and the command leave to choose; one job through ``hvdkit launch``, its seconds
       └── search  which jobs, in which order: some that select, then fresh runs of the finalists; speed-ups
    report ─────── the outcome as text, as JSON and as a file
    cli            what is typed, and what is seen while it runs

``search`` takes whatever runs a job as a callable, so that it can be tested without processes.
"""
