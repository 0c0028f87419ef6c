"""A run on a terminal, in as few lines as it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hvdkit.common.units import bytes_text, duration_text, number_text, printable, ranks_text, share_text, shortened
from hvdkit.jobs.watch.history import HistoryWindow
from hvdkit.jobs.watch.results import RankNow, Watched
from hvdkit.observe.trackers import bar, span_text

LEVELS = "▁▂▃▄▅▆▇█"
HEAT = ((1.05, "░", "green"), (1.2, "▒", "yellow"), (1.5, "▓", "dark_orange"), (math.inf, "█", "red"))
"""Up to how many times the median of the ranks, its sign without colour, and its colour."""
_PLAIN = str.maketrans("▁▂▃▄▅▆▇█░▒▓·…×", "__..--##.+*.~x")
"""For a terminal that has no such characters."""
_NAME = 12
_WIDTHS = (6, 10, 11, 9, 9, 9, 9, 9)
"""Of the columns of the ranks; those that do not fit are left out, the last ones first."""
_STATES = {"running": "green", "ended": "bold", "silent": "bold red"}
_LOGS, _RANKS, _REPORTS = 6, 5, 5
"""How many are shown of what was logged, of the ranks and of the reports."""
_WRAPPER = Console()


def lines(seen: Watched, windows: Sequence[HistoryWindow], width: int) -> list[Text]:
    """What a terminal shows.

    Args:
        seen: the run now.
        windows: for the curves.
        width: columns, of which no line has more.
    """
    found = [_head(seen), _progress(seen, width), Text("  ".join(_speed_texts(seen)))]
    found += _curves(windows, width)
    if seen.ranks:
        found += [Text(), *_ranks(seen, width)]
    if seen.reports:
        more = f", the last {_REPORTS} of {len(seen.reports)}" if len(seen.reports) > _REPORTS else ""
        found += [Text(), Text(f"Reports{more}", "bold")]
        for report in seen.reports[-_REPORTS:]:
            found.append(Text.assemble((f"step {report.step}", "yellow"), f"  {printable(report.text)}"))
    return [piece for line in found for piece in (line.wrap(_WRAPPER, width) if line.plain else [line])]


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


def _progress(seen: Watched, width: int) -> Text:
    """How far it is: step, epoch, share and time left, as far as they are known."""
    words = [f"step {seen.step}/{seen.steps}" if seen.steps else f"step {seen.step}"]
    if seen.epoch is not None:
        words.append(f"epoch {seen.epoch + 1}/{seen.epochs}" if seen.epochs else f"epoch {seen.epoch + 1}")
    if seen.share is not None:
        words.append(share_text(seen.share))
    if seen.left_s is not None and seen.state == "running":
        words.append(f"{span_text(seen.left_s)} left")
    text = "  ".join(words)
    room = min(40, width - len(text) - 2)
    if seen.share is None or room < 5:
        return Text(text)
    drawn = bar(seen.share, room).replace("#", "█").replace(".", "░")
    return Text.assemble((drawn, "cyan"), "  ", text)


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
    return "".join("×" if mean is None else LEVELS[round(7 * _height(mean, low, high))] for mean in means)


def _height(value: float, low: float, high: float) -> float:
    """Where a value is between two others, 0 to 1; half-way where these are the same."""
    span = high / 2 - low / 2  # halves, since their difference may be beyond what a float holds
    return (value / 2 - low / 2) / span if span > 1e-290 else 0.5


def _ranks(seen: Watched, width: int) -> list[Text]:
    strip = Text("Ranks, slowest first: ")
    room = width - len(strip.plain)
    for rank in seen.ranks[:room]:
        strip.append(*heat(seen, rank))
    if len(seen.ranks) < seen.world_size or len(seen.ranks) > room:
        strip.append(f" and {seen.world_size - min(room, len(seen.ranks))} more")
    fit = sum(width >= sum(_WIDTHS[: last + 1]) for last in range(len(_WIDTHS)))
    if all(rank.device is None for rank in seen.ranks):
        fit = min(fit, len(_WIDTHS) - 1)
    names = ("rank", "own time", "of median", "input", "compute", "wait", "memory", "device")
    heading = Text("".join(f"{name:>{wide}}" for name, wide in zip(names[:fit], _WIDTHS, strict=False)), "dim")
    return [strip, heading, *(Text.assemble(*_row(seen, rank)[:fit]) for rank in seen.ranks[:_RANKS])]


def heat(seen: Watched, rank: RankNow) -> tuple[str, str]:
    """A rank's sign and colour in the strip."""
    behind = seen.behind(rank)
    return next((sign, colour) for most, sign, colour in HEAT if behind <= most)


def _row(seen: Watched, rank: RankNow) -> list[tuple[str, str]]:
    seconds = (rank.own_s, rank.input_s, rank.compute_s, rank.wait_s)
    own, *times = ("-" if value is None else duration_text(1e6 * value) for value in seconds)
    memory = ("-" if size is None else bytes_text(size) for size in (rank.rss, rank.device))
    cells = [str(rank.rank), own, f"{seen.behind(rank):.2f}×", *times, *memory]
    colour = heat(seen, rank)[1]
    aligned = zip(cells, _WIDTHS, strict=True)
    return [(f"{cell:>{wide}}", colour if at < 3 else "") for at, (cell, wide) in enumerate(aligned)]
