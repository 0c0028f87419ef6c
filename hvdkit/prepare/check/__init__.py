"""Says which of the eight steps a training script does, and what in it is wrong, without running it.

A room of its own and not a part of ``doctor``: the doctor looks at an environment by starting processes in it, while
this reads one file and imports nothing from it, so that a script can be checked on a laptop before a job waits for
its turn. Whatever the text does not settle is said to be undecided.

::

    source.py          a file as a syntax tree, or one sentence why not
    program.py         scopes, what is bound to each name, and which assignments reach a use
    names.py           ``hvd.rank`` as ``horovod.torch.rank``, through aliases; which packages are known
    libraries.py       the tables: what each function of Horovod, hvdkit and PyTorch is for
    calls.py           what the text of a call says, and which argument fills which parameter
    flow.py            where a value can come from, across functions and objects
    trace.py           the calls in the order in which they run, with the conditions they run under
    facts.py           the questions that steps and rules ask: is it a rank, does it happen on every rank, ...
    training.py        optimizers, updates, loops over data, ``fit``
    case.py            what each rank trains on; with the layers below it, a script as steps and rules see it
    verdict.py         done, missing, not needed or undecided
    steps.py           the table of the eight steps; its rows are functions of step_*.py
    rules.py           the table of rules: a script in, lines out; its rows are functions of find.py, metrics.py,
                       removed.py and step_*.py
    report.py          as text and as JSON
    cli.py             the command ``hvdkit check``
"""
