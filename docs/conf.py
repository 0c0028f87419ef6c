"""The documentation as a site: `make docs`."""

import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hvdkit.cli import hvdkit_command

sys.path.insert(0, str(Path(__file__).parent))
from uses import ADAPTERS, example, is_for_users, uses

project = "hvdkit"
release = importlib.metadata.version("hvdkit")
copyright = "the authors of hvdkit; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
smartquotes = False  # makes a dash of the -- of options in titles
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["dark.css"]
html_title = f"hvdkit {release}"
exclude_patterns = ["_build", "data"]
# Their names are enough: the site needs no build of Horovod and no MPI.
autodoc_mock_imports = ["horovod", "mpi4py"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Methods of hvdkit's own base classes belong to what a user holds; those of frameworks, and of exceptions, do not.
FOREIGN = (
    "BaseException Callback DataLoader DatasetOver DatasetV2 Exception ImportError LambdaLR OSError PyDataset State "
    "UnaryUnchangedStructureDataset ValueError"
)
autodoc_default_options = {
    "members": True,
    "inherited-members": FOREIGN.replace(" ", ","),
    "special-members": "__call__",
}


class Help(SphinxDirective):
    """What `hvdkit COMMAND --help` prints, for every command."""

    def run(self) -> list[nodes.Node]:
        """A section for each."""
        return list(self._sections(click.Context(hvdkit_command, info_name="hvdkit"), hvdkit_command))

    def _sections(self, context: click.Context, command: click.Command) -> Iterator[nodes.Node]:
        section = nodes.section(ids=[nodes.make_id(context.command_path)])
        section += nodes.title(text=context.command_path)
        section += nodes.literal_block(text=command.get_help(context), language="text")
        yield section
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                one = command.get_command(context, name)
                if one is not None:
                    yield from self._sections(click.Context(one, info_name=name, parent=context), one)


def add_uses(_app: Sphinx, what: str, name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Show below a public name the lines of a program that uses it, and say where another one does."""
    _, *folders, owner, short = ["", *name.split(".")]
    adapter = next((one for one in folders if one in ADAPTERS), owner if owner in ADAPTERS else "torch")
    used = f"{owner}.{short}" if what in ("method", "property", "attribute") else short
    if what != "module" and what != "exception" and (found := uses(adapter, used)):
        also = f", also used in {found[1]}" if found[1:] else ""
        code = [f"   {line}" for line in example(found[0])]
        lines += ["", ".. code-block:: python", f"   :caption: {found[0]}{also}", "", *code, ""]


def skip_member(_app: Sphinx, _what: str, name: str, member: Any, skip: bool, _options: Any) -> bool | None:
    """Leave out what is a framework's, and what is public for hvdkit's other files alone."""
    function = getattr(member, "fget", None) or member
    if inspect.isroutine(function) and not (getattr(function, "__module__", None) or "hvdkit").startswith("hvdkit"):
        return True
    *_, owner, _ = ["", *getattr(function, "__qualname__", name).split(".")]
    return skip or None if is_for_users(owner, name) else True


def setup(app: Sphinx) -> None:
    """Add the directive, and the uses."""
    app.add_directive("help-of-every-command", Help)
    app.connect("autodoc-process-docstring", add_uses)
    app.connect("autodoc-skip-member", skip_member)
