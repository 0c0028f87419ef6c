"""``hvdkit plan``: what a training will do, need and take, before its processes are started.

Why this room exists: a job's numbers are asked for before there is a job. How many steps and at which rates (``steps``)
comes from the functions that the training itself calls. What it needs (``memory``) and how fast it is on more ranks
than there are (``scale``) is estimated, with what is known of the estimate's error.

::

    cli            the command, a table of these three
    steps          steps, batches, learning rates, checkpoints
    memory         a model's memory, term by term, from numbers or
      live_model     from steps of the user's own model, in a process of its own (measure.model)
    scale          a row for each number of ranks
      step_time      what of the communication backward hides, and the wait for the slowest rank; also in fewer bytes
      network        what an allreduce costs on n ranks: messages and bytes of a ring, fitted, robust, never negative
"""
