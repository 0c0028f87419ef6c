"""Says which of the eight steps a training script does, and what in it is wrong, without running it.

A room of its own and not a part of ``doctor``: the doctor looks at an environment by starting processes in it, while
this reads one file and imports nothing from it, so that a script can be checked on a laptop before a job waits for
its turn. Whatever the text does not settle is said to be undecided.

::

    source.py            a file as a syntax tree, or one sentence why not; what the text of a call says
    libraries.py         the tables: which packages are known, what each function of Horovod, hvdkit and PyTorch is for
    flow.py              where a value can come from: names, the assignments that reach a use, functions, objects
    trace.py             the calls in the order in which they run, with the conditions they run under
    case.py              a script as steps and rules see it: ranks, optimizers, loops over data
    ranks.py             what each rank trains on, and where it writes
    steps.py             the table of the eight steps, and what is said of each
    rules.py             the table of rules: a script in, findings out
    find.py              the functions of its rows
    find_collectives.py  those about collectives: which some ranks never reach, and which metrics lack
    cli.py               the command ``hvdkit check``: as text and as JSON
"""
