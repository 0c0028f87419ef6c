"""The options of ``hvdkit launch``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    PATH,
    not_below_0,
    output_file,
    seconds_above_0,
    shortened,
)
from hvdkit.run.launch import plan
from hvdkit.run.launch.model import BATCH_GRACE_S, BINDINGS, GRACE_S

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def environment_variables(_ctx: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """Read ``NAME=VALUE`` pairs, and names of this environment, for click."""
    variables = {}
    for pair in pairs:
        match = _VARIABLE.fullmatch(f"{pair}={os.environ[pair]}" if pair in os.environ else pair)
        if match is None:
            raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}; a name alone must be set here")
        variables[match[1]] = match[2]
    return variables


def _output_file(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    return _absolute(ctx, parameter, output_file(ctx, parameter, file))


def _directory(name: str, help_text: str) -> Callable[[Any], Any]:
    """An option for the directory of a recording."""
    kind = click.Path(path_type=Path, file_okay=False)
    return click.option(name, type=kind, callback=_absolute, metavar="DIR", help=help_text)


def _absolute(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _profiled_steps(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    counts = tuple(int(word) for word in text.split(",") if word.isascii() and word.isdigit())
    if len(counts) != 3 or len(text.split(",")) != 3:
        raise click.BadParameter(f"expected WAIT,WARMUP,ACTIVE, numbers of steps such as 10,2,5, got {shortened(text)}")
    if counts[0] + counts[1] == 0 or counts[2] == 0:
        raise click.BadParameter(
            f"expected a step to leave out or to throw away and one to record, got {text!r}: profiling begins at the "
            "end of the first step"
        )
    return counts


LAUNCHER = click.option(
    "--launcher",
    type=click.Choice(["auto", *plan.LAUNCHERS]),
    default="auto",
    help="auto: that of the batch job (srun, PALS's mpiexec, jsrun, aprun), else mpirun when Horovod was built with "
    "MPI, else horovodrun (Gloo).",
)
PPN = click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks on each host.")
HOSTS = click.option(
    "--hosts", "-H", metavar="H:S,...", help="Hosts and the ranks that each may take  [default: the batch job's]"
)
HOSTFILE = click.option(
    "--hostfile",
    type=PATH,
    metavar="FILE",
    help="Read --hosts from a file, one HOST:SLOTS or HOST slots=SLOTS per line.",
)
THREADS = click.option(
    "--threads",
    type=AT_LEAST_1,
    metavar="T",
    help="Compute threads per rank (OMP_NUM_THREADS)  [default: yours, else --depth, else cores / N]",
)
DEPTH = click.option("--depth", type=AT_LEAST_1, metavar="D", help="Cores per rank; each rank is bound to its cores.")
ENV = click.option(
    "--env",
    "variables",
    multiple=True,
    callback=environment_variables,
    metavar="NAME[=VALUE]",
    help="Set an environment variable in every rank; a name alone takes its value from here, unseen by other users. "
    "Repeatable.",
)
OF_HOROVOD = (
    click.option(
        "--cycle-time-ms",
        type=float,
        callback=not_below_0,
        metavar="MS",
        help="Horovod's cycle time: time between two negotiations (HOROVOD_CYCLE_TIME).",
    ),
    click.option(
        "--fusion-threshold-mb",
        type=float,
        callback=not_below_0,
        metavar="MB",
        help="Size of the fusion buffer in MiB, 0 for no fusion (HOROVOD_FUSION_THRESHOLD is in bytes).",
    ),
    click.option(
        "--cache-capacity",
        type=AT_LEAST_0,
        metavar="N",
        help="Tensors in Horovod's response cache, 0 for none (HOROVOD_CACHE_CAPACITY).",
    ),
    click.option(
        "--hierarchical-allreduce/--no-hierarchical-allreduce",
        default=None,
        help="Reduce within each host first, then between hosts (NCCL).",
    ),
)
"""Options that other commands take, too, for the jobs that they run."""

OPTIONS = (
    click.option("-n", "-np", "n", type=AT_LEAST_1, required=True, metavar="N", help="Number of processes (ranks)."),
    LAUNCHER,
    PPN,
    HOSTS,
    HOSTFILE,
    THREADS,
    DEPTH,
    click.option("--gpus-per-node", type=AT_LEAST_1, metavar="G", help="GPUs per host to request from srun or jsrun."),
    click.option("--gpus-per-task", type=AT_LEAST_1, metavar="G", help="GPUs per rank to request from srun or jsrun."),
    click.option(
        "--bind",
        type=click.Choice(BINDINGS),
        default="none",
        help="Bind each rank to its share of the cores, to a socket or to a NUMA domain (not horovodrun).",
    ),
    click.option(
        "--cpu-bind",
        metavar="SPEC",
        help="Binding in the syntax of srun, PALS's mpiexec or aprun, such as list:0-7:8-15; passed on unchanged.",
    ),
    ENV,
    click.option(
        "--timeline",
        type=PATH,
        callback=_output_file,
        metavar="FILE",
        help="Write Horovod's timeline to FILE (HOROVOD_TIMELINE).",
    ),
    click.option("--mark-cycles", is_flag=True, help="Mark Horovod's cycles in the timeline."),
    click.option(
        "--skew",
        is_flag=True,
        help="Record in the timeline which rank was late in every step. Negotiation gets slower (no response cache).",
    ),
    _directory(
        "--monitor", "Keep the history of the run in DIR and report stragglers, without a change of the script."
    ),
    _directory(
        "--mpi-profile", "Record every rank's MPI calls in DIR, for `hvdkit mpi-profile show DIR` (not over Gloo)."
    ),
    click.option(
        "--mpi-profile-wait",
        is_flag=True,
        help="Also measure how long ranks wait for each other, with a barrier before each collective.",
    ),
    _directory(
        "--torch-profile",
        "Have PyTorch's profiler record some steps of every rank in DIR, for `hvdkit trace summary DIR`.",
    ),
    click.option(
        "--torch-profile-steps",
        callback=_profiled_steps,
        metavar="WAIT,WARMUP,ACTIVE",
        help="Optimizer steps to skip, to trace and discard, and to record  [default: 10,2,5]",
    ),
    click.option(
        "--explain-job",
        is_flag=True,
        help="Record the times of the steps of every rank. At the end say what cost the job most time, as "
        "`hvdkit explain` does, also from what the other options record.",
    ),
    _directory(
        "--explain-dir", "Where that is written, seen by all ranks  [default: hvdkit-job-TIME in the current directory]"
    ),
    click.option(
        "--autotune-log",
        type=PATH,
        callback=_output_file,
        metavar="FILE",
        help="Let Horovod tune itself as it trains, and write what it tries to FILE (HOROVOD_AUTOTUNE_LOG).",
    ),
    click.option(
        "--tuned",
        type=FILE,
        metavar="FILE",
        help="Settings from a file of 'hvdkit tune', or the best row of an autotune log, in Horovod's units.",
    ),
    *OF_HOROVOD,
    click.option(
        "--stall-timeout",
        type=float,
        callback=seconds_above_0,
        metavar="S",
        help="End the job when a collective waits longer than S seconds, and write every rank's call stacks (not on "
        "several hosts)  [default: off; a rank may rightly be busy for long]",
    ),
    _directory("--stall-dir", "Directory for the call stacks of --stall-timeout  [default: hvdkit-stall-TIME]"),
    click.option(
        "--stage",
        is_flag=True,
        help="First copy the environment to the local disk of every host, once, over MPI; the ranks import from there.",
    ),
    _directory(
        "--stage-dir",
        "Local directory for --stage, the same on every host; later jobs reuse it  [default: $TMPDIR, else /tmp]",
    ),
    click.option(
        "--preflight",
        "first",
        is_flag=True,
        help="Check every rank first (hvdkit preflight); start COMMAND only if all can train.",
    ),
    click.option(
        "--restarts",
        type=AT_LEAST_0,
        default=0,
        metavar="K",
        help="Restart a failed job at most K times; COMMAND resumes from its own checkpoints (HVDKIT_RESTART counts)",
    ),
    click.option(
        "--grace",
        type=float,
        callback=seconds_above_0,
        metavar="S",
        help="Seconds that the ranks have to save and end when this program is told to end; they get SIGTERM at once, "
        f"then SIGKILL  [default: {GRACE_S:g}, in a batch job {BATCH_GRACE_S:g}]",
    ),
    click.option(
        "--min-np", type=AT_LEAST_1, metavar="N", help="Elastic: minimum number of ranks; below it the job waits."
    ),
    click.option("--max-np", type=AT_LEAST_1, metavar="N", help="Elastic: maximum number of ranks."),
    click.option(
        "--host-discovery-script",
        type=FILE,
        metavar="FILE",
        help="Elastic: a script that prints the available hosts, one HOST:SLOTS per line; or HOST, with --ppn.",
    ),
    click.option("--tag/--no-tag", default=True, help="Put [rank] before each line of output."),
    click.option("--verbose", is_flag=True, help="Show TensorFlow's own start-up lines of every rank, too."),
    click.option("--dry-run", is_flag=True, help="Print the command line for a shell and start nothing."),
    click.option("--explain", is_flag=True, help="Print every setting and the reason for it, on stderr."),
)
