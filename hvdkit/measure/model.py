"""A user's own model from ``MODULE:FACTORY``, made in a process of its own; its gradients, and the order of a backward.

``hvdkit emulate`` asks a model for its gradients and ``hvdkit plan memory`` for what it keeps (``plan.live_model``);
neither may load a framework where the command line runs, nor run the user's module there. The frameworks are the user's
to import: which one made the model is told from what is loaded.

``python -m hvdkit.measure.model QUESTION REPLY`` finds the gradients: QUESTION is JSON (see ``ask``), REPLY the file to
write.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.errors import DataError, InvalidArgumentError

TAKEN = "inputs that it takes (--input-shape is with the batch, such as 2,784)."
"""What is expected where a model fails on its inputs."""


@dataclass(frozen=True)
class Made:
    """What a factory gave.

    Attributes:
        model: the model.
        inputs: for it; None where there are none.
        loss: a function of its output; None where there is none.
    """

    model: Any
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None

    def called(self) -> Any:
        """What the model gives for its inputs: of a mapping by name, of a tuple or list one after the other."""
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        return self.model(*self.inputs) if isinstance(self.inputs, tuple | list) else self.model(self.inputs)

    def torch_loss(self) -> Any:
        """What the backward pass of a PyTorch model begins with, a tensor of one number.

        It is the loss function of the output; without one, "loss" of an output that is a mapping and has it, or else
        the sum of all numbers in the output that depend on parameters.

        Raises:
            InvalidArgumentError: no tensor in the output depends on parameters.
        """
        output = self.called()
        if self.loss is not None:
            return self.loss(output)
        own = output.get("loss") if isinstance(output, Mapping) else None
        if own is not None:
            return own
        parts = [(tensor.abs() if tensor.is_complex() else tensor).float().sum() for tensor in _depending(output)]
        if not parts:
            raise InvalidArgumentError(
                f"the model gave a {type(output).__name__} without a tensor that depends on parameters; return "
                "(model, inputs, loss function)."
            )
        return sum(parts[1:], parts[0])


def _depending(output: Any) -> Iterator[Any]:
    """The tensors in an output that a backward can start from."""
    if isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _depending(part)
    elif getattr(output, "requires_grad", False):
        yield output


@contextlib.contextmanager
def user_code(what: str, expected: str) -> Iterator[None]:
    """Around what the user's model does: an error of its is one sentence.

    ``what`` fails is the beginning of the sentence ("the model's forward"), ``expected`` the end of it.
    """
    try:
        yield
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"{what} failed with {_words(error)}; expected {expected}") from error


def _find(module: str, factory: str) -> Any:
    """What a module, or a file, calls by a name, which may have dots."""
    path, in_file = Path(module).resolve(), module.endswith(".py")
    if in_file and not path.is_file():
        raise InvalidArgumentError(f"there is no file {module!r}; expected a Python file that makes the model.")
    try:
        found: Any
        if in_file:  # whatever its name is; what lies beside it can be imported
            sys.path.insert(0, str(path.parent))
            spec: Any = importlib.util.spec_from_file_location(path.stem, path)
            sys.modules[path.stem] = found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidArgumentError(
            f"importing {module!r} failed with {_words(error)}; expected a module that Python finds from the current "
            "directory, in an environment that has what it imports."
        ) from error
    for part in factory.split("."):
        if not hasattr(found, part):
            raise InvalidArgumentError(
                f"{module!r} has no {factory!r}; expected the name of a function, class or model."
            )
        found = getattr(found, part)
    return found


def make(module: str, name: str, input_shape: Sequence[int] | None) -> Made:
    """Import a module (or a file) and call its factory.

    Args:
        module: a name that Python finds, or a path that ends in .py.
        name: of a function, class or model in it; may have dots. It is called without arguments (a model is taken as it
            is) and returns a model, or ``(model, inputs)``, or ``(model, inputs, loss)``: inputs is one tensor, a tuple
            or list of them, or a dict of keyword arguments; loss a function of the model's output.
        input_shape: of an input of zeros, batch first, of the type of the model, where the factory gives none.
    Raises:
        InvalidArgumentError: it cannot be found, fails, or returns something else than described.
    """
    factory = model = _find(module, name)
    if isinstance(factory, type) or not any(_is_of(factory, framework) for framework in _CLASSES):
        if not callable(factory):
            raise InvalidArgumentError(
                f"it names a {type(factory).__name__}; expected a function that returns a model."
            )
        with user_code("calling it", "a function without arguments that returns a model, or (model, inputs)."):
            model = factory()
    parts = model if isinstance(model, tuple) else (model,)
    if not 1 <= len(parts) <= 3 or (len(parts) == 3 and not callable(parts[2])):
        raise InvalidArgumentError(
            f"it returned {len(parts)} things; expected a model, (model, inputs) or (model, inputs, loss function)."
        )
    made = Made(*parts)
    if input_shape is None:
        return made
    if made.inputs is not None:
        raise InvalidArgumentError("it returns inputs and --input-shape is given too; give one of the two.")
    if framework_of(made.model) == "keras":
        return replace(made, inputs=importlib.import_module("keras").ops.zeros(tuple(input_shape)))
    torch: Any = importlib.import_module("torch")
    like = next((parameter for parameter in made.model.parameters() if parameter.is_floating_point()), torch.empty(0))
    return replace(made, inputs=torch.zeros(tuple(input_shape), device=like.device, dtype=like.dtype))


_CLASSES = {"keras": ("keras", "Model"), "torch": ("torch.nn", "Module")}
"""In the order in which they are tried: a Keras model may also be a module of the framework that it runs on."""


def _is_of(value: Any, framework: str) -> bool:
    """Whether it is a model of a framework; one that nobody has imported cannot have made it."""
    module, name = _CLASSES[framework]
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def framework_of(model: Any) -> str:
    """The framework of a model: "torch" or "keras".

    Raises:
        InvalidArgumentError: it is of none.
    """
    for name in _CLASSES:
        if _is_of(model, name):
            return name
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise InvalidArgumentError(f"it gave a {kind}; expected a model of PyTorch or Keras.")


def ask(process: str, model: str, **more: Any) -> dict[str, Any]:
    """What a module answers that is run as ``python -m PROCESS QUESTION REPLY``; its prints are kept off ours.

    QUESTION and what is written to the file REPLY are JSON. ``model``, which is ``MODULE:FACTORY`` or
    ``FILE.py:FACTORY``, is part of QUESTION, told apart; ``more`` is the rest.

    Raises:
        InvalidArgumentError: ``model`` is something else, or what the module found wrong with it.
        DataError: it ended without an answer.
    """
    module, colon, name = model.rpartition(":")
    if not (colon and module and name):
        raise InvalidArgumentError(
            f"--model is {model!r}; expected MODULE:FACTORY or FILE.py:FACTORY, such as nets:Classifier."
        )
    question = {"module": module, "factory": name, **more}
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder) / "reply.json"
        done = subprocess.run(
            [sys.executable, "-m", process, json.dumps(question), str(reply)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
        )
        try:
            answer: dict[str, Any] = json.loads(reply.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise DataError(
                f"The process that makes the model ended with status {done.returncode} and no answer: {last[:300]}"
            ) from error
    if "error" in answer:
        raise InvalidArgumentError(f"--model {model}: {answer['error']}")
    return answer


def reply(answer: Callable[[dict[str, Any]], dict[str, Any]], arguments: Sequence[str]) -> None:
    """Answer QUESTION of ``ask`` into the file REPLY, the ``arguments``; a user's mistake is ``{"error": message}``."""
    question, file = arguments
    try:
        said = answer(json.loads(question))
    except InvalidArgumentError as error:
        said = {"error": str(error)}
    Path(file).write_text(json.dumps(said), encoding="utf-8")


def _words(error: BaseException) -> str:
    """An error in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# Gradients ---------------------------------------------------------------------------------------------------------

OBSERVED = "in the order in which a backward produced them"
NO_INPUTS = (
    "in the reverse order of model.parameters(), since no input is known (give --input-shape, or return (model, "
    "inputs), for the order of a real backward)"
)
KERAS = "in the reverse order of model.trainable_variables: Keras hands over all gradients of a step together"


class ModelGradient(NamedTuple):
    """One parameter's gradient: its name, the layer that holds it, how many numbers it has, and their type in words."""

    name: str
    layer: str
    elements: int
    dtype: str


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The gradients of a model: framework, order (in words), and gradients, a list of name, elements and dtype."""
    made = make(question["module"], question["factory"], question["input_shape"])
    framework = framework_of(made.model)
    gradients, order = of_torch(made) if framework == "torch" else (of_keras(made), KERAS)
    gradients = [gradient for gradient in gradients if gradient.elements > 0]
    if not gradients:
        raise InvalidArgumentError(
            "the model has no parameter that is trained; expected at least one (a model that makes them in its first "
            "call needs --input-shape, or a factory that returns (model, inputs))."
        )
    if question["per"] == "layer":
        gradients = by_layer(gradients)
    listed = [{"name": one.name, "elements": one.elements, "dtype": one.dtype} for one in gradients]
    return {"framework": framework, "order": order, "gradients": listed}


def by_layer(gradients: Sequence[ModelGradient]) -> list[ModelGradient]:
    """One for each layer, ready when the last of its gradients is.

    A layer whose gradients have several types gives one for each type: a collective has one type.
    """
    sums: dict[tuple[str, str], int] = {}
    for _, layer, elements, dtype in gradients:
        sums[layer, dtype] = elements + sums.pop((layer, dtype), 0)  # to the end: it is not ready before
    layers = [layer for layer, _ in sums]
    return [
        ModelGradient(layer if layers.count(layer) == 1 else f"{layer} ({dtype})", layer, elements, dtype)
        for (layer, dtype), elements in sums.items()
    ]


def of_torch(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the parameters that are trained, in the order in which they are ready, and how that was found.

    With inputs: the order in which one backward accumulates them, which is when Horovod's optimizer announces them.
    Parameters that get no gradient come last, as Horovod reduces those when the optimizer's step begins. Without
    inputs: the reverse of ``model.parameters()``.

    Raises:
        InvalidArgumentError: the forward or the backward fails, or the shapes are not known without inputs.
    Source: torch.Tensor.register_post_accumulate_grad_hook (PyTorch 2.1).
    """
    import torch
    from torch.nn.parameter import is_lazy

    loss = None
    if made.inputs is not None:
        with user_code("the model's forward", TAKEN), torch.enable_grad():
            loss = made.torch_loss()
    # after the forward, which makes lazy parameters
    trained = [(name, parameter) for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    lazy = [name for name, parameter in trained if is_lazy(parameter)]
    if lazy:
        raise InvalidArgumentError(
            f"the shape of {lazy[0]!r} is not known before the model has seen an input; give --input-shape, or "
            "return (model, inputs)."
        )
    gradients = [
        ModelGradient(
            name, name.rpartition(".")[0] or "model", parameter.numel(), str(parameter.dtype).removeprefix("torch.")
        )
        for name, parameter in trained
    ]
    if loss is None:
        return gradients[::-1], NO_INPUTS
    ready: list[int] = []
    for index, (_, parameter) in enumerate(trained):
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    with user_code(
        "the model's backward", "a loss that depends on parameters (return (model, inputs, loss function))."
    ):
        loss.backward()
    order = list(dict.fromkeys(ready))
    missing = [index for index in range(len(trained)) if index not in set(order)]
    words = OBSERVED + (f"; {len(missing)} without a gradient in it come last" if missing else "")
    return [gradients[index] for index in (*order, *missing)], words


def of_keras(made: Made) -> list[ModelGradient]:
    """The gradients of the variables that are trained, the last one first."""
    if made.inputs is not None:
        with user_code("the model's call", TAKEN):
            made.called()  # which makes variables that are made in a first call
    if not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input or --input-shape, or return "
            "(model, inputs)."
        )
    found = []
    for variable in reversed(made.model.trainable_variables):
        path = str(variable.path)
        layer = path.rpartition("/")[0] or "model"
        found.append(ModelGradient(path, layer, math.prod(variable.shape), str(variable.dtype)))
    return found


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
