"""The command line: a table of commands, each imported when it is used."""

from __future__ import annotations

import os
import sys

import click

import hvdkit
from hvdkit.common import commands

FLOORS = {
    "Before a job": {
        "install": (
            "hvdkit.prepare.install.cli:install",
            "Build Horovod for the frameworks found here and install it.",
        ),
        "doctor": (
            "hvdkit.prepare.doctor.cli:doctor",
            "Report what is installed, what does not fit and how to fix it.",
        ),
        "test": ("hvdkit.prepare.test:test", "Train on two ranks of this machine, to see that it works."),
        "examples": ("hvdkit.prepare.examples:examples", "List the example trainings, or copy them."),
        "check": ("hvdkit.prepare.check.cli:check", "Report which of the eight steps a script does, and its mistakes."),
        "port": ("hvdkit.prepare.port.cli:port", "Write the eight steps into a training script."),
    },
    "A job": {
        "launch": ("hvdkit.jobs.launch.cli:launch", "Start a training script on N processes."),
        "job": ("hvdkit.jobs.job.cli:job", "Write a batch script for a training on several hosts."),
        "watch": ("hvdkit.jobs.watch.cli:watch", "Show a training while it runs: progress, speed, stragglers."),
        "tune": ("hvdkit.jobs.tune.cli:tune", "Find the settings that make a job fast here, by running it."),
    },
    "How fast, how big": {
        "bench": ("hvdkit.measure.bench.cli:bench", "Measure how a training scales with the number of ranks."),
        "emulate": ("hvdkit.measure.emulate.cli:emulate", "Replay and time a model's collectives without the model."),
        "plan": ("hvdkit.measure.plan.cli:plan", "Show what a training will do, need and take, before it runs."),
    },
    "What happened": {
        "explain": ("hvdkit.read.explain.cli:explain", "Name what costs a job most time, from its recordings."),
        "diff": ("hvdkit.read.diff.cli:diff", "Compare two recordings or results: what changed, and why?"),
        "timeline": ("hvdkit.read.timeline.cli:timeline", "Read Horovod's timeline: what took the time?"),
        "trace": ("hvdkit.read.trace.cli:trace", "Read PyTorch profiler traces: operators, communication."),
        "mpi-profile": (
            "hvdkit.read.mpi_profile.cli:mpi_profile",
            "Read MPI profiles: calls, bytes and time by routine.",
        ),
    },
}
"""The four floors of the house, and the commands on each."""
COMMANDS = {name: row for commands in FLOORS.values() for name, row in commands.items()}
MOVED = {
    "predict": "hvdkit plan scale",
    "memory": "hvdkit plan memory",
    "preflight": "hvdkit doctor --job",
}
"""Commands that are gone, and what does the same now, as it is typed."""


_FOR_ALL = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Settings that every command inherits."""


@click.group(cls=commands.group_of(COMMANDS, FLOORS, MOVED), context_settings=_FOR_ALL)
@click.version_option(hvdkit.__version__, prog_name="hvdkit")
def hvdkit_command() -> None:
    """The eight steps of data-parallel training with Horovod, and the tools around them.

    \b
    A new machine:   hvdkit install && hvdkit doctor && hvdkit test
    A first job:     hvdkit launch -n 2 -- python examples/pytorch/cnn.py

    Every command has its own --help with an example. Exit status: 0 success, 1 a check failed,
    2 bad usage; `launch` passes on the exit status of the first process that failed.
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit; a user's mistake is one sentence on stderr, never a stack trace."""
    _open_what_is_closed()
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        sys.exit(
            f"hvdkit: The current directory cannot be used ({error.strerror}): it was deleted or moved; cd to another."
        )
    if not os.environ.get("HOME"):  # some systems start jobs without; Open MPI then ends at once
        os.environ["HOME"] = os.path.expanduser("~")  # noqa: PTH111 (it raises where the user has no entry)
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit status."""
    return commands.run(hvdkit_command, argv, "hvdkit")


def _open_what_is_closed() -> None:
    """Have the standard streams that the caller closed (``>&-``); else files and pipes would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


if __name__ == "__main__":
    main()
