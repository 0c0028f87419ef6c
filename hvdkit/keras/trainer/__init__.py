"""What takes place inside Keras' ``fit``: callbacks, the guard around the trainer, metrics, evaluation, records.

Not called ``fit``, which is a function of ``hvdkit.keras``: a module of that name would replace it.
"""
