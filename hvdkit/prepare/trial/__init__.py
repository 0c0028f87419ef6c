"""Shows that two forms of a training script take the same steps: ``hvdkit port --try``.

Both run for a few steps on the same batches, ``observe/trial.py`` looks into them, and their weights are compared.

::

    attempt.py    the runs, on one process, on 1 rank and on 2, and what is compared
    as_script.py  runs one script in the place of the other
"""
