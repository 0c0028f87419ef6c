"""``hvdkit examples``: copies what an installed hvdkit brings along, or a checkout has."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import shutil
import sysconfig
from pathlib import Path

import click

import hvdkit
from hvdkit.common.commands import PATH
from hvdkit.errors import DataNotFoundError, InvalidArgumentError


@click.group()
def examples() -> None:
    """List the example trainings, or copy them to a directory of yours.

    \b
      hvdkit examples list
      hvdkit examples copy my-examples
      hvdkit launch -n 2 -- python my-examples/pytorch/cnn.py

    They train on data that scikit-learn brings: pip install 'hvdkit[examples]'.
    """


@examples.command("list")
def list_() -> None:
    """List the examples and what each shows."""
    root = source()
    scripts = (file for file in (*root.rglob("*.py"), *root.glob("*.ipynb")) if "__pycache__" not in file.parts)
    for script in sorted(scripts, key=lambda file: file.parts):  # those of one framework together
        text = script.read_text(encoding="utf-8")
        if script.suffix == ".ipynb":
            told = "".join(json.loads(text)["cells"][0]["source"]).lstrip("# ")
        else:
            told = ast.get_docstring(ast.parse(text)) or ""
        click.echo(f"{script.relative_to(root)!s:<32} {told.partition(chr(10))[0]}")


@examples.command()
@click.argument("directory", type=PATH)
def copy(directory: Path) -> None:
    """Copy the examples to DIRECTORY, which must not exist yet."""
    root = source()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(root, directory, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise InvalidArgumentError(f"{directory} exists already; name a directory that does not.") from None
    except OSError as error:
        raise InvalidArgumentError(
            f"{directory} cannot be written: {error.strerror or error}; name another directory."
        ) from None
    click.echo(f"{directory}\nNext: hvdkit launch -n 2 -- python {directory / 'pytorch/cnn.py'}")


def source() -> Path:
    """Directory of the examples: of the checkout that hvdkit runs from, else as the wheel installed them.

    Raises:
        DataNotFoundError: there are none.
    """
    checkout = Path(hvdkit.__file__).parents[1] / "examples"
    if (checkout / "demo.py").is_file():
        return checkout
    for file in importlib.metadata.files("hvdkit") or ():
        if file.parts[-3:] == ("hvdkit", "examples", "demo.py"):
            return Path(str(file.locate())).resolve().parent
    raise DataNotFoundError(
        f"The examples are not installed (expected below {sysconfig.get_path('data')}/share/hvdkit/examples); "
        "'pip install --force-reinstall --no-deps hvdkit' puts them there."
    )
