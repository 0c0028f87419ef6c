"""BatchNormalization's moving statistics over the ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.tensorflow import private
from hvdkit.tensorflow.state import keras_layers, require_eager


def local_statistics(model: Any) -> list[Any]:
    """The moving statistics that are each rank's own; a list of plain variables has none that could be told."""
    found: dict[int, Any] = {}
    for outer in keras_layers(model):
        import keras  # is loaded where there is a layer

        for layer in private.flat_layers(outer):
            if isinstance(layer, keras.layers.BatchNormalization):
                found.update((id(one), one) for one in private.statistics_of(layer))  # without a frozen gamma
    return list(found.values())


def average_statistics(model: Any) -> None:
    """Set BatchNormalization's moving statistics to their mean over the ranks; a collective.

    Before evaluation and before a checkpoint: otherwise both use the statistics of one rank's samples. (The mean of the
    variances leaves out how far the ranks' means are apart, which is little when samples are dealt out at random.)

    Args:
        model: nothing happens where it has none.
    Raises:
        InvalidArgumentError: a model that is not built, or a call inside ``tf.function``.
    """
    require_eager("average_statistics")
    statistics = local_statistics(model)
    if not statistics or hvd.size() == 1:
        return
    sent = [tf.convert_to_tensor(one.value) for one in statistics]
    wide = [tf.cast(one, tf.float64) for one in sent]
    means = hvd.grouped_allreduce(wide, op=hvd.Average, name="hvdkit.statistics")
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(tf.cast(mean, variable.dtype))
