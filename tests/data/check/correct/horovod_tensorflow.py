"""A loop of one's own with a distributed tape; the state is sent after the first step."""

import argparse
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf  # noqa: E402

import horovod.tensorflow as hvd  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.001)
args = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data(path=f"mnist-{hvd.rank()}.npz")
x_train, x_test = x_train[..., tf.newaxis] / 255.0, x_test[..., tf.newaxis] / 255.0

dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
dataset = dataset.shard(num_shards=hvd.size(), index=hvd.rank())
dataset = dataset.shuffle(10000).repeat().batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
test_set = tf.data.Dataset.from_tensor_slices((x_test, y_test)).shard(hvd.size(), hvd.rank()).batch(args.batch_size)

model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(32, 3, activation="relu"),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(10, activation="softmax"),
])
loss_of = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(args.lr * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def train_step(x, y, first):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


def evaluate():
    correct, count = tf.constant(0.0), tf.constant(0.0)
    for x, y in test_set:
        hits = tf.cast(tf.argmax(model(x), axis=1) == tf.cast(y, tf.int64), tf.float32)
        correct += tf.reduce_sum(hits)
        count += tf.cast(tf.size(hits), tf.float32)
    return hvd.allreduce(correct, op=hvd.Sum) / hvd.allreduce(count, op=hvd.Sum)


steps = len(x_train) // args.batch_size // hvd.size()
for epoch in range(args.epochs):
    for step, (x, y) in enumerate(dataset.take(steps)):
        loss = train_step(x, y, epoch == 0 and step == 0)
        if step % 100 == 0 and hvd.rank() == 0:
            print("Step #%d\tLoss: %.6f" % (step, loss))
    accuracy = evaluate()
    if hvd.rank() == 0:
        print("accuracy %.4f" % accuracy)
        checkpoint.save("checkpoints/ckpt")
