import tensorflow as tf

import hvdkit.tensorflow as hk

world = hk.init()
hk.pin_device(world)
(x, y), _ = tf.keras.datasets.mnist.load_data()
model = tf.keras.Sequential([tf.keras.Input((28, 28)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hk.distribute(tf.keras.optimizers.SGD(hk.scale_lr(0.01, world)))
hk.broadcast_state(model, optimizer)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
for epoch in range(3):
    for images, labels in hk.shard((x / 255.0, y), world, 64):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    manager.save()  # finds: checkpoint-on-every-rank
