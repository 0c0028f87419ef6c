"""The terms of a live model's training, measured in a process of its own."""

from __future__ import annotations

from typing import Any

from hvdkit.measure.memory.terms import Need, with_horovod
from hvdkit.measure.model_factory.asking import ask

FRAMEWORKS = ("auto", "torch", "keras")
DEVICES = ("cpu", "meta")


def of_model(factory: str, *, fp16_allreduce: bool, fusion_bytes: int, **question: Any) -> tuple[Need, dict[str, Any]]:
    """The terms for ``MODULE:FACTORY`` or ``FILE.py:FACTORY``, and what the process said beside them.

    Args:
        factory: returns a model, (model, inputs) or (model, inputs, loss function of the output).
        fp16_allreduce, fusion_bytes: see ``terms.with_horovod``.
        question: ``batch``, samples on one rank; ``optimizer``, of ``terms.STATES``; ``framework``, of ``FRAMEWORKS``;
            ``input_shape``, of an input of float32 zeros, batch first, where the factory gives none, else None;
            ``device``: "cpu" runs small steps, "meta" computes shapes only, for models that do not fit here;
            ``measure``: also run real steps and take the allocator's peak ("measured_peak", bytes).
    Raises:
        InvalidArgumentError: the factory fails, or its model cannot be measured.
        DataError: the process ended without an answer.
    """
    said = ask("hvdkit.measure.memory.process", factory, **question)
    how = _how(said, question["optimizer"], question["device"], question["batch"])
    need = Need(
        parameters=said["parameters"],
        gradients=said["gradients"],
        states=said["states"],
        activations=said["activations"],
        how=how,
        peak=said["peak"],
    )
    return with_horovod(need, said["gradient_size"], fp16_allreduce, fusion_bytes), said


def _how(said: dict[str, Any], optimizer: str, device: str, batch: int) -> dict[str, str]:
    if said["framework"] == "keras":
        return {
            "parameters": "the model's variables",
            "gradients": "the trainable variables",
            "states": f"as many numbers as {optimizer} keeps for each trainable one",
            "activations": f"the outputs of the layers for {batch} samples, an estimate",
        }
    first, second = said["batches"]
    return {
        "parameters": "parameters and buffers of the model",
        "gradients": "those that a backward produced",
        "states": f"those of {optimizer} after a step",
        "activations": f"what autograd kept for {first} and {second} samples on {device}, as a line to {batch}",
    }
