"""Predicts the time of a training step on more ranks than there are, from what ``hvdkit emulate`` measured.

Why this room exists: whether 512 GPUs are worth their price is asked before there are 512. Measurements on a few
ranks, the known costs of the algorithms and what hides behind backward answer it, with an interval that says how far
they reach.

::

    formulas ──── what each algorithm costs: messages, bytes, sums
    link ──────── what the messages and bytes of a level cost
       └── fitting   that from measurements: robust, never negative, with resamples
       └── model     the cost of an allreduce of any size on any number of ranks
    overlap ───── which part of the communication backward hides
    stragglers ── how long the slowest of n ranks keeps the others waiting
       └── prediction  a row for each number of ranks
             └── tables  as a table, Markdown, CSV and a figure
    cli          what is typed

Seconds and bytes throughout; only what is typed and printed has other units.
"""
