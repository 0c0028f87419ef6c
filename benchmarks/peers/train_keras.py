"""One rank of a Keras variant of ``peers.py``: ``fit``."""

import keras
import tensorflow as tf
from keras_models import loss_of, make_model, make_optimizer, one_thread, weights_of
from rank import Clock, parse, place


class AfterEachStep(keras.callbacks.Callback):
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


def alone(name):
    one_thread()
    return *place(), make_model(name), make_optimizer(), []


VARIANTS = {"hvdkit": with_hvdkit, "horovod": with_horovod, "alone": alone}


def steps_of(job, rank, model, optimizer, callbacks):
    """A function that trains so many steps, and calls another after each."""
    model.compile(optimizer, loss_of(), jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(job.data(rank)).batch(job.batch_size).repeat()

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
