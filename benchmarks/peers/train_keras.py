"""One rank of a Keras variant of ``peers.py``: ``fit``, on the backend of KERAS_BACKEND."""

import itertools
import os

import keras
import numpy as np
from keras_models import loss_of, make_model, make_optimizer, one_thread, weights_of
from rank import BATCHES, Clock, parse, place


class AfterEachStep(keras.callbacks.Callback):
    """Keras waits for the step's loss before it calls this, also on jax."""

    def __init__(self, step_done):
        super().__init__()
        self.step_done = step_done

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        self.step_done()


def with_hvdkit(name):
    import hvdkit.keras as hk

    world = hk.init()
    hk.pin_device(world, "cpu")
    model = make_model(name)
    return world.rank, world.size, model, hk.distribute(make_optimizer()), [hk.BroadcastState()]


def with_horovod(name):
    """On the tensorflow backend."""
    import horovod.tensorflow as hvd

    class AveragingSGD(keras.optimizers.SGD):
        """Horovod's own optimizer for Keras does not average under Keras 3."""

        def apply(self, grads, trainable_variables=None):
            return super().apply(hvd.grouped_allreduce(grads, op=hvd.Average), trainable_variables)

    hvd.init()
    one_thread()
    model = make_model(name)
    hvd.broadcast_variables([variable.value for variable in model.weights], root_rank=0)
    return hvd.rank(), hvd.size(), model, AveragingSGD.from_config(make_optimizer().get_config()), []


def with_data_parallel(name):
    """On the jax backend, which alone has it: each process one device, and its batch a part of the global one."""
    import jax

    one_thread()
    rank, size = place()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, num_processes=size, process_id=rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    return rank, size, make_model(name), make_optimizer(), []


def alone(name):
    one_thread()
    return *place(), make_model(name), make_optimizer(), []


VARIANTS = {"hvdkit": with_hvdkit, "horovod": with_horovod, "peer": with_data_parallel, "alone": alone}


def batches_of(x, y, batch_size):
    """Batches without end: a ``tf.data.Dataset`` on the tensorflow backend, which others need not have."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).repeat()
    batches = list(zip(np.split(x, BATCHES), np.split(y, BATCHES), strict=True))
    return (batches[number % BATCHES] for number in itertools.count())


def steps_of(job, rank, model, optimizer, callbacks):
    """A function that trains so many steps, and calls another after each."""
    compiled = keras.backend.backend() == "jax"
    model.compile(optimizer, loss_of(), jit_compile=compiled)
    data = batches_of(*job.data(rank), job.batch_size)

    def train(count, step_done):
        model.fit(data, steps_per_epoch=count, epochs=1, verbose=0, callbacks=[*callbacks, AfterEachStep(step_done)])

    return train


def main():
    job = parse(VARIANTS)
    rank, size, model, optimizer, callbacks = VARIANTS[job.variant](job.model)
    clock = Clock(job, rank, size)
    steps_of(job, rank, model, optimizer, callbacks)(job.warm_up + job.steps, clock.step_done)
    clock.write(weights_of(model))


if __name__ == "__main__":
    main()
