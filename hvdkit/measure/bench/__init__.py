"""Measures how a training scales with the number of ranks, and says how sure the numbers are.

Why this room exists: one run at each number of ranks, compared by eye, takes noise, warm-up and too few cores for
scaling. Here whole jobs are repeated in random order, every number has an interval, and what cannot be told is said.

::

    cli            what is typed
    jobs ───────── which job runs next; seconds per step and where they go, from the steps that its ranks recorded
    results        what is measured, and where; the file that keeps it, and what an interrupted call left in it
    analysis ───── speed-up, efficiency, causes, remarks; tables, the plot
       └── laws         Amdahl, Gustafson and the Universal Scalability Law, fitted

The form of the file is in docs/json.md.
"""
