"""What worked with Keras 2, as Horovod's examples still have it, and fails with Keras 3."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.trace import Event


@dataclass(frozen=True)
class Removed:
    """A row of the table.

    Attributes:
        called: pattern of the full name of what is called, or of its text where it has none.
        fix: what to write.
        words: the arguments that are removed; () where the function is.
        imported: how a name begins that the script has to import.
    """

    called: str
    fix: str
    words: tuple[str, ...] = ()
    imported: str = ""

    def find(self, case: Case) -> Iterator[Event | ast.keyword]:
        """Where a script uses it, unless it asks for Keras 2 or for a version."""
        other = self.imported and not any(name.startswith(self.imported) for name in case.imported)
        if other or case.asks_for_keras_2:
            return
        for event in case.events:
            if re.search(self.called, case.name(event.node) or ast.unparse(event.node.func)):
                if self.words:
                    yield from (one for one in event.node.keywords if one.arg in self.words)
                elif not any(re.search(r"__version__|hasattr", ast.unparse(guard.test)) for guard in event.guards):
                    yield event


REMOVED = (
    Removed(r"\.compile$", "leave it out", ("experimental_run_tf_function", "sample_weight_mode", "target_tensors")),
    Removed(r"^keras\.optimizers\.", "write learning_rate=", ("lr",)),
    Removed(
        r"^keras\.optimizers\.",
        "Keras 3 ignores it: learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)",
        ("decay",),
    ),
    Removed(
        r"^keras\.callbacks\.ModelCheckpoint$",
        'save_freq="epoch", or save_freq=k * steps_per_epoch for every k-th epoch',
        ("period", "load_weights_on_restart"),
    ),
    Removed(
        r"\.(fit|evaluate|predict)(_generator)?$",
        "leave it out; a keras.utils.PyDataset takes workers= itself, and nb_epoch= is epochs=",
        ("workers", "use_multiprocessing", "max_queue_size", "nb_epoch"),
    ),
    Removed(
        r"^(tensorflow\.(ConfigProto|Session)|keras\.backend\.set_session)$",
        "TensorFlow 2 has no sessions: hk.pin_device(world), or "
        "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
    ),
    Removed(r"\.(fit|evaluate|predict)_generator$", "call fit, evaluate or predict, which take such data, too"),
    Removed(
        r"keras\.preprocessing\.image\.ImageDataGenerator$",
        "put keras.layers.RandomRotation, RandomTranslation and RandomZoom into the model, or import it from "
        "tensorflow.keras.preprocessing.image",
        imported="keras.preprocessing.image",
    ),
)
