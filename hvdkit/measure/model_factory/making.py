"""Making a user's model, in the process that was started for it.

The frameworks are the user's to import: which one made the model is told from what is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import InvalidArgumentError

TAKEN = "inputs that it takes (--input-shape is with the batch, such as 2,784)."
"""What is expected where a model fails on its inputs."""


@dataclass(frozen=True)
class Made:
    """What a factory gave.

    Attributes:
        model: the model.
        inputs: for it; None where there are none.
        loss: a function of its output; None where there is none.
        input_shape: of float32 zeros to use as inputs; None where there is none.
    """

    model: Any
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None
    input_shape: Sequence[int] | None = None


@contextlib.contextmanager
def user_code(what: str, expected: str) -> Iterator[None]:
    """Around what the user's model does: an error of its is one sentence.

    Args:
        what: that fails, the beginning of the sentence: "the model's forward".
        expected: the end of it.
    Raises:
        InvalidArgumentError: it fails.
    """
    try:
        yield
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"{what} failed with {_words(error)}; expected {expected}") from error


def _find(module: str, factory: str) -> Any:
    try:
        found = _load(module)
    except InvalidArgumentError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
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


def _load(module: str) -> Any:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).resolve()
    if not path.is_file():
        raise InvalidArgumentError(f"there is no file {module!r}; expected a Python file that makes the model.")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"{module!r} cannot be imported; expected a Python file.")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def make(module: str, name: str, input_shape: Sequence[int] | None) -> Made:
    """Import a module (or a file) and call its factory.

    Args:
        module: a name that Python finds, or a path that ends in .py.
        name: of a function, class or model in it; may have dots.
        input_shape: of an input of zeros, where the factory gives none.
    Raises:
        InvalidArgumentError: it cannot be found, fails, or returns something else than described.
    """
    factory = model = _find(module, name)
    if isinstance(factory, type) or not _is_model(factory):
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
    if len(parts) > 1 and input_shape is not None:
        raise InvalidArgumentError("it returns inputs and --input-shape is given too; give one of the two.")
    model, inputs, loss = (*parts, None, None)[:3]
    return Made(model, inputs, loss, input_shape)


def _is_model(value: Any) -> bool:
    return any(_is_of(value, framework) for framework in _CLASSES)


_CLASSES = {"keras": ("keras", "Model"), "torch": ("torch.nn", "Module"), "tensorflow": ("tensorflow", "Module")}
"""In the order in which they are tried: a Keras model may also be a module of the framework that it runs on."""


def _is_of(value: Any, framework: str) -> bool:
    """Whether it is a model of a framework; one that nobody has imported cannot have made it."""
    module, name = _CLASSES[framework]
    if module not in sys.modules:
        return False
    return isinstance(value, getattr(sys.modules[module], name))


def framework_of(model: Any, wanted: str) -> str:
    """The framework of a model: "torch", "keras" or "tensorflow".

    Raises:
        InvalidArgumentError: it is of none, or not of the one that is wanted (unless that is "auto").
    """
    names = [wanted] if wanted != "auto" else list(_CLASSES)
    for name in names:
        if _is_of(model, name):
            return name
    expected = "a model of PyTorch, Keras or TensorFlow" if wanted == "auto" else f"a model of {wanted}"
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise InvalidArgumentError(f"it gave a {kind}; expected {expected}.")


def reply(answer: Callable[[dict[str, Any]], dict[str, Any]], arguments: Sequence[str]) -> None:
    """Answer the question of ``asking.ask`` into the file that it names; a user's mistake is ``{"error": message}``.

    Args:
        answer: from the question to the answer.
        arguments: of the command line: the question as JSON, and the file.
    """
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
