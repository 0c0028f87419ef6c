"""Writes the eight steps into a training script, and proves by ``--try`` that both scripts take the same steps.

``check`` says where the steps are missing. This room changes text, by what ``check`` knows of the script's data flow.

::

    edits.py           a script's text, and changes to it that are collected first and made at once
    plan.py            one script's port: where the topology lives, rank and size, what stays and why
    from_horovod.py    from Horovod: PyTorch, Keras' fit and TensorFlow's tape
    from_ddp.py        from DistributedDataParallel
    from_single.py     from one process: what all have in common, and PyTorch
    from_single_tf.py  from one process: Keras' fit and TensorFlow's tape; spellings that Keras 3 does not know
    each_rank.py       what the root alone does (files, prints), and which random numbers each rank draws
    cli.py             the command ``hvdkit port``: a script in, the ported one and what is left, out
    trial.py           ``--try``: both scripts run for a few steps, observe/trial.py looks into them, and are compared
"""
