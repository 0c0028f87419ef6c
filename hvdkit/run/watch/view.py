"""A run on a terminal, in as few lines as it takes; and the same as a page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from hvdkit.common.files import replacing
from hvdkit.common.units import bytes_text, duration_text, number_text, printable, ranks_text, share_text, shortened
from hvdkit.observe.trackers import bar, span_text
from hvdkit.run.watch.history import HistoryWindow
from hvdkit.run.watch.results import RankNow, Watched

LEVELS = "▁▂▃▄▅▆▇█"
HEAT = ((1.05, "░", "green"), (1.2, "▒", "yellow"), (1.5, "▓", "dark_orange"), (math.inf, "█", "red"))
"""Up to how many times the median of the ranks, its sign without colour, and its colour."""
_PLAIN = str.maketrans("▁▂▃▄▅▆▇█░▒▓·…×", "__..--##.+*.~x")
"""For a terminal that has no such characters."""
_NAME = 12
_WIDTHS = (6, 10, 11, 9, 9, 9, 9, 9)
"""Of the columns of the ranks; those that do not fit are left out, the last ones first."""
_PAGE_WIDTH = 100
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>hvdkit watch</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ background: #ffffff; color: #1f2328; }}
pre {{ overflow-x: auto; font: 14px/1.4 monospace; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #15181b; color: #e6e6e6; }} }}
{stylesheet}
</style>
</head>
<body>
<pre>{code}</pre>
</body>
</html>
"""
_COLOURS = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [
        *((90, 90, 90), (214, 58, 58), (46, 140, 70), (168, 120, 20)),
        *((60, 110, 210), (160, 80, 180), (20, 140, 160), (150, 150, 150)),
    ],
)
"""Of the page: each can be read on white and on black."""
_STATES = {"running": "green", "ended": "bold", "silent": "bold red"}


class Most(NamedTuple):
    """How many are shown of what was logged, of the ranks and of the reports."""

    logs: int
    ranks: int
    reports: int


_TERMINAL, _WHOLE = Most(6, 5, 5), Most(12, 64, 200)


def lines(seen: Watched, windows: Sequence[HistoryWindow], width: int, most: Most = _TERMINAL) -> list[Text]:
    """What a terminal shows.

    Args:
        seen: the run now.
        windows: for the curves.
        width: columns, of which no line has more.
        most: how much of it.
    """
    found = [_head(seen), _progress(seen, width), Text("  ".join(_speed_texts(seen)))]
    found += _curves(windows, width, most.logs)
    if seen.ranks:
        found += [Text(), *_ranks(seen, width, most.ranks)]
    if seen.reports:
        found += [Text(), *_reports(seen, most.reports)]
    return [piece for line in found for piece in (line.wrap(_WRAPPER, width) if line.plain else [line])]


_WRAPPER = Console()


def write_page(seen: Watched, windows: Sequence[HistoryWindow], output: Path) -> None:
    """Write the view as one HTML file that loads nothing, completely or not at all; all text from the files is escaped.

    Args:
        seen, windows: as in ``lines``; more of the ranks and reports is shown.
        output: the file.
    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    page = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, force_terminal=True, color_system="256")
    for line in lines(seen, windows, _PAGE_WIDTH, _WHOLE):
        page.print(line)
    with replacing(output, Path(seen.path)) as file:
        file.write(page.export_html(theme=_COLOURS, code_format=_PAGE).encode("utf-8", "replace"))


def plain(shown: Sequence[Text]) -> list[Text]:
    """The same without a character that is not ASCII; names may keep theirs as escapes."""
    return [
        Text(line.plain.translate(_PLAIN).encode("ascii", "backslashreplace").decode(), line.style) for line in shown
    ]


def _head(seen: Watched) -> Text:
    text = Text(printable(shortened(seen.path, 40)), "bold")
    text.append(f"  {ranks_text(seen.world_size)}", "not bold")
    if seen.jobs > 1:
        text.append(f", job {seen.jobs} of this training", "not bold")
    text.append("  ")
    text.append(seen.state, _STATES[seen.state])
    if seen.state == "silent":
        text.append(f": no news for {_ago(seen, seen.updated)}; it hangs or was killed", "red")
    else:
        word, until = ("after", seen.updated) if seen.state == "ended" else ("for", seen.at)
        text.append(f" {word} {span_text(max(0.0, until - seen.started))}", "not bold")
    return text


def _ago(seen: Watched, time: float) -> str:
    return span_text(max(0.0, seen.at - time))


def _progress_text(seen: Watched) -> str:
    """How far it is: step, epoch, share and time left, as far as they are known."""
    words = [f"step {seen.step}/{seen.steps}" if seen.steps else f"step {seen.step}"]
    if seen.epoch is not None:
        words.append(f"epoch {seen.epoch + 1}/{seen.epochs}" if seen.epochs else f"epoch {seen.epoch + 1}")
    if seen.share is not None:
        words.append(share_text(seen.share))
    if seen.left_s is not None and seen.state == "running":
        words.append(f"{span_text(seen.left_s)} left")
    return "  ".join(words)


def _progress(seen: Watched, width: int) -> Text:
    words = _progress_text(seen)
    room = min(40, width - len(words) - 2)
    if seen.share is None or room < 5:
        return Text(words)
    drawn = bar(seen.share, room).replace("#", "█").replace(".", "░")
    return Text.assemble((drawn, "cyan"), "  ", words)


def _speed_texts(seen: Watched) -> list[str]:
    """Samples and seconds of a step, and the newest checkpoint."""
    words = []
    if seen.samples_per_s is not None:
        words.append(f"{number_text(seen.samples_per_s, 4)} samples/s")
    if seen.step_s is not None:
        words.append(f"{duration_text(1e6 * seen.step_s)} a step")
    if seen.checkpoint_step is None or seen.checkpoint_time is None:
        words.append("no checkpoint yet")
    else:
        words.append(f"checkpoint of step {seen.checkpoint_step}, {_ago(seen, seen.checkpoint_time)} ago")
    return words


def _series(windows: Sequence[HistoryWindow]) -> dict[str, list[float | None]]:
    """What was logged, by name, a value for each window; the norm of the gradient and the speed after it."""
    names = dict.fromkeys(name for window in windows for name in window.logs)
    found: dict[str, list[float | None]] = {name: [one.logs.get(name) for one in windows] for name in names}
    found["grad norm"] = [one.grad_norm for one in windows]
    found["samples/s"] = [one.samples_per_s for one in windows]
    return {name: values for name, values in found.items() if any(one is not None for one in values)}


def _curves(windows: Sequence[HistoryWindow], width: int, most: int) -> list[Text]:
    found = []
    for name, values in list(_series(windows).items())[:most]:
        last = next((one for one in reversed(values) if one is not None), 0.0)
        name = shortened(printable(name), _NAME)
        text = Text(f"{name:<{_NAME}} {number_text(last, 4):>9}  ")
        found.append(text.append(sparkline(values, max(1, min(50, width - _NAME - 12))), "cyan"))
    return found


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve of eight heights; × where a value was not finite."""
    groups = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
    if len(values) < width:
        groups = [[one] for one in values]
    means = [None if None in group else math.fsum(one / len(group) for one in group if one) for group in groups]
    known = [one for one in means if one is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join("×" if one is None else LEVELS[round(7 * _height(one, low, high))] for one in means)


def _height(value: float, low: float, high: float) -> float:
    """Where a value is between two others, 0 to 1; half-way where these are the same."""
    span = high / 2 - low / 2  # halves, since their difference may be beyond what a float holds
    return (value / 2 - low / 2) / span if span > 1e-290 else 0.5


def _ranks(seen: Watched, width: int, most: int) -> list[Text]:
    strip = Text("Ranks, slowest first: ")
    room = width - len(strip.plain)
    for one in seen.ranks[:room]:
        strip.append(*heat(seen, one))
    if len(seen.ranks) < seen.world_size or len(seen.ranks) > room:
        strip.append(f" and {seen.world_size - min(room, len(seen.ranks))} more")
    fit = sum(width >= sum(_WIDTHS[: last + 1]) for last in range(len(_WIDTHS)))
    if all(one.device is None for one in seen.ranks):
        fit = min(fit, len(_WIDTHS) - 1)
    names = ("rank", "own time", "of median", "input", "compute", "wait", "memory", "device")
    heading = Text("".join(f"{name:>{wide}}" for name, wide in zip(names[:fit], _WIDTHS, strict=False)), "dim")
    return [strip, heading, *(Text.assemble(*_row(seen, one)[:fit]) for one in seen.ranks[:most])]


def heat(seen: Watched, rank: RankNow) -> tuple[str, str]:
    """A rank's sign and colour in the strip."""
    behind = seen.behind(rank)
    return next((sign, colour) for most, sign, colour in HEAT if behind <= most)


def _row(seen: Watched, one: RankNow) -> list[tuple[str, str]]:
    own, *times = map(_time_text, (one.own_s, one.input_s, one.compute_s, one.wait_s))
    cells = [str(one.rank), own, f"{seen.behind(one):.2f}×", *times, *map(_memory_text, (one.rss, one.device))]
    colour = heat(seen, one)[1]
    aligned = zip(cells, _WIDTHS, strict=True)
    return [(f"{cell:>{wide}}", colour if at < 3 else "") for at, (cell, wide) in enumerate(aligned)]


def _time_text(seconds: float | None) -> str:
    """A time, - where it is not known."""
    return "-" if seconds is None else duration_text(1e6 * seconds)


def _memory_text(size: float | None) -> str:
    """Bytes, - where they are not known."""
    return "-" if size is None else bytes_text(size)


def _reports(seen: Watched, most: int) -> list[Text]:
    left_out = len(seen.reports) - most
    more = f", the last {most} of {len(seen.reports)}" if left_out > 0 else ""
    found = [Text(f"Reports{more}", "bold")]
    for one in seen.reports[-most:]:
        found.append(Text.assemble((f"step {one.step}", "yellow"), f"  {printable(one.text)}"))
    return found
