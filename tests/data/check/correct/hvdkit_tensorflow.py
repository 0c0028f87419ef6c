"""hvdkit around a loop of one's own."""

import tensorflow as tf

import hvdkit.tensorflow as hk


def main(epochs=3, batch_size=32, lr=0.001):
    world = hk.init()
    hk.pin_device(world)
    (x, y), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
    model = tf.keras.Sequential([tf.keras.Input((28, 28)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(hk.scale_lr(lr, world))
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints("runs/mnist")
    loader = hk.shard((x / 255.0, y), world, batch_size)
    steps = hk.steps_per_epoch(len(x), batch_size, world)
    for epoch in range(epochs):
        for features, labels in loader:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features, training=True))
            tape = hk.distribute(tape)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
        checkpoints.save(model, optimizer, step=(epoch + 1) * steps)
        hits = tf.reduce_mean(tf.cast(tf.argmax(model(x_test / 255.0), 1) == y_test, tf.float32))
        if world.is_root:
            print("epoch", epoch, "accuracy", float(hits))


main()
