"""What worked with TensorFlow 1 and Keras 2, as Horovod's examples still have it, and fails with those of today."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.facts import argument
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event

_SESSIONS = ("tensorflow.ConfigProto", "tensorflow.Session", "keras.backend.set_session")
_IMAGES = "keras.preprocessing.image"
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
        wrapped = argument(event.node, "optimizer", 0)
        sources = case.calls(wrapped) if wrapped is not None else []
        on_keras = any(case.name(call).startswith("keras.") for call in sources)
        if not name.endswith("Tape") and (
            name.startswith(_HOROVODS) or (name.startswith("horovod.tensorflow.") and on_keras)
        ):
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
    for event in _of_keras_3(case, Role.BROADCAST_CALLBACK, Role.AVERAGE_CALLBACK, Role.WARMUP):
        if case.name(event.node).startswith(_HOROVODS):
            yield event


def sessions(case: Case) -> Iterator[Event]:
    """TensorFlow 1's settings of a session, which chose the GPU."""
    return (event for event in case.events if case.name(event.node) in _SESSIONS and not asks_for_version(event))


def generators(case: Case) -> Iterator[Event]:
    """``fit_generator`` and its like."""
    if not asks_for_keras_2(case):
        yield from case.methods("fit_generator", "evaluate_generator", "predict_generator")


def image_generators(case: Case) -> Iterator[Event]:
    """``ImageDataGenerator`` of the package keras; tf.keras still has it."""
    if not asks_for_keras_2(case) and any(name.startswith(_IMAGES) for name in case.imported):
        yield from case.named(f"{_IMAGES}.ImageDataGenerator")


def argument_named(word: str, called: str) -> Callable[[Case], Iterator[ast.keyword]]:
    """Finds an argument of functions whose name matches ``called``."""

    def find(case: Case) -> Iterator[ast.keyword]:
        for event in [] if asks_for_keras_2(case) else case.events:
            name = case.name(event.node) or ast.unparse(event.node.func)
            if re.search(called, name):
                yield from (one for one in event.node.keywords if one.arg == word)

    return find


def _of_keras_3(case: Case, *roles: Role) -> Iterator[Event]:
    if not asks_for_keras_2(case):
        yield from (event for event in case.having(*roles) if not asks_for_version(event))
