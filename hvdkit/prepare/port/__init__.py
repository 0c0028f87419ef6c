"""Writes the eight steps into a training script.

A room of its own and not a part of ``check``: that one says where the steps are missing, and needs nothing but the
standard library; this one changes text, with LibCST, by what ``check`` knows of the script's data flow.
What it runs, with ``--try``, is looked into by ``steps/trial.py``.

::

    text.py                    a script as bytes, ``check``'s tree and LibCST's tree, with positions matched
    edits.py                   changes that are collected first and made at once
    plan.py                    one script's port: where the topology lives, rank and size, what stays and why
    from_horovod.py            from Horovod: what is common, and PyTorch
    from_horovod_tensorflow.py from Horovod: Keras' fit and TensorFlow's tape
    from_ddp.py                from DistributedDataParallel
    from_single.py             from one process: what is common, and PyTorch
    from_single_tensorflow.py  from one process: Keras' fit and TensorFlow's tape
    keras_2.py                 spellings that Keras 3 does not know
    run.py                     a script in, the ported one without unused imports, and what is left, out
    trial.py, as_script.py     --try: both scripts are run and compared
    cli.py                     the command ``hvdkit port``
"""
