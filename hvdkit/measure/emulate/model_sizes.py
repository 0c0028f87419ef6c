"""Sizes of a live model's gradients, in the order in which backward produces them.

The model is made in a process of its own (``model_process``), so that no framework is loaded here and whatever
the user's module does stays there.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.measure.emulate.plan import Collective
from hvdkit.measure.model_factory.asking import ask

FRAMEWORKS = ("auto", "torch", "keras", "tensorflow")
PER = ("parameter", "layer")


def of_model(
    factory: str, *, framework: str = "auto", per: str = "parameter", input_shape: Sequence[int] | None = None
) -> tuple[list[Collective], str]:
    """The gradients of a model, in the order in which they are ready, and in words how that order was found.

    Args:
        factory: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``. FACTORY is called without arguments (a model is taken as it
            is) and returns a model, or ``(model, inputs)``, or ``(model, inputs, loss)``: inputs is one tensor, a tuple
            or list of them, or a dict of keyword arguments; loss a function of the model's output.
        framework: of ``FRAMEWORKS``; "auto" finds out.
        per: one collective per "parameter", or one per "layer" (the parameters of one module together).
        input_shape: of one input of float32 zeros, batch first, where FACTORY gives none.
    Returns:
        (collectives, source). With inputs the order is that of a real backward, but for Keras on JAX. Else it is the
        reverse of the order in which the model lists its parameters; source says which.
    Raises:
        InvalidArgumentError: FACTORY cannot be found, fails, or gives no model.
        DataError: the process that makes the model ended without an answer.
    """
    process = "hvdkit.measure.emulate.model_process"
    answer = ask(process, factory, framework=framework, per=per, input_shape=input_shape)
    name = factory.rpartition(":")[2]
    collectives = [Collective(one["name"], one["elements"], one["dtype"]) for one in answer["gradients"]]
    return collectives, f"model {name} ({answer['framework']}), per {per}, {answer['order']}"
