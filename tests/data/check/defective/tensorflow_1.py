import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()


def model_fn(features, labels, mode):
    logits = tf.layers.dense(features["x"], 10)  # finds: removed
    loss = tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)  # finds: removed
    optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.001 * hvd.size(), 0.9))  # finds: removed
    train = optimizer.minimize(loss, tf.train.get_global_step())  # finds: removed
    return tf.estimator.EstimatorSpec(mode=mode, loss=loss, train_op=train)  # finds: removed


estimator = tf.estimator.Estimator(model_fn)  # finds: removed
hooks = [hvd.BroadcastGlobalVariablesHook(0)]  # finds: removed
estimator.train(input_fn=lambda: None, steps=20000 // hvd.size(), hooks=hooks)
