"""Spellings of Keras 2 that Keras 3 does not know, where what replaces them is certain."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check import removed
from hvdkit.prepare.check.facts import argument, has_stars, method
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.edits import as_keyword, to, without
from hvdkit.prepare.port.plan import Plan, Unsure

_IMAGES = "keras.preprocessing.image"
_GENERATOR = {"fit_generator": "x", "evaluate_generator": "x", "predict_generator": "x"}
_NOT_IN_3 = {"workers", "use_multiprocessing", "max_queue_size", "pickle_safe", "max_q_size"}


def port(plan: Plan) -> None:
    """Replace them."""
    case = plan.case
    if removed.asks_for_keras_2(case):
        return
    for event in case.events:
        if method(event.node) == "compile" and not has_stars(event.node):
            _without(plan, event, "experimental_run_tf_function")
    for keyword in dict.fromkeys(removed.argument_named("lr", r"^keras\.optimizers\.")(case)):
        with plan.sure():
            plan.change_argument(keyword.value, as_keyword("learning_rate"))
    plan.each(lambda event: _generator(plan, event), *removed.generators(case))
    if any(True for _ in removed.image_generators(case)):
        with plan.sure():
            _import_images(plan)
    plan.each(lambda event: _file_of(plan, event), *case.named("keras.callbacks.ModelCheckpoint"))


def _without(plan: Plan, event: Event, name: str) -> None:
    places = [len(event.node.args) + at for at, one in enumerate(event.node.keywords) if one.arg == name]
    if places:
        with plan.sure():
            plan.change(event.node, without(places))


def _generator(plan: Plan, event: Event) -> None:
    """``fit_generator(flow, steps_per_epoch=...)`` is ``fit``."""
    call = event.node
    odd = [one.arg for one in call.keywords if one.arg in _NOT_IN_3]
    if len(call.args) > 1 or odd or has_stars(call) or not isinstance(call.func, ast.Attribute):
        raise Unsure(call, f"`{method(call)}` has arguments that Keras 3's method has not",
                     f"call {method(call).removesuffix('_generator')} with x= and keywords")  # fmt: skip
    plan.change(call.func, lambda old: old.with_changes(attr=old.attr.with_changes(value=method(call).split("_")[0])))
    given = argument(call, "generator")
    if given is not None:
        plan.change_argument(given, as_keyword("x"))


def _import_images(plan: Plan) -> None:
    """tf.keras still has ``ImageDataGenerator``."""
    for node in plan.case.nodes:
        match node:
            case ast.ImportFrom(
                module="keras.preprocessing.image", names=[ast.alias(name="ImageDataGenerator", asname=other)]
            ):
                alias = f" as {other}" if other else ""
                plan.edit("swap", node, f"from tensorflow.{_IMAGES} import ImageDataGenerator{alias}")
                return
    plan.leave(1, "the package keras has no ImageDataGenerator any more", f"import it from tensorflow.{_IMAGES}")


def _file_of(plan: Plan, event: Event) -> None:
    """Keras 3 writes whole models to ``.keras`` and weights to ``.weights.h5``, and refuses other endings."""
    path = argument(event.node, "filepath", 0)
    weights = argument(event.node, "save_weights_only", 4)
    if (
        not isinstance(path, ast.Constant)
        or not isinstance(path.value, str)
        or not path.value.endswith((".h5", ".hdf5"))
    ):
        return
    if weights is not None and not (isinstance(weights, ast.Constant) and weights.value is False):
        only = isinstance(weights, ast.Constant)
        if path.value.endswith(".weights.h5") and only:
            return
        raise Unsure(event.node, f"Keras 3 refuses the name {path.value!r} for weights", "end it with .weights.h5")
    plan.change(path, to(re.sub(r"\.(h5|hdf5)(['\"]+)$", r".keras\2", plan.src(path))))
    plan.notes.append(f"line {path.lineno}: Keras 3 writes whole models to .keras files; the name ends so now")
