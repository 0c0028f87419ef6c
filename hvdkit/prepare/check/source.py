"""A script as a syntax tree, and what the text of a call says: its place, arguments, object and name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hvdkit.common import files
from hvdkit.errors import InvalidArgumentError

_DEEPEST = 250
"""So many levels of sums, methods or ``elif`` are walked through, three frames each, within Python's recursion limit.

There the garbage collector's finalizers fail, of whatever the process has left. What LibCST nests more deeply than
``ast`` (an ``and`` of 1000 terms, 150 calls in one another) still comes there, and is refused then.
"""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Script:
    """A script that was read and parsed, and not run.

    Attributes:
        path: as the user gave it.
        tree: the whole file.
        content: its bytes.
    """

    path: str
    tree: ast.Module
    content: bytes = b""


def read_script(path: str) -> Script:
    """Read and parse one script.

    Raises:
        InvalidArgumentError: it is not there, not a file, not text in its encoding (PEP 263) or not Python (with
            the line).
    """
    if Path(path).suffix == ".ipynb":
        raise InvalidArgumentError(
            f"{path} is a notebook, expected a Python script; run `jupyter nbconvert --to script {path}` first."
        )
    try:
        content = files.content(Path(path))
        return Script(path, parsed(content, path), content)
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be read ({error.strerror}); give the path of a Python script."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path} is not UTF-8 (byte {error.start}), as Python scripts without a coding line are; save it as UTF-8."
        ) from error
    except SyntaxError as error:
        reason = " ".join((error.msg or "invalid syntax").split())
        raise InvalidArgumentError(
            f"{path}, line {error.lineno or 1}, is not Python that this interpreter can read ({reason}); give a script "
            "that runs under Python 3."
        ) from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not Python ({error}); give a Python script.") from error
    except (RecursionError, MemoryError) as error:
        raise too_deep(path) from error


def parsed(content: bytes, path: str) -> ast.Module:
    """A script's tree, without warnings about the style of what is not ours.

    Raises:
        RecursionError: it is deeper than can be walked through.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(decoded(content)[0], filename=path)
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise RecursionError
    return tree


def too_deep(path: str) -> InvalidArgumentError:
    """The error for expressions nested beyond what Python itself can walk through."""
    return InvalidArgumentError(
        f"{path} nests expressions too deeply to be read; give a script that was written by hand."
    )


def decoded(content: bytes) -> tuple[str, str]:
    """A script's text, and its encoding: UTF-8, or what its coding line says."""
    encoding = "utf-8-sig" if content.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        return content.decode(encoding), encoding
    except UnicodeDecodeError:
        with suppress(SyntaxError, UnicodeDecodeError, LookupError):  # no coding line, or a wrong one
            encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
            return content.decode(encoding), encoding
        raise


# Nodes ----------------------------------------------------------------------------------------------------------------


def position(node: ast.AST) -> tuple[int, int]:
    """Line and column."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def arguments(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by its name or its position; None where it is not given in the text."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        return None if any(isinstance(one, ast.Starred) for one in before) else before[-1]
    return None


def has_stars(call: ast.Call) -> bool:
    """Whether a call takes arguments from ``*`` or ``**``, which the text may not show."""
    starred = any(isinstance(value, ast.Starred) for value in call.args)
    return starred or any(keyword.arg is None for keyword in call.keywords)


def receiver(call: ast.Call) -> ast.expr:
    """The object whose method is called; what is called itself where it is no method."""
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether an argument is this literal."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def method(call: ast.Call) -> str:
    """The name of the method, or of the function in a module, that is called; "" for a plain name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def makes_object(call: ast.Call) -> bool:
    """Whether what is called is named like a class."""
    return ast.unparse(call.func).rpartition(".")[2][:1].isupper()


def word(node: ast.AST) -> str:
    """The name that a node uses, in lower case with underscores; "" for none."""
    if isinstance(node, ast.Call):
        return word(node.func)
    name = getattr(node, {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}.get(type(node), ""), None)
    return _snake_case(name) if isinstance(name, str) else ""


@lru_cache(maxsize=4096)
def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def entries(node: ast.AST, *keys: object) -> list[ast.expr]:
    """The values under constant keys in ``{"key": value}``."""
    pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
    return [value for key, value in pairs if isinstance(key, ast.Constant) and key.value in keys]


def default_of(function: FunctionNode, parameter: ast.arg) -> ast.expr | None:
    """The default of a parameter; None where it has none."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = dict(zip(reversed(positional), reversed(given.defaults), strict=False))
    return defaults.get(parameter) or dict(zip(given.kwonlyargs, given.kw_defaults, strict=True)).get(parameter)


def given_for(function: FunctionNode, parameter: ast.arg, call: ast.Call) -> list[ast.expr]:
    """What a call gives for one parameter; everything that could be it where the call uses ``*`` or ``**``."""
    positional = [*function.args.posonlyargs, *function.args.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    if named := [keyword.value for keyword in call.keywords if keyword.arg == parameter.arg]:
        return named
    if parameter is function.args.vararg:
        return call.args[len(positional) :]
    if parameter is function.args.kwarg:
        known = {one.arg for one in positional + function.args.kwonlyargs}
        return [keyword.value for keyword in call.keywords if keyword.arg not in known]
    spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
    if parameter not in positional:
        return spread
    place = positional.index(parameter)
    star = next((i for i, value in enumerate(call.args[: place + 1]) if isinstance(value, ast.Starred)), None)
    return [*call.args[star:], *spread] if star is not None else call.args[place : place + 1] or spread
