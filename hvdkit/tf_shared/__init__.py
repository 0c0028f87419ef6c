"""What ``hvdkit.keras`` and ``hvdkit.tensorflow`` both stand on: Keras' layers and optimizers, streams of ``tf.data``.

Why this room exists: importing a module of ``hvdkit.tensorflow`` loads Horovod for TensorFlow, which Keras on PyTorch
or JAX does not have; and what ``hvdkit.tensorflow`` needs cannot lie in ``hvdkit.keras``, which imports it.
"""
