"""Writes the eight steps into a training script.

``check`` says where the steps are missing, with the standard library alone. This room changes text, with LibCST, by
what ``check`` knows of the script's data flow. ``--try`` is a room of its own, ``prepare/trial``.

::

    text.py                    a script as bytes, ``check``'s tree and LibCST's tree, with positions matched
    edits.py                   changes that are collected first and made at once
    plan.py                    one script's port: where the topology lives, rank and size, what stays and why
    from_horovod.py            from Horovod: what is common, and PyTorch
    from_horovod_tensorflow.py from Horovod: Keras' fit and TensorFlow's tape
    from_ddp.py                from DistributedDataParallel
    from_single.py             from one process: what is common, and PyTorch
    from_single_tensorflow.py  from one process: Keras' fit and TensorFlow's tape
    on_root.py                 what writes and prints: on the root alone
    seeds.py                   random numbers: the same data on all ranks, each rank's own in training
    keras_2.py                 spellings that Keras 3 does not know
    run.py                     a script in, the ported one without unused imports, and what is left, out
    cli.py                     the command ``hvdkit port``
"""
