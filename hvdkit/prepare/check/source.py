"""A script as a syntax tree."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import files
from hvdkit.errors import InvalidArgumentError


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
    """A script's tree, without warnings about the style of what is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(decoded(content)[0], filename=path)


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
