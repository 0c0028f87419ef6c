"""What worked with TensorFlow 1 and Keras 2, as Horovod's examples still have it, and fails with those of today."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.prepare.check.calls import argument
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event

_MODELS = re.compile(r"keras\.(layers|models|applications|Sequential|Model)\b")
_HOROVODS = ("horovod.keras.", "horovod.tensorflow.keras.")


@dataclass(frozen=True)
class Removed:
    """A row of the table.

    Attributes:
        called: pattern of the full name of what is called, or of its text where it has none.
        fix: what to write.
        words: the arguments that are removed; () where the function is.
        what: the sentence, with ``{}`` for the piece of the script.
        in_keras_2: it is removed for scripts that ask for Keras 2, too.
        imported: how a name begins that the script has to import.
    """

    called: str
    fix: str
    words: tuple[str, ...] = ()
    what: str = "`{}` was removed: TensorFlow 2 and Keras 3 do not know it"
    in_keras_2: bool = False
    imported: str = ""

    def find(self, case: Case) -> Iterator[Event | ast.keyword]:
        """Where a script uses it: whatever the versions are."""
        other = self.imported and not any(name.startswith(self.imported) for name in case.imported)
        if other or (asks_for_keras_2(case) and not self.in_keras_2):
            return
        for event in case.events:
            if re.search(self.called, case.name(event.node) or ast.unparse(event.node.func)):
                if self.words:
                    yield from (one for one in event.node.keywords if one.arg in self.words)
                elif not _asks_for_version(event):
                    yield event


GRAPHS = Removed(
    r"^(tensorflow\.(compat\.v1\.)?(estimator|contrib|layers|placeholder|InteractiveSession|get_variable|variable_scope"
    r"|(global|local)_variables_initializer|get_default_graph|reset_default_graph|app|train\.(\w*Optimizer|\w+Hook"
    r"|Monitored\w*Session|Supervisor|Saver|Scaffold|(get_|create_|get_or_create_)?global_step|\w*batch))\b.*"
    r"|tensorflow\.compat\.v1\.(Session|disable_(eager_execution|v2_behavior|v2_tensorshape))"
    r"|keras\.losses\.\w+_cross_entropy|horovod\.tensorflow\.(broadcast_global_variables|\w+Hook))$",
    "write it as Keras' fit (hvdkit.keras), or as a loop over tf.GradientTape (hvdkit.tensorflow)",
    what="`{}` is TensorFlow 1's, whose graphs neither hvdkit nor Keras 3 trains", in_keras_2=True,
)  # fmt: skip
"""TensorFlow 1's way to train; its sessions, which chose the GPU, have a row of their own."""
RATES = Removed(r"^keras\.optimizers\.", "write learning_rate=", ("lr",))
GENERATORS = Removed(r"\.(fit|evaluate|predict)_generator$", "call fit, evaluate or predict, which take such data, too")
IMAGES = Removed(
    r"keras\.preprocessing\.image\.ImageDataGenerator$",
    "put keras.layers.RandomRotation, RandomTranslation and RandomZoom into the model, or import it from "
    "tensorflow.keras.preprocessing.image",
    imported="keras.preprocessing.image",
)
"""Of the package keras; tf.keras still has it."""
REMOVED = (
    GRAPHS,
    Removed(r"\.compile$", "leave it out", ("experimental_run_tf_function", "sample_weight_mode", "target_tensors")),
    RATES,
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
        r"^keras\.callbacks\.TensorBoard$",
        "leave it out: Keras 3's TensorBoard does not write that",
        ("batch_size", "write_grads", "embeddings_layer_names", "embeddings_data"),
    ),
    Removed(
        r"\.(fit|evaluate|predict)$",
        "leave it out; a keras.utils.PyDataset takes workers= itself, and nb_epoch= is epochs=",
        ("workers", "use_multiprocessing", "max_queue_size", "nb_epoch"),
    ),
    Removed(
        r"^keras\.(utils\.(np_utils|multi_gpu_model)|wrappers\.scikit_learn|layers\.CuDNN|backend\.tensorflow_backend)",
        "see keras.io/guides/migrating_to_keras_3 for what replaces it",
    ),
    Removed(
        r"^(tensorflow\.(ConfigProto|Session)|keras\.backend\.set_session)$",
        "TensorFlow 2 has no sessions: hk.pin_device(world), or "
        "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        in_keras_2=True,
    ),
    GENERATORS,
    IMAGES,
)


def asks_for_keras_2(case: Case) -> bool:
    """Whether the script asks for the Keras that Horovod was made for."""
    legacy = any(isinstance(node, ast.Constant) and node.value == "TF_USE_LEGACY_KERAS" for node in case.nodes)
    imports = {name.split(".")[0] for name in case.imported}
    return legacy or "tf_keras" in imports or any(".legacy" in name for name in case.used)


def _asks_for_version(event: Event) -> bool:
    """Whether it runs with some versions only."""
    return any(re.search(r"__version__|hasattr", ast.unparse(guard.test)) for guard in event.guards)


def _of_keras_3(case: Case, *roles: Role) -> Iterator[Event]:
    if not asks_for_keras_2(case):
        yield from (event for event in case.having(*roles) if not _asks_for_version(event))


def optimizers(case: Case) -> Iterator[Event]:
    """Horovod's Keras optimizer."""
    for event in _of_keras_3(case, Role.DISTRIBUTE, Role.LOAD_MODEL):
        name = case.name(event.node)
        sources = case.calls(argument(event.node, "optimizer", 0))
        on_keras = any(case.name(call).startswith("keras.") for call in sources)
        of_keras = name.startswith(_HOROVODS) or (name.startswith("horovod.tensorflow.") and on_keras)
        if of_keras and not name.endswith("Tape"):
            yield event


def variables(case: Case) -> Iterator[Event]:
    """Horovod's tape and broadcast in a script with a Keras model that does not unwrap its variables."""
    unwraps = any(isinstance(node, ast.Attribute) and node.attr == "value" for node in case.nodes)
    if unwraps or not any(_MODELS.match(name) for name in case.used):
        return
    for event in _of_keras_3(case, Role.DISTRIBUTE, Role.BROADCAST):
        if re.fullmatch(r"horovod\.tensorflow\.(\w+Tape|broadcast_variables)", case.name(event.node)):
            yield event


def callbacks(case: Case) -> Iterator[Event]:
    """Horovod's callbacks for Keras."""
    found = _of_keras_3(case, Role.BROADCAST_CALLBACK, Role.AVERAGE_CALLBACK, Role.WARMUP)
    return (event for event in found if case.name(event.node).startswith(_HOROVODS))
