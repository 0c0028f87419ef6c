"""The command ``hvdkit check``."""

from __future__ import annotations

import shutil

import click

from hvdkit.common.commands import JSON
from hvdkit.prepare.check.report import as_json, as_text, check_script
from hvdkit.prepare.check.source import read_script

_WIDEST = 110


@click.command()
@click.argument("scripts", nargs=-1, required=True, metavar="SCRIPT.py ...")
@JSON
def check(scripts: tuple[str, ...], json_: bool) -> int:
    """Report which of the eight steps a training script does, and its mistakes.

    Reads the text of the scripts; runs nothing and imports nothing from them. It understands scripts that use
    Horovod (horovod.torch, horovod.tensorflow, horovod.tensorflow.keras, horovod.keras), hvdkit or PyTorch's
    DistributedDataParallel.

    \b
    For each of the eight steps it says
      done         with the lines
      missing
      not needed   and why: DDP, for example, broadcasts the model itself
      undecided    what the text does not settle: data that another module loads, for example

    Then it lists findings by line, each with what, why and fix. Examples are a rank that is compared without being
    called, a checkpoint that every rank writes, and a collective on a branch that one rank takes. docs/check.md lists
    all rules. A finding is what the text shows for certain.

    \b
    Examples:
      hvdkit check train.py
      hvdkit check examples/*/cnn.py
      hvdkit check --json train.py | python -c 'import json, sys; print(json.load(sys.stdin)["ok"])'

    The JSON object has "ok" and "scripts"; each of these has "path", "library" ("horovod", "hvdkit", "ddp" or "none"),
    "steps" (number, name, status, lines, note) and "findings" (rule, line, what, why, fix). A script without any of
    the libraries trains in one process: the report says so, and that is no finding.

    Exit status: 0 without findings, 1 with findings, 2 for bad usage, such as a file that is not Python.
    """
    checked = [check_script(script) for script in [read_script(path) for path in scripts]]
    if json_:
        click.echo(as_json(checked), nl=False)
    else:
        click.echo(as_text(checked, min(shutil.get_terminal_size().columns, _WIDEST)))
    return 1 if any(one.findings for one in checked) else 0
