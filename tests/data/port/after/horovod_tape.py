import os

import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hk


def main():
    # Horovod: initialize Horovod.
    world = hk.init()

    # Horovod: pin GPU to be used to process local rank (one GPU per process)
    hk.pin_device(world)

    random = np.random.RandomState(0)
    x = random.rand(64, 8).astype('float32')
    y = (x.sum(1) > 4).astype('int64')
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(world.size, world.rank).batch(8)

    model = tf.keras.Sequential([
        tf.keras.layers.Dense(16, activation='relu'),
        tf.keras.layers.Dense(2, activation='softmax')
    ])
    loss = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.SGD(0.05 * world.size)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            probs = model(images, training=True)
            loss_value = loss(labels, probs)

        # Horovod: add Horovod Distributed GradientTape.
        tape = hk.distribute(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))


        return loss_value

    for batch, (images, labels) in enumerate(dataset.take(8 // world.size)):
        if batch == 0:
            model(images)  # makes its variables
            hk.broadcast_state(model, opt)
        loss_value = training_step(images, labels, batch == 0)
        if batch % 10 == 0 and world.is_root:
            print('Step #%d\tLoss: %.6f' % (batch, loss_value))
    return model


if __name__ == '__main__':
    model = main()
