"""What a job is asked for: each option once, as it is typed, what it means, and how a launcher says it.

``Request`` is the one object. A field that can be typed is made by ``_typed``: its flag and help for click, what it
needs beside it, in which words launchers say it, and whether the tools that run many launches (``tune``, ``bench``,
``emulate``) take it and hand it on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch.model import BATCH_GRACE_S, BINDINGS, GRACE_S, Host, Staged
from hvdkit.run.launch.tuned import OVERRIDES, Tuned

LAUNCHERS = ("mpirun", "horovodrun", "mpiexec", "aprun", "srun", "jsrun")
"""Every launcher that can be asked for by name; mpiexec is that of PALS alone."""
TORCH_STEPS = (10, 2, 5)
"""Steps that are left out, traced and thrown away, recorded: as ``hvdkit.torch.profile`` has them."""
_TORCH_STEPS = ",".join(map(str, TORCH_STEPS))
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Typed:
    """How an option is typed.

    Attributes:
        name: of the keyword that its value is given as.
        flags: its names, the first for messages.
        click: the other keywords of ``click.option``.
        needs: another option without which it means nothing, and what that is to it; None for none.
        said: the words in which a launcher says it, by launcher; {} stands for the value.
    """

    name: str
    flags: tuple[str, ...]
    click: Mapping[str, Any]
    needs: tuple[str, str] | None = None
    said: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have a click command take it."""
        return click.option(*self.flags, self.name, **self.click)(function)


OPTIONS: dict[str, Typed] = {}
"""All options of ``hvdkit launch`` by name, in the order of its help."""


def _typed(
    name: str,
    *flags: str,
    needs: tuple[str, str] | None = None,
    said: Mapping[str, tuple[str, ...]] | None = None,
    **keywords: Any,
) -> None:
    OPTIONS[name] = Typed(name, flags or (f"--{name.replace('_', '-')}",), keywords, needs, said or {})


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


def _absolute(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _profiled_steps(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    counts = tuple(int(word) for word in text.split(",") if word.isascii() and word.isdigit())
    if len(counts) != 3 or len(text.split(",")) != 3:
        raise click.BadParameter(
            f"expected WAIT,WARMUP,ACTIVE, numbers of steps such as {_TORCH_STEPS}, got {shortened(text)}"
        )
    if counts[0] + counts[1] == 0 or counts[2] == 0:
        raise click.BadParameter(
            f"expected a step to leave out or to throw away and one to record, got {text!r}: profiling begins at the "
            "end of the first step"
        )
    return counts


_DIRECTORY: dict[str, Any] = {
    "type": click.Path(path_type=Path, file_okay=False),
    "callback": _absolute,
    "metavar": "DIR",
}
_WRITTEN: dict[str, Any] = {"type": PATH, "callback": _output_file, "metavar": "FILE"}

_typed("n", "-n", "-np", type=AT_LEAST_1, required=True, metavar="N", help="Number of processes (ranks).")
_typed(
    "launcher",
    type=click.Choice(["auto", *LAUNCHERS]),
    default="auto",
    help="auto: that of the batch job (srun, PALS's mpiexec, jsrun, aprun), else mpirun when Horovod was built with "
    "MPI, else horovodrun (Gloo).",
)
_typed(
    "ppn",
    type=AT_LEAST_1,
    metavar="P",
    help="Ranks on each host.",
    said={"mpiexec": ("--ppn", "{}"), "aprun": ("-N", "{}"), "jsrun": ("-r", "{}")},
)
_typed(
    "hosts",
    "--hosts",
    "-H",
    metavar="H:S,...",
    help="Hosts and the ranks that each may take  [default: the batch job's]",
    said={"mpiexec": ("--hosts", "{}"), "aprun": ("-L", "{}"), "srun": ("--nodelist={}",)},
)
_typed(
    "hostfile", type=PATH, metavar="FILE", help="Read --hosts from a file, one HOST:SLOTS or HOST slots=SLOTS per line."
)
_typed(
    "threads",
    type=AT_LEAST_1,
    metavar="T",
    help="Compute threads per rank (OMP_NUM_THREADS)  [default: yours, else --depth, else cores / N]",
)
_typed(
    "depth",
    type=AT_LEAST_1,
    metavar="D",
    help="Cores per rank; each rank is bound to its cores.",
    said={"mpiexec": ("--depth={}",), "aprun": ("-d", "{}"), "srun": ("--cpus-per-task={}",), "jsrun": ("-c", "{}")},
)
_typed(
    "gpus_per_node",
    type=AT_LEAST_1,
    metavar="G",
    help="GPUs per host to request from srun or jsrun.",
    said={"srun": ("--gpus-per-node={}",), "jsrun": ("-g", "{}")},
)
_typed(
    "gpus_per_task",
    type=AT_LEAST_1,
    metavar="G",
    help="GPUs per rank to request from srun or jsrun.",
    said={"srun": ("--gpus-per-task={}",), "jsrun": ("-g", "{}")},
)
_typed(
    "bind",
    type=click.Choice(BINDINGS),
    default="none",
    help="Bind each rank to its share of the cores, to a socket or to a NUMA domain (not horovodrun).",
)
_typed(
    "cpu_bind",
    metavar="SPEC",
    help="Binding in the syntax of srun, PALS's mpiexec or aprun, such as list:0-7:8-15; passed on unchanged.",
    said={"srun": ("--cpu-bind={}",), "mpiexec": ("--cpu-bind", "{}"), "aprun": ("--cc", "{}")},
)
_typed(
    "variables",
    "--env",
    multiple=True,
    callback=environment_variables,
    metavar="NAME[=VALUE]",
    help="Set an environment variable in every rank; a name alone takes its value from here, unseen by other users. "
    "Repeatable.",
)
_typed("timeline", **_WRITTEN, help="Write Horovod's timeline to FILE (HOROVOD_TIMELINE).")
_typed(
    "mark_cycles",
    is_flag=True,
    needs=("timeline", "the file it is about"),
    help="Mark Horovod's cycles in the timeline.",
)
_typed(
    "skew",
    is_flag=True,
    needs=("timeline", "the file it is about"),
    help="Record in the timeline which rank was late in every step. Negotiation gets slower (no response cache).",
)
_typed(
    "monitor",
    **_DIRECTORY,
    help="Keep the history of the run in DIR and report stragglers, without a change of the script.",
)
_typed(
    "mpi_profile",
    **_DIRECTORY,
    help="Record every rank's MPI calls in DIR, for `hvdkit mpi-profile show DIR` (not over Gloo).",
)
_typed(
    "mpi_profile_wait",
    is_flag=True,
    needs=("mpi_profile", "the directory that it is written to"),
    help="Also measure how long ranks wait for each other, with a barrier before each collective.",
)
_typed(
    "torch_profile",
    **_DIRECTORY,
    help="Have PyTorch's profiler record some steps of every rank in DIR, for `hvdkit trace summary DIR`.",
)
_typed(
    "torch_profile_steps",
    callback=_profiled_steps,
    metavar="WAIT,WARMUP,ACTIVE",
    needs=("torch_profile", "the directory that it is about"),
    help=f"Optimizer steps to skip, to trace and discard, and to record  [default: {_TORCH_STEPS}]",
)
_typed(
    "explain_job",
    is_flag=True,
    help="Record the times of the steps of every rank. At the end say what cost the job most time, as "
    "`hvdkit explain` does, also from what the other options record.",
)
_typed(
    "explain_dir",
    **_DIRECTORY,
    needs=("explain_job", "whose recordings are written there"),
    help="Where that is written, seen by all ranks  [default: hvdkit-job-TIME in the current directory]",
)
_typed(
    "autotune_log",
    **_WRITTEN,
    help="Let Horovod tune itself as it trains, and write what it tries to FILE (HOROVOD_AUTOTUNE_LOG).",
)
_typed(
    "tuned",
    type=FILE,
    metavar="FILE",
    help="Settings from a file of 'hvdkit tune', or the best row of an autotune log, in Horovod's units.",
)
_typed(
    "cycle_time_ms",
    type=float,
    callback=not_below_0,
    metavar="MS",
    help="Horovod's cycle time: time between two negotiations (HOROVOD_CYCLE_TIME).",
)
_typed(
    "fusion_threshold_mb",
    type=float,
    callback=not_below_0,
    metavar="MB",
    help="Size of the fusion buffer in MiB, 0 for no fusion (HOROVOD_FUSION_THRESHOLD is in bytes).",
)
_typed(
    "cache_capacity",
    type=AT_LEAST_0,
    metavar="N",
    help="Tensors in Horovod's response cache, 0 for none (HOROVOD_CACHE_CAPACITY).",
)
_typed(
    "hierarchical_allreduce",
    "--hierarchical-allreduce/--no-hierarchical-allreduce",
    default=None,
    help="Reduce within each host first, then between hosts (NCCL).",
)
_typed(
    "stall_timeout",
    type=float,
    callback=seconds_above_0,
    metavar="S",
    help="End the job when a collective waits longer than S seconds, and write every rank's call stacks  [default: "
    "off; a rank may rightly be busy for long]",
)
_typed(
    "stall_dir",
    **_DIRECTORY,
    needs=("stall_timeout", "which says when stacks are written there"),
    help="Directory for the call stacks of --stall-timeout  [default: hvdkit-stall-TIME]",
)
_typed(
    "stage",
    is_flag=True,
    help="First copy the environment to the local disk of every host, once, over MPI; the ranks import from there.",
)
_typed(
    "stage_dir",
    **_DIRECTORY,
    needs=("stage", "which copies the environment there"),
    help="Local directory for --stage, the same on every host; later jobs reuse it  [default: $TMPDIR, else /tmp]",
)
_typed(
    "preflight", is_flag=True, help="Check every rank first (hvdkit doctor --job); start COMMAND only if all can train."
)
_typed(
    "restarts",
    type=AT_LEAST_0,
    default=0,
    metavar="K",
    help="Restart a failed job at most K times; COMMAND resumes from its own checkpoints (HVDKIT_RESTART counts)",
)
_typed(
    "grace",
    type=float,
    callback=seconds_above_0,
    metavar="S",
    help="Seconds that the ranks have to save and end when this program is told to end; they get SIGTERM at once, "
    f"then SIGKILL  [default: {GRACE_S:g}, in a batch job {BATCH_GRACE_S:g}]",
)
_typed("min_np", type=AT_LEAST_1, metavar="N", help="Elastic: minimum number of ranks; below it the job waits.")
_typed("max_np", type=AT_LEAST_1, metavar="N", help="Elastic: maximum number of ranks.")
_typed(
    "host_discovery_script",
    type=FILE,
    metavar="FILE",
    help="Elastic: a script that prints the available hosts, one HOST:SLOTS per line; or HOST, with --ppn.",
)
_typed("tag", "--tag/--no-tag", default=True, help="Put [rank] before each line of output.")
_typed("verbose", is_flag=True, help="Show TensorFlow's own start-up lines of every rank, too.")
_typed("dry_run", is_flag=True, help="Print the command line for a shell and start nothing.")
_typed("explain", is_flag=True, help="Print every setting and the reason for it, on stderr.")

OF_HOROVOD = tuple(OPTIONS[name] for name in OVERRIDES)
"""Horovod's settings for speed."""


def check_needs(given: Mapping[str, Any]) -> None:
    """Refuse an option without the other one that it is about.

    Args:
        given: values by the names of ``OPTIONS``.
    Raises:
        InvalidArgumentError: one is missing.
    """
    for name, typed in OPTIONS.items():
        if typed.needs is not None and given[name] and not given[typed.needs[0]]:
            raise InvalidArgumentError(f"{typed.flags[0]} needs {OPTIONS[typed.needs[0]].flags[0]}, {typed.needs[1]}.")


def who_says(name: str) -> tuple[str, ...]:
    """The launchers that have words for an option."""
    return tuple(OPTIONS[name].said)


def words_of(name: str, launcher: str, value: object) -> tuple[str, ...]:
    """How a launcher says that an option has this value."""
    return tuple(word.format(value) for word in OPTIONS[name].said[launcher])


def as_words(given: Mapping[str, Any]) -> list[str]:
    """What a command line of ``hvdkit launch`` says these values with; None is left out.

    Args:
        given: values by the names of ``OPTIONS``.
    """
    words = []
    for name, value in given.items():
        typed = OPTIONS[name]
        if name == "variables":
            for variable, text in value.items():
                # a value that is set here stays out of the command line, which every user reads
                words += ["--env", variable if os.environ.get(variable) == text else f"{variable}={text}"]
        elif value is not None and value != typed.click.get("default"):
            words += [typed.flags[0], str(value)]
    return words


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for: options under their names in ``OPTIONS``, whose help says what they mean.

    Paths are absolute; None is what an option is without a value. Settled meanwhile are:

    Attributes:
        hosts: the hosts of the job; () when all ranks are to run on this machine, or when nothing names any.
        hosts_chosen: the user named the hosts; otherwise they are those of the batch job.
        tuned: Horovod's settings for speed; ``launcher``, ``threads`` and a batch job win over its own.
        options: the option that gave a variable of ``tuned``, for ``--explain``; the others come from ``tuned_source``.
        tuned_source: the file of ``tuned``, or the line of it; "" for none.
        explain_job: the directory for what explains the job, None for none.
        stage: the environment that the ranks are to find on their host's disk, None for that which hvdkit is in.
        elastic: ranks come and go.
    """

    n: int
    command: tuple[str, ...]
    launcher: str = "auto"
    threads: int | None = None
    bind: str = "none"
    variables: Mapping[str, str] = field(default_factory=dict)
    timeline: Path | None = None
    stall_timeout: float | None = None
    stall_dir: Path | None = None
    mark_cycles: bool = False
    ppn: int | None = None
    depth: int | None = None
    hosts: tuple[Host, ...] = ()
    hosts_chosen: bool = False
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    autotune_log: Path | None = None
    tuned: Tuned = field(default_factory=Tuned)
    options: Mapping[str, str] = field(default_factory=dict)
    tuned_source: str = ""
    monitor: Path | None = None
    mpi_profile: Path | None = None
    mpi_profile_wait: bool = False
    torch_profile: Path | None = None
    torch_profile_steps: tuple[int, int, int] | None = None
    dry_run: bool = False
    cpu_bind: str | None = None
    explain_job: Path | None = None
    stage: Staged | None = None
    grace: float | None = None
    elastic: bool = False
