"""Replays the collectives of a training without its model, checks every result and measures every one of them.

Why this room exists: a training shows what its network can do only mixed with everything else it does. Here the same
collectives run alone, in the order of a backward pass, with integers whose sums are known, so that a slow or a wrong
network is seen before a model is trained on it.

::

    plan ───────── what is replayed: sizes, types, order, gaps, how many steps
       ├── sizes ── (timeline_sizes)   where it comes from
       │      └── model_process   reads a model: model_torch, model_keras, model_tensorflow
       └── run ──── starts the ranks through ``hvdkit launch``, shows progress, joins what they wrote
             ├── run_setup    from options to a job
             ├── run_job      what every rank is told
             └── results      the file that keeps it
    worker ─────── what each rank runs
       ├── worker_replay      trial after trial: gap, arrival, collective, completion, check
       ├── worker_files       what a rank writes
       ├── engines            what carries the collectives out: engines_mpi, engines_horovod, engines_torch
       │      └── ring        the ring, step by step, over point-to-point messages
       ├── check              what every rank gives, and what every rank must get
       └── clock              the clocks of several machines, compared
    analysis ───── bandwidths, percentiles, bands, outliers (spread)
       ├── tables, outputs (plots), report   for readers
       └── compare            two results
    cli, sizes_cli, show_cli   what is typed
"""
