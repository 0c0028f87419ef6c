"""Replays the collectives of a training without its model, checks every result and measures every one of them.

Why this room exists: a training shows what its network can do only mixed with everything else it does. Here the same
collectives run alone, in the order of a backward pass, with integers whose sums are known, so that a slow or a wrong
network is seen before a model is trained on it.

::

    cli           what is typed
    plan ──────── what is replayed: sizes, types, order, gaps, how many steps; of a model: measure.model
    run ───────── from options to a job, and its ranks through ``hvdkit launch``
       ├── worker        what each rank runs: gap, arrival, collective, completion, check
       │     ├── engines    what carries the collectives out, behind one communicator; ring: step by step
       │     └── check      what every rank gives, and what every rank must get
       └── results       what ranks leave, and the file that keeps it
    analysis ──── bandwidths, percentiles, ranks; the table and the plot
"""
