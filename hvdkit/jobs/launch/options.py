"""What a job is asked for: each option once, as it is typed, and what it means.

``Request`` is the one object. A field that can be typed is made by ``typed``: its flags and help for click, what it
needs beside it, and the variables that it sets. The tools that run many launches (``tune``, ``bench``,
``emulate``) take some of the same options and hand them on by ``as_words``.
"""

from __future__ import annotations

# ruff: noqa: RUF009 - typed is dataclasses.field
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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
from hvdkit.core import listeners
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.model import BATCH_GRACE_S, BINDINGS, GRACE_S, Host, Staged
from hvdkit.jobs.launch.tuned import MIB, Tuned

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
        excludes: names of options that set the same.
        sets: the environment variables that a value sets in every rank.
    """

    name: str
    flags: tuple[str, ...]
    click: Mapping[str, Any]
    needs: tuple[str, str] | None
    excludes: tuple[str, ...]
    sets: Callable[[Any], Mapping[str, str]] | None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have a click command take it."""
        return click.option(*self.flags, self.name, **self.click)(function)


def typed(
    *flags: str,
    settled: Any = None,
    needs: tuple[str, str] | None = None,
    excludes: tuple[str, ...] = (),
    sets: Callable[[Any], Mapping[str, str]] | None = None,
    **keywords: Any,
) -> Any:
    """A field of a dataclass that can be typed, see ``options_of``.

    Args:
        settled: its value where nothing was typed.
        needs, excludes, sets: see ``Typed``.
        keywords: of ``click.option``.
    """
    metadata = {"typed": Typed("", flags, keywords, needs, excludes, sets)}
    if keywords.get("required"):
        return field(metadata=metadata)
    if keywords.get("multiple") and settled is None:
        return field(default_factory=dict, metadata=metadata)
    return field(default=keywords.get("default", settled), metadata=metadata)


def flag(text: str, *flags: str, **more: Any) -> Any:
    """The same for an option without a value; ``text``: its help."""
    return typed(*flags, is_flag=True, settled=False, help=text, **more)


def options_of(kind: Any) -> dict[str, Typed]:
    """The options of a dataclass whose fields are made by ``typed``, by name and in order."""
    found = {}
    for option in fields(kind):
        if (how := option.metadata.get("typed")) is not None:
            flags = how.flags or (f"--{option.name.replace('_', '-')}",)
            found[option.name] = replace(how, name=option.name, flags=flags)
    return found


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


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for. What an option means stands in its help; paths are absolute.

    The command line gives ``hosts``, ``tuned``, ``explain_job`` and ``stage`` as they are typed, and ``cli`` settles
    them: what they name is read, and here. Beside them are:

    Attributes:
        command: what each rank runs.
        hosts_chosen: the user named the hosts; otherwise they are those of the batch job, () for this machine alone.
        tuned_by: where ``tuned`` comes from, for ``--explain``.
        elastic: ranks come and go.
        notes: what the user should know of what was read, full sentences.
    """

    n: int = typed(
        "-n",
        "-np",
        type=AT_LEAST_1,
        settled=0,
        metavar="N",
        help="Number of processes (ranks)  [default: --ppn on each host]",
    )
    command: tuple[str, ...] = ()
    module: bool = flag("COMMAND is a Python module, run as python -m runs it.", "--module", "-m")
    launcher: str = typed(
        type=click.Choice(["auto", *LAUNCHERS]),
        default="auto",
        help="auto: that of the batch job (srun, PALS's mpiexec, jsrun, aprun), else mpirun when Horovod was built "
        "with MPI, else horovodrun (Gloo).",
    )
    ppn: int | None = typed(
        "--ppn", "--nproc-per-node", "--nproc_per_node", type=AT_LEAST_1, metavar="P", help="Ranks on each host."
    )
    hosts: tuple[Host, ...] = typed(
        "--hosts",
        "-H",
        settled=(),
        metavar="H:S,...",
        help="Hosts and the ranks that each may take  [default: the batch job's]",
    )
    hostfile: Path | None = typed(
        type=PATH,
        metavar="FILE",
        excludes=("hosts",),
        help="Read --hosts from a file, one HOST:SLOTS or HOST slots=SLOTS per line.",
    )
    threads: int | None = typed(
        type=AT_LEAST_1,
        metavar="T",
        help="Compute threads per rank (OMP_NUM_THREADS)  [default: yours, else --depth, else cores / N]",
    )
    depth: int | None = typed(
        type=AT_LEAST_1, metavar="D", help="Cores per rank; each rank is bound to its cores (not horovodrun)."
    )
    gpus_per_node: int | None = typed(type=AT_LEAST_1, metavar="G", help="GPUs per host to request from srun or jsrun.")
    bind: str = typed(
        type=click.Choice(BINDINGS),
        default="none",
        help="Bind each rank to its share of the cores, to a socket or to a NUMA domain (not horovodrun).",
    )
    cpu_bind: str | None = typed(
        metavar="SPEC",
        help="Binding in the launcher's own words, passed on unchanged, such as list:0-7:8-15 (PALS, aprun), "
        "mask_cpu:ff,ff00 (srun) or numa (mpirun).",
    )
    variables: Mapping[str, str] = typed(
        "--env",
        multiple=True,
        callback=environment_variables,
        metavar="NAME[=VALUE]",
        help="Set an environment variable in every rank; a name alone takes its value from here, unseen by other "
        "users. Repeatable.",
    )
    timeline: Path | None = typed(
        **_WRITTEN,
        sets=lambda file: {"HOROVOD_TIMELINE": str(file)},
        help="Write Horovod's timeline to FILE (HOROVOD_TIMELINE).",
    )
    skew: bool = flag(
        "Record in the timeline which rank was late in every step. Negotiation gets slower (no response cache).",
        needs=("timeline", "the file it is about"),
        excludes=("cache_capacity",),
        sets=lambda on: Tuned(cache_capacity=0).variables() if on else {},
    )
    monitor: Path | None = typed(
        **_DIRECTORY,
        sets=lambda directory: {listeners.MONITOR: str(directory)},
        help="Keep the history of the run in DIR and report stragglers, without a change of the script.",
    )
    mpi_profile: Path | None = typed(
        **_DIRECTORY, help="Record every rank's MPI calls in DIR, for `hvdkit mpi-profile show DIR` (not over Gloo)."
    )
    mpi_profile_wait: bool = flag(
        "Also measure how long ranks wait for each other, with a barrier before each collective.",
        needs=("mpi_profile", "the directory that it is written to"),
    )
    torch_profile: Path | None = typed(
        **_DIRECTORY,
        help="Have PyTorch's profiler record some steps of every rank in DIR, for `hvdkit trace summary DIR`.",
    )
    torch_profile_steps: tuple[int, ...] | None = typed(
        callback=_profiled_steps,
        metavar="WAIT,WARMUP,ACTIVE",
        needs=("torch_profile", "the directory that it is about"),
        help=f"Optimizer steps to skip, to trace and discard, and to record  [default: {_TORCH_STEPS}]",
    )
    explain_job: Path | None = typed(
        is_flag=True,
        help="Record the times of the steps of every rank. At the end say what cost the job most time, as "
        "`hvdkit explain` does, also from what the other options record.",
    )
    explain_dir: Path | None = typed(
        **_DIRECTORY,
        needs=("explain_job", "whose recordings are written there"),
        help="Where that is written, seen by all ranks  [default: hvdkit-job-TIME in the current directory]",
    )
    autotune_log: Path | None = typed(
        **_WRITTEN,
        excludes=("tuned", "cycle_time_ms", "fusion_threshold_mb", "cache_capacity", "hierarchical_allreduce"),
        sets=lambda file: {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(file)},
        help="Let Horovod tune itself as it trains, and write what it tries to FILE (HOROVOD_AUTOTUNE_LOG).",
    )
    tuned: Tuned = typed(
        type=FILE,
        settled=Tuned(),
        metavar="FILE",
        help="Settings from a file of 'hvdkit tune', or the best row of an autotune log, in Horovod's units.",
    )
    cycle_time_ms: float | None = typed(
        type=float,
        callback=not_below_0,
        metavar="MS",
        sets=lambda ms: Tuned(cycle_time_s=ms / 1000).variables(),
        help="Horovod's cycle time: time between two negotiations (HOROVOD_CYCLE_TIME).",
    )
    fusion_threshold_mb: float | None = typed(
        type=float,
        callback=not_below_0,
        metavar="MB",
        sets=lambda mib: Tuned(fusion_threshold_bytes=round(mib * MIB)).variables(),
        help="Size of the fusion buffer in MiB, 0 for no fusion (HOROVOD_FUSION_THRESHOLD is in bytes).",
    )
    cache_capacity: int | None = typed(
        type=AT_LEAST_0,
        metavar="N",
        sets=lambda tensors: Tuned(cache_capacity=tensors).variables(),
        help="Tensors in Horovod's response cache, 0 for none (HOROVOD_CACHE_CAPACITY).",
    )
    hierarchical_allreduce: bool | None = typed(
        "--hierarchical-allreduce/--no-hierarchical-allreduce",
        default=None,
        sets=lambda on: Tuned(hierarchical_allreduce=on).variables(),
        help="Reduce within each host first, then between hosts (NCCL).",
    )
    stall_timeout: float | None = typed(
        type=float,
        callback=seconds_above_0,
        metavar="S",
        help="End the job when a collective waits longer than S seconds, and write every rank's call stacks  "
        "[default: off; a rank may rightly be busy for long]",
    )
    stall_dir: Path | None = typed(
        **_DIRECTORY,
        needs=("stall_timeout", "which says when stacks are written there"),
        help="Directory for the call stacks of --stall-timeout  [default: hvdkit-stall-TIME]",
    )
    stage: Staged | None = typed(
        is_flag=True,
        help="First copy the environment to the local disk of every host, once, over MPI; the ranks import from there.",
    )
    stage_dir: Path | None = typed(
        **_DIRECTORY,
        needs=("stage", "which copies the environment there"),
        help="Local directory for --stage, the same on every host; later jobs reuse it  [default: $TMPDIR, else /tmp]",
    )
    preflight: bool = flag("Check every rank first (hvdkit doctor --job); start COMMAND only if all can train.")
    restarts: int = typed(
        type=AT_LEAST_0,
        default=0,
        metavar="K",
        help="Restart a failed job at most K times; COMMAND resumes from its own checkpoints (HVDKIT_RESTART counts)",
    )
    grace: float | None = typed(
        type=float,
        callback=seconds_above_0,
        metavar="S",
        help="Seconds that the ranks have to save and end when this program is told to end; they get SIGTERM at once, "
        f"then SIGKILL  [default: {GRACE_S:g}, in a batch job {BATCH_GRACE_S:g}]",
    )
    tf_config: bool = flag(
        "Give every rank TF_CONFIG, so that MultiWorkerMirroredStrategy trains as one job (not elastic)."
    )
    min_np: int | None = typed(
        type=AT_LEAST_1, metavar="N", help="Elastic: minimum number of ranks; below it the job waits."
    )
    max_np: int | None = typed(type=AT_LEAST_1, metavar="N", help="Elastic: maximum number of ranks.")
    host_discovery_script: Path | None = typed(
        type=FILE,
        callback=_absolute,
        metavar="FILE",
        help="Elastic: a script that prints the available hosts, one HOST:SLOTS per line.",
    )
    tag: bool = typed("--tag/--no-tag", default=True, help="Put [rank] before each line of output.")
    verbose: bool = flag("Show TensorFlow's own start-up lines of every rank, too.")
    dry_run: bool = flag("Print the command line for a shell and start nothing.")
    explain: bool = flag("Print every setting and the reason for it, on stderr.")
    hosts_chosen: bool = False
    tuned_by: str = ""
    elastic: bool = False
    notes: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """The option that says what ranks are tied to."""
        if self.bind != "none":
            return f"--bind {self.bind}"
        return "--depth" if self.cpu_bind is None else "--cpu-bind"


OPTIONS = options_of(Request)
"""All options of ``hvdkit launch`` by name, in the order of its help."""


def check(given: Mapping[str, Any]) -> None:
    """Refuse an option without the other one that it is about, and two that set the same.

    Args:
        given: values by the names of ``OPTIONS``, None where nothing was typed.
    Raises:
        InvalidArgumentError: one is missing, or one too many.
    """
    for name, typed in OPTIONS.items():
        if not given.get(name):
            continue
        if typed.needs is not None and not given.get(typed.needs[0]):
            raise InvalidArgumentError(f"{typed.flags[0]} needs {OPTIONS[typed.needs[0]].flags[0]}, {typed.needs[1]}.")
        for other in typed.excludes:
            if given.get(other) is not None:
                both = f"{typed.flags[0]} and {OPTIONS[other].flags[0].partition('/')[0]}"
                raise InvalidArgumentError(f"{both} set the same; give one of them.")


def variables_of(request: Request) -> dict[str, Mapping[str, str]]:
    """The environment variables that options set in every rank, by flag."""
    found = {}
    for name, typed in OPTIONS.items():
        value = getattr(request, name)
        if typed.sets is not None and value is not None:
            found[typed.flags[0].partition("/")[0]] = typed.sets(value)
    return found


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
        elif isinstance(value, bool):
            words += typed.flags[0].split("/")[not value :][:1]  # --x, or of --x/--no-x the second
        elif value is not None and value != typed.click.get("default"):
            words += [typed.flags[0], str(value)]
    return words
