import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow as hvd


class Trainer:
    def __init__(self):
        self.model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
        self.optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
        self.loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self.loss_of(labels, self.model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def fit(self, data):
        hvd.broadcast_variables(self.model.variables, root_rank=0)
        hvd.broadcast_variables(self.optimizer.variables, root_rank=0)  # finds: broadcast-too-early
        for images, labels in data:
            self.step(images, labels)


if __name__ == "__main__":
    hvd.init()
    (x, y), _ = tf.keras.datasets.mnist.load_data()
    data = tf.data.Dataset.from_tensor_slices((x / 255.0, y)).shard(hvd.size(), hvd.rank())
    Trainer().fit(data.shuffle(1000).batch(64))
