"""One rank of a TensorFlow variant of ``peers.py``: a ``tf.function`` for each step."""

import tensorflow as tf
from keras_models import loss_of, make_model, make_optimizer, one_thread, weights_of
from rank import BATCHES, Clock, parse, place


def with_hvdkit(name):
    import hvdkit.tensorflow as hk

    world = hk.init()
    hk.pin_device(world, "cpu")
    model, optimizer, loss = make_model(name), make_optimizer(), loss_of()
    hk.broadcast_state(model, optimizer)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = hk.distribute(tape).gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return world.rank, world.size, model, train_step


def with_horovod(name):
    import horovod.tensorflow as hvd

    hvd.init()
    one_thread()
    model, optimizer, loss = make_model(name), make_optimizer(), loss_of()
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([variable.value for variable in model.weights + optimizer.variables], root_rank=0)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
        optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), model.trainable_variables)
        return value

    return hvd.rank(), hvd.size(), model, train_step


def with_strategy(name):
    one_thread()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer, loss = make_model(name), make_optimizer(), loss_of()
        optimizer.build(model.trainable_variables)

    def one_replica(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / strategy.num_replicas_in_sync  # Keras adds the gradients up
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @tf.function
    def train_step(x, y):
        return strategy.run(one_replica, args=(x, y))

    return *place(), model, train_step


def alone(name):
    one_thread()
    model, optimizer, loss = make_model(name), make_optimizer(), loss_of()
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return *place(), model, train_step


VARIANTS = {"hvdkit": with_hvdkit, "horovod": with_horovod, "peer": with_strategy, "alone": alone}


def steps_of(job, rank, _model, train_step):
    """A function that trains so many steps, and calls another after each."""
    x, y = (tf.split(tf.constant(array), BATCHES) for array in job.data(rank))

    def train(count, step_done):
        for number in range(count):
            train_step(x[number % BATCHES], y[number % BATCHES]).numpy()
            step_done()

    return train


def main():
    job = parse(VARIANTS)
    rank, size, model, train_step = VARIANTS[job.variant](job.model)
    clock = Clock(job, rank, size)
    steps_of(job, rank, model, train_step)(job.warm_up + job.steps, clock.step_done)
    clock.write(weights_of(model))


if __name__ == "__main__":
    main()
