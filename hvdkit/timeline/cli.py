"""The command ``hvdkit timeline``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import importlib

import click

SUBCOMMANDS = {
    "summary": ("hvdkit.timeline.summary_cli:summary", "Where the time went, in numbers, and what to try."),
    "report": ("hvdkit.timeline.report_cli:report", "As one HTML page, to look into."),
    "slice": ("hvdkit.timeline.tools_cli:slice_", "A part of it as a file of its own."),
    "diff": ("hvdkit.timeline.tools_cli:diff", "What takes longer in one than in another."),
    "merge": ("hvdkit.timeline.tools_cli:merge", "On one time axis with a trace of torch.profiler."),
    "export": ("hvdkit.timeline.tools_cli:export", "For Perfetto, or as a CSV table."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _, function = SUBCOMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), function)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{function} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup)
def timeline() -> None:
    """Read a file that Horovod wrote with HOROVOD_TIMELINE: where did the time go, and what to try?

    Reads any such file, also compressed with gzip, cut off or damaged. Rank 0 writes it:

    \b
      hvdkit launch -n 4 --timeline timeline.json -- python train.py
      hvdkit timeline summary timeline.json

    Each subcommand has its own --help with an example.
    """
