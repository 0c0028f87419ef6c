"""The command ``hvdkit test``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence

import click
from msgspec import structs

from hvdkit.common import json_files
from hvdkit.common.commands import JSON, time_limit
from hvdkit.common.json_files import Document
from hvdkit.prepare.doctor.facts import Tested
from hvdkit.prepare.doctor.probe import train

FRAMEWORKS = ("torch", "tensorflow", "keras")


class SmokeTest(Document, frozen=True):
    """What ``hvdkit test`` found.

    Attributes:
        ok: every check passed.
        checks: in their order.
    """

    kind = "test"
    written_by = "hvdkit test --json"

    ok: bool
    checks: tuple[Tested, ...]


@click.command()
@JSON
@click.option(
    "--framework",
    "frameworks",
    multiple=True,
    type=click.Choice(FRAMEWORKS),
    help="Framework to test; repeatable  [default: all that are installed]",
)
@time_limit(120.0, "Time limit for each framework; raise it on a slow network file system.")
def test(json_: bool, frameworks: tuple[str, ...], timeout: float) -> int:
    """Train on 2 ranks of this machine, in every installed framework, to see that it works.

    Builds and changes nothing. For each of PyTorch, TensorFlow and Keras, `hvdkit launch` starts 2 ranks. They add up
    their numbers through Horovod, each takes 10 training steps on data of its own, and their weights must be the same
    afterwards, bit for bit. GPUs are used where there is one for each rank. Takes about half a minute.

    \b
    Examples:
      hvdkit test
      hvdkit test --framework torch
      hvdkit test --json > test.json

    One line a check: "ok", or what is wrong and the fix; `hvdkit doctor` tells the reasons. The JSON object has "ok"
    and "checks" (check, ok, what, fix).

    Exit status: 0 when all works, 1 when a check failed, 2 for bad usage.
    """
    found = []
    for one in checks(frameworks, timeout):
        found.append(one)
        if not json_:
            word = click.style("ok    ", fg="green") if one.ok else click.style("failed", fg="red")
            click.echo(f"{word}  {one.check.ljust(20)}  {one.what}" + (f"  Fix: {one.fix}" if one.fix else ""))
    ok = all(one.ok for one in found)
    if json_:
        click.echo(json_files.encode(SmokeTest(ok, tuple(found))), nl=False)
    else:
        failed = sum(not one.ok for one in found)
        click.echo("\nTraining works here." if ok else f"\n{failed} of {len(found)} checks failed.")
    return 0 if ok else 1


def checks(frameworks: Sequence[str], timeout_s: float) -> Iterator[Tested]:
    """Every check as it is done.

    Args:
        frameworks: those to test; () for all that are installed.
        timeout_s: seconds for each of them.
    """
    wanted = frameworks or tuple(name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None)
    if not wanted:
        fix = "'pip install torch' or 'pip install tensorflow', then 'hvdkit install'."
        yield Tested("framework", False, f"None of {', '.join(FRAMEWORKS)} is installed.", fix)
    elif importlib.util.find_spec("horovod") is None:
        yield Tested("Horovod", False, "Horovod is not installed.", "'hvdkit install' builds it for what is here.")
    else:
        yield Tested("Horovod", True, f"{importlib.metadata.version('horovod')} is installed")
        for framework in wanted:
            for one in train(framework, timeout_s).checks:
                yield one if one.ok else structs.replace(one, fix=f"'hvdkit doctor' tells more; {one.fix}")
