"""A plan as text: the command line to paste into a shell, and the reason for each setting."""

from __future__ import annotations

import shlex
import textwrap

from hvdkit.run.launch.model import LaunchPlan, Setting

_MARGIN = 4
_WIDTH = 110


def command_line(plan: LaunchPlan) -> str:
    """The command line with the environment variables it adds, quoted for a shell."""
    assignments = [f"{name}={value}" for name, value in plan.added.items()]
    words = ["env", *assignments] if assignments else []
    return shlex.join([*words, *plan.launcher, *plan.command])


def explanation(plan: LaunchPlan) -> str:
    """Each setting, and indented below it why it was chosen."""
    return "\n".join(_explain(setting) for setting in plan.settings)


def _explain(setting: Setting) -> str:
    assignments = [f"{name}={value}" for name, value in setting.variables.items()]
    heading = shlex.join([*setting.words, *assignments])
    if not heading:
        return setting.why
    indent = " " * _MARGIN
    return f"{heading}\n{textwrap.fill(setting.why, _WIDTH, initial_indent=indent, subsequent_indent=indent)}"
