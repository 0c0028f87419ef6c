"""Spellings of Keras 2 that Keras 3 does not know, where what replaces them is certain."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check.calls import argument, has_stars, is_constant, method
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.plan import PortPlan, Unsure

_NOT_IN_3 = {"workers", "use_multiprocessing", "max_queue_size"}


def port(plan: PortPlan) -> None:
    """Replace them."""
    case = plan.case
    if case.asks_for_keras_2:
        return
    plan.each(_compile, case.methods("compile"))
    plan.each(_rate, (event for event in case.events if case.is_keras_optimizer(event.node)))
    plan.each(_generator, case.methods("fit_generator", "evaluate_generator", "predict_generator"))
    plan.each(_file_of, case.named("keras.callbacks.ModelCheckpoint"))
    for node in case.nodes:
        match node:
            case ast.ImportFrom(
                module="keras.preprocessing.image", names=[ast.alias(name="ImageDataGenerator", asname=other)]
            ):
                alias = f" as {other}" if other else ""
                with plan.sure():
                    plan.edit("swap", node, f"from tensorflow.{node.module} import ImageDataGenerator{alias}")


def _compile(plan: PortPlan, event: Event) -> None:
    call = event.node
    if not has_stars(call):
        plan.drop(call, [keyword for keyword in call.keywords if keyword.arg == "experimental_run_tf_function"])


def _rate(plan: PortPlan, event: Event) -> None:
    rate = argument(event.node, "lr")
    if rate is not None:
        plan.rename(rate, "learning_rate")


def _generator(plan: PortPlan, event: Event) -> None:
    """``fit_generator(flow, steps_per_epoch=...)`` is ``fit``."""
    call = event.node
    odd = [keyword.arg for keyword in call.keywords if keyword.arg in _NOT_IN_3]
    if len(call.args) > 1 or odd or has_stars(call) or not isinstance(call.func, ast.Attribute):
        raise Unsure(call, f"`{method(call)}` has arguments that Keras 3's method has not",
                     f"call {method(call).removesuffix('_generator')} with x= and keywords")  # fmt: skip
    plan.change(call.func, f"{plan.moved(call.func.value)}.{method(call).removesuffix('_generator')}")
    given = argument(call, "generator")
    if given is not None:
        plan.rename(given, "x")


def _file_of(plan: PortPlan, event: Event) -> None:
    """Keras 3 writes whole models to ``.keras`` and weights to ``.weights.h5``, and refuses other endings."""
    path = argument(event.node, "filepath", 0)
    weights = argument(event.node, "save_weights_only", 4)
    text = path.value if isinstance(path, ast.Constant) else None
    if path is None or not isinstance(text, str) or not text.endswith((".h5", ".hdf5")):
        return
    if weights is not None and not is_constant(weights, False):
        if text.endswith(".weights.h5") and isinstance(weights, ast.Constant):
            return
        raise Unsure(event.node, f"Keras 3 refuses the name {text!r} for weights", "end it with .weights.h5")
    plan.change(path, re.sub(r"\.(h5|hdf5)(['\"]+)$", r".keras\2", plan.src(path)))
    plan.note(f"line {path.lineno}: Keras 3 writes whole models to .keras files; the name ends so now")
