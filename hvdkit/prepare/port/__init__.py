"""Writes the eight steps into a training script.

``check`` says where the steps are missing. This room changes text, by what ``check`` knows of the script's data flow.
``--try`` is a room of its own, ``prepare/trial``.

::

    edits.py          a script's text, and changes to it that are collected first and made at once
    plan.py           one script's port: where the topology lives, rank and size, what stays and why
    from_horovod.py   from Horovod: PyTorch, Keras' fit and TensorFlow's tape
    from_ddp.py       from DistributedDataParallel
    from_single.py    from one process: PyTorch, Keras' fit and TensorFlow's tape
    on_root.py        what writes and prints: on the root alone
    seeds.py          random numbers: the same data on all ranks, each rank's own in training
    keras_2.py        spellings that Keras 3 does not know
    run.py            a script in, the ported one without unused imports, and what is left, out
    cli.py            the command ``hvdkit port``
"""
