"""Options about the job behind a recording, for every command that summarizes one."""

from __future__ import annotations

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1
from hvdkit.read.timeline.summary import FUSION_THRESHOLD

OF_THE_JOB = (
    click.option("--ranks", type=AT_LEAST_1, metavar="N", help="Ranks of the job  [default: what the file says]"),
    click.option(
        "--fusion-threshold",
        type=AT_LEAST_0,
        default=FUSION_THRESHOLD,
        metavar="BYTES",
        help="HOROVOD_FUSION_THRESHOLD of the job.",
    ),
)
"""For ``summarize``."""
