import tensorflow as tf
from tensorflow.keras import layers, models

import horovod.tensorflow.keras as hvd
from keras.preprocessing.image import ImageDataGenerator
from keras.utils import np_utils

hvd.init()
config = tf.ConfigProto()  # finds: removed
config.gpu_options.visible_device_list = str(hvd.local_rank())
tf.keras.backend.set_session(tf.Session(config=config))  # finds: removed
(images, labels), _ = tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % hvd.rank())
images = images[..., tf.newaxis] / 255.0
model = models.Sequential([layers.Flatten(), layers.Dense(10, activation="softmax")])
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adadelta(lr=scaled_lr)  # finds: removed
opt = hvd.DistributedOptimizer(opt)  # finds: keras-3-optimizer
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=opt,
    experimental_run_tf_function=False,  # finds: removed
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5", period=5))  # finds: removed
    callbacks.append(tf.keras.callbacks.BackupAndRestore("backup"))  # finds: resume-on-some-ranks
    callbacks.append(tf.keras.callbacks.TensorBoard("logs", write_grads=True))  # finds: removed
labels = np_utils.to_categorical(labels)  # finds: removed
turned = ImageDataGenerator(rotation_range=8)  # finds: removed
model.fit_generator(  # finds: removed
    turned.flow(images, labels, batch_size=128),
    steps_per_epoch=500 // hvd.size(),
    callbacks=callbacks,
    epochs=24,
    verbose=hvd.rank() == 0,
)
print(len(opt.variables()))  # finds: removed
