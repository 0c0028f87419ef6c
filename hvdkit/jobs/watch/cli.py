"""``hvdkit watch``: a run on a terminal, in as few lines as it takes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hvdkit.common.commands import PATH, print_any_name
from hvdkit.common.table import console
from hvdkit.common.units import bytes_text, duration_text, number_text, printable, ranks_text, share_text, shortened
from hvdkit.jobs.watch.history import HistoryWindow, Run
from hvdkit.observe.trackers import span_text

_COLUMNS = 80
"""Of what is no terminal, where COLUMNS does not say."""
_INTERVAL_S = 1.0
LEVELS = "▁▂▃▄▅▆▇█"
HEAT = ((1.05, "░", "green"), (1.2, "▒", "yellow"), (1.5, "▓", "dark_orange"), (math.inf, "█", "red"))
"""Up to how many times the median of the ranks, its sign without colour, and its colour."""
_NAME = 12
_WIDTHS = (6, 10, 11, 9, 9, 9, 9, 9)
"""Of the columns of the ranks; those that do not fit are left out, the last ones first."""
_STATES = {"running": "green", "ended": "bold", "silent": "bold red"}
_LOGS, _RANKS, _REPORTS = 6, 5, 5
"""How many are shown of what was logged, of the ranks and of the reports."""
_WRAPPER = Console()


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--once", is_flag=True, help="Show the current state once and exit, on a terminal, too.")
def watch(directory: Path, once: bool) -> int:
    """Show a training while it runs, or after it: progress, speed, loss, stragglers, memory, checkpoints, reports.

    DIR is what was given to `hk.Monitor` or `hvdkit launch --monitor`. Only its files are read, so this works on any
    host that sees them. On a terminal the view stays and changes until the job has ended, or Ctrl-C; elsewhere it is
    printed once.

    \b
    Examples:
      hvdkit watch runs/digits
      hvdkit watch runs/digits --once

    Exit status: 0 success, 1 DIR holds no history that can be read, 2 for bad usage.
    """
    print_any_name()
    run, shown = Run(directory), console()
    if not shown.is_terminal and "COLUMNS" not in os.environ:
        shown.width = _COLUMNS

    def now() -> Group:
        run.read()
        return Group(*lines(run, time.time(), shown.width))

    block = now()
    if once or not shown.is_terminal or shown.is_dumb_terminal:
        shown.print(block)
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(block, console=shown, auto_refresh=False) as live:
            while not run.ended:
                time.sleep(_INTERVAL_S)
                live.update(now(), refresh=True)
    return 0


def lines(run: Run, now: float, width: int) -> list[Text]:
    """What a terminal shows.

    Args:
        run: what the files say.
        now: seconds since 1970.
        width: columns, of which no line has more.
    """
    found = [_head(run, now), _progress(run, now, width), _speed(run, now), *_curves(run.windows, width)]
    if run.ranks is not None:
        found += [Text(), *_ranks(run, width)]
    if run.reports:
        more = f", the last {_REPORTS} of {len(run.reports)}" if len(run.reports) > _REPORTS else ""
        found += [Text(), Text(f"Reports{more}", "bold")]
        for report in run.reports[-_REPORTS:]:
            found.append(Text.assemble((f"step {report.step}", "yellow"), f"  {printable(report.text)}"))
    return [piece for line in found for piece in (line.wrap(_WRAPPER, width) if line.plain else [line])]


def _head(run: Run, now: float) -> Text:
    state = run.state(now)
    text = Text(printable(shortened(str(run.path), 40)), "bold")
    text.append(f"  {ranks_text(run.start.world_size)}", "not bold")
    if run.jobs > 1:
        text.append(f", job {run.jobs} of this training", "not bold")
    text.append("  ")
    text.append(state, _STATES[state])
    if state == "silent":
        text.append(f": no news for {span_text(now - run.updated)}; it hangs or was killed", "red")
    else:
        word, until = ("after", run.updated) if state == "ended" else ("for", now)
        text.append(f" {word} {span_text(max(0.0, until - run.start.time))}", "not bold")
    return text


def _progress(run: Run, now: float, width: int) -> Text:
    """How far it is: step, epoch, share and time left, as far as they are known."""
    steps, epochs, left = run.start.steps, run.start.epochs, run.left()
    words = [f"step {run.step}/{steps}" if steps else f"step {run.step}"]
    if run.windows and (epoch := run.windows[-1].epoch) is not None:
        words.append(f"epoch {epoch + 1}/{epochs}" if epochs else f"epoch {epoch + 1}")
    share = min(1.0, run.step / steps) if steps else None
    if share is not None:
        words.append(share_text(share))
    if left is not None and run.state(now) == "running":
        words.append(f"{span_text(left)} left")
    text = "  ".join(words)
    room = min(40, width - len(text) - 2)
    if share is None or room < 5:
        return Text(text)
    done = math.floor(room * share)
    return Text.assemble(("█" * done + "░" * (room - done), "cyan"), "  ", text)


def _speed(run: Run, now: float) -> Text:
    """Samples and seconds of a step, and the newest checkpoint."""
    words, pace = [], run.pace()
    if run.windows and (samples_per_s := run.windows[-1].samples_per_s) is not None:
        words.append(f"{number_text(samples_per_s, 4)} samples/s")
    if pace is not None:
        words.append(f"{duration_text(1e6 * pace)} a step")
    if run.checkpoint is None:
        words.append("no checkpoint yet")
    else:
        ago = span_text(max(0.0, now - run.checkpoint.time))
        words.append(f"checkpoint of step {run.checkpoint.step}, {ago} ago")
    return Text("  ".join(words))


def _curves(windows: Sequence[HistoryWindow], width: int) -> list[Text]:
    """A curve for each name that was logged, then for the norm of the gradient and the speed."""
    names = dict.fromkeys(name for window in windows for name in window.logs)
    series: dict[str, list[float | None]] = {name: [window.logs.get(name) for window in windows] for name in names}
    series["grad norm"] = [window.grad_norm for window in windows]
    series["samples/s"] = [window.samples_per_s for window in windows]
    found: list[Text] = []
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if not known or len(found) == _LOGS:
            continue
        name = shortened(printable(name), _NAME)
        text = Text(f"{name:<{_NAME}} {number_text(known[-1], 4):>9}  ")
        found.append(text.append(sparkline(values, max(1, min(50, width - _NAME - 12))), "cyan"))
    return found


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve of eight heights; × where a value was not finite."""
    groups = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
    if len(values) < width:
        groups = [[value] for value in values]
    means = [None if None in group else math.fsum(value / len(group) for value in group if value) for group in groups]
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high / 2 - low / 2  # halves, since their difference may be beyond what a float holds

    def level(mean: float) -> str:
        return LEVELS[round(7 * ((mean / 2 - low / 2) / span if span > 1e-290 else 0.5))]

    return "".join("×" if mean is None else level(mean) for mean in means)


def _ranks(run: Run, width: int) -> list[Text]:
    """A strip with a sign for each rank, the slowest first, and a table of the first ones."""
    ranks, size = run.slowest(), run.start.world_size
    known = sorted(rank.own for rank in ranks if rank.own is not None)
    usual = known[(len(known) - 1) // 2] if known else None  # of two ranks that of the faster one
    behind = [rank.own / usual if rank.own is not None and usual else 1.0 for rank in ranks]
    signs = [next((sign, colour) for most, sign, colour in HEAT if one <= most) for one in behind]
    strip = Text("Ranks, slowest first: ")
    room = width - len(strip.plain)
    for sign in signs[:room]:
        strip.append(*sign)
    if len(ranks) < size or len(ranks) > room:
        strip.append(f" and {size - min(room, len(ranks))} more")
    fit = sum(width >= sum(_WIDTHS[: last + 1]) for last in range(len(_WIDTHS)))
    if all(rank.device is None for rank in ranks):
        fit = min(fit, len(_WIDTHS) - 1)
    names = ("rank", "own time", "of median", "input", "compute", "wait", "memory", "device")
    found = [strip, Text("".join(f"{name:>{wide}}" for name, wide in zip(names[:fit], _WIDTHS, strict=False)), "dim")]
    for rank, times, (_, colour) in list(zip(ranks, behind, signs, strict=True))[:_RANKS]:
        seconds = (rank.own, rank.input, rank.compute, rank.wait)
        own, *parts = ("-" if value is None else duration_text(1e6 * value) for value in seconds)
        memory = ("-" if held is None else bytes_text(held) for held in (rank.rss, rank.device))
        cells = [str(rank.rank), own, f"{times:.2f}×", *parts, *memory]
        aligned = enumerate(zip(cells[:fit], _WIDTHS, strict=False))
        found.append(Text.assemble(*((f"{cell:>{wide}}", colour if at < 3 else "") for at, (cell, wide) in aligned)))
    return found
