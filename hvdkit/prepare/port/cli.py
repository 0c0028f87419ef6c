"""The command ``hvdkit port``."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import click

from hvdkit.common import files
from hvdkit.common.commands import time_limit
from hvdkit.prepare.port import edits, run
from hvdkit.prepare.port.run import Ported


@click.command()
@click.argument("script", metavar="SCRIPT.py")
@click.argument("arguments", metavar="[-- ARGUMENT ...]", nargs=-1)
@click.option("-o", "--output", metavar="OUT", type=click.Path(path_type=Path), help="Write the ported script there.")
@click.option("--in-place", is_flag=True, help="Overwrite SCRIPT.py with the ported script.")
@click.option("--diff", is_flag=True, help="Show what changes, as a unified diff, and write nothing.")
@click.option("--try", "try_", is_flag=True, help="Run both scripts for some steps, and compare their weights.")
@click.option(
    "--try-steps", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N", help="Steps of --try."
)
@time_limit(600.0, "Time limit of each run of --try.", "--try-timeout", most=None)
def port(
    script: str,
    arguments: tuple[str, ...],
    *,
    output: Path | None,
    in_place: bool,
    diff: bool,
    try_: bool,
    try_steps: int,
    try_timeout: float,
) -> int:
    """Write the eight steps into a training script.

    Reads a script that trains in one process, that uses Horovod, or PyTorch's DistributedDataParallel, and writes one
    that uses hvdkit. It handles PyTorch loops, Keras' fit and loops over a TensorFlow tape. Nothing is run without
    --try. What is not changed stays byte for byte.

    It never guesses: what the text does not show for certain stays as it is. It is listed with its line in the ported
    script, the reason, and what to write by hand. What `hvdkit check` finds in the result is listed, too.

    --try runs the script in one process and the ported one on 1 and on 2 ranks here, from fixed seeds, for a few
    optimizer steps. They run in this directory, with your data and the arguments after `--`; what a script writes by
    then is written. 1 rank must take the script's own steps. 2 ranks must take those of one process that is given both
    ranks' batches. The verdict comes first, then how near the weights are, then what could not be compared, and why.

    \b
    Examples:
      hvdkit port train.py --diff
      hvdkit port train.py -o train_hvdkit.py
      hvdkit port train.py -o train_hvdkit.py --try -- --batch-size 16

    Without -o or --in-place the script goes to standard output, and the report to standard error.

    Exit status: 0 where no place is left to write by hand and --try finds no difference, 1 otherwise, 2 for bad usage,
    such as a file that is not Python. A step that the text leaves open is a note.
    """
    if (output is not None) + in_place + diff > 1:
        raise click.UsageError("give one of -o, --in-place and --diff")
    if arguments and not try_:
        raise click.UsageError(f"{arguments[0]!r} is an argument of the script, which runs only with --try")
    ported = run.port(edits.read(script))
    if diff:
        _show_diff(ported)
    elif in_place:
        path = Path(script).resolve()
        mode = path.stat().st_mode
        with files.replacing(path) as file:
            file.write(ported.after)
        path.chmod(mode)
    elif output is not None:
        with files.replacing(output, Path(script)) as file:
            file.write(ported.after)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(ported.after)
    told = in_place or output is not None
    click.echo(ported.as_text(), err=not told)
    equal = True
    if try_:
        from hvdkit.prepare.trial import attempt as trial  # with NumPy, which nothing else here needs

        scripts = trial.Scripts(ported.before.path, ported.before.content, ported.after, ported.library == "ddp")
        tried = trial.attempt(scripts, arguments, try_steps, try_timeout)
        click.echo(tried.as_text(), err=not told)
        equal = tried.ok
    return 1 if ported.left or not equal else 0


def _show_diff(ported: Ported) -> None:
    before, after = (re.findall(rb".*\n|.+", one) for one in (ported.before.content, ported.after))
    path = os.fsencode(ported.before.path)
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, path, path)
    ended = (one if one.endswith(b"\n") else one + b"\n\\ No newline at end of file\n" for one in lines)
    click.echo(b"".join(ended), nl=False)
