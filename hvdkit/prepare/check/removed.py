"""What worked with TensorFlow 1 and Keras 2, as Horovod's examples still have it, and fails with those of today."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator

from hvdkit.prepare.check.calls import argument
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event

_SESSIONS = ("tensorflow.ConfigProto", "tensorflow.Session", "keras.backend.set_session")
_IMAGES = "keras.preprocessing.image"
_GRAPHS = re.compile(
    r"tensorflow\.(compat\.v1\.)?(estimator|contrib|layers|placeholder|InteractiveSession|get_variable|variable_scope"
    r"|(global|local)_variables_initializer|get_default_graph|reset_default_graph|app|train\.(\w*Optimizer|\w+Hook"
    r"|Monitored\w*Session|Supervisor|Saver|Scaffold|(get_|create_|get_or_create_)?global_step|\w*batch))\b.*"
    r"|tensorflow\.compat\.v1\.(Session|disable_(eager_execution|v2_behavior|v2_tensorshape))"
    r"|keras\.losses\.\w+_cross_entropy|horovod\.tensorflow\.(broadcast_global_variables|\w+Hook)"
)
"""TensorFlow 1's way to train; its sessions, which chose the GPU, have a rule of their own."""
ARGUMENTS = (
    (r"\.compile$", ("experimental_run_tf_function", "sample_weight_mode", "target_tensors"), "leave it out"),
    (r"^keras\.optimizers\.", ("lr",), "write learning_rate="),
    (r"^keras\.optimizers\.", ("decay",),
     "Keras 3 ignores it: learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)"),
    (r"^keras\.callbacks\.ModelCheckpoint$", ("period", "load_weights_on_restart"),
     'save_freq="epoch", or save_freq=k * steps_per_epoch for every k-th epoch'),
    (r"^keras\.callbacks\.TensorBoard$", ("batch_size", "write_grads", "embeddings_layer_names", "embeddings_data"),
     "leave it out: Keras 3's TensorBoard does not write that"),
    (r"\.(fit|evaluate|predict)$", ("workers", "use_multiprocessing", "max_queue_size", "nb_epoch"),
     "leave it out; a keras.utils.PyDataset takes workers= itself, and nb_epoch= is epochs="),
)  # fmt: skip
"""Arguments that Keras 3 refuses or ignores: of which functions, by name, and what to write."""
_NAMES = re.compile(
    r"keras\.(utils\.(np_utils|multi_gpu_model)|wrappers\.scikit_learn|layers\.CuDNN|backend\.tensorflow_backend).*"
)
_MODELS = re.compile(r"keras\.(layers|models|applications|Sequential|Model)\b")
_HOROVODS = ("horovod.keras.", "horovod.tensorflow.keras.")


def asks_for_keras_2(case: Case) -> bool:
    """Whether the script asks for the Keras that Horovod was made for."""
    legacy = any(isinstance(node, ast.Constant) and node.value == "TF_USE_LEGACY_KERAS" for node in case.nodes)
    imports = {name.split(".")[0] for name in case.imported}
    return legacy or "tf_keras" in imports or any(".legacy" in name for name in case.used)


def asks_for_version(event: Event) -> bool:
    """Whether it runs with some versions only."""
    return any(re.search(r"__version__|hasattr", ast.unparse(guard.test)) for guard in event.guards)


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


def sessions(case: Case) -> Iterator[Event]:
    """TensorFlow 1's settings of a session, which chose the GPU."""
    return (event for event in case.events if case.name(event.node) in _SESSIONS and not asks_for_version(event))


def graphs(case: Case) -> Iterator[Event]:
    """What trains by TensorFlow 1's graphs: estimators, sessions with hooks, its optimizers and layers."""
    return (one for one in case.events if _GRAPHS.fullmatch(case.name(one.node)) and not asks_for_version(one))


def names(case: Case) -> Iterator[Event]:
    """Functions and layers that Keras 3 has not."""
    return (one for one in case.events if _NAMES.fullmatch(case.name(one.node)) and not asks_for_keras_2(case))


def generators(case: Case) -> Iterable[Event]:
    """``fit_generator`` and its like."""
    names = ("fit_generator", "evaluate_generator", "predict_generator")
    return () if asks_for_keras_2(case) else case.methods(*names)


def image_generators(case: Case) -> Iterable[Event]:
    """``ImageDataGenerator`` of the package keras; tf.keras still has it."""
    of_keras = any(name.startswith(_IMAGES) for name in case.imported)
    return case.named(f"{_IMAGES}.ImageDataGenerator") if of_keras and not asks_for_keras_2(case) else ()


def arguments_named(called: str, *words: str) -> Callable[[Case], Iterator[ast.keyword]]:
    """Finds arguments of functions whose name matches ``called``."""

    def find(case: Case) -> Iterator[ast.keyword]:
        for call in [] if asks_for_keras_2(case) else [event.node for event in case.events]:
            if re.search(called, case.name(call) or ast.unparse(call.func)):
                yield from (one for one in call.keywords if one.arg in words)

    return find


def _of_keras_3(case: Case, *roles: Role) -> Iterator[Event]:
    if not asks_for_keras_2(case):
        yield from (event for event in case.having(*roles) if not asks_for_version(event))
