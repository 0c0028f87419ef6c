"""Options about the job behind a recording, for every command that summarizes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1
from hvdkit.read.timeline.summary import FUSION_THRESHOLD


def of_the_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click command with ``--ranks`` and ``--fusion-threshold``, see ``summarize``."""
    threshold = click.option(
        "--fusion-threshold",
        type=AT_LEAST_0,
        default=FUSION_THRESHOLD,
        metavar="BYTES",
        help="HOROVOD_FUSION_THRESHOLD of the job.",
    )
    ranks = click.option(
        "--ranks", type=AT_LEAST_1, metavar="N", help="Ranks of the job  [default: what the file says]"
    )
    return ranks(threshold(command))
