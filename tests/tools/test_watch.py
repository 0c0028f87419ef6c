"""hvdkit watch: what it shows of histories as a monitor writes them.

``python tests/tools/test_watch.py`` draws docs/watch.svg again.
"""

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hvdkit import cli
from hvdkit.jobs.watch import cli as view
from hvdkit.jobs.watch.history import Run
from hvdkit.observe.trackers import span_text

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "watch"
PICTURE = ROOT / "docs" / "watch.svg"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""Rich's own loads its font from the network."""


def window(step, *, steps=50, time=None, **fields):
    ranks = {"step": [0.05, 0.05], "input": [0.01, 0.01], "compute": [0.03, 0.02], "wait": [0.01, 0.02]}
    ranks |= {"rss": [1e9, 1.2e9], "device": [None, None]}
    line = {"kind": "window", "time": 1000 + step / 20 if time is None else time, "step": step, "epoch": 0}
    return line | {"steps": steps, "samples_per_s": 640.0, "logs": {"loss": 1 / step}, "ranks": ranks} | fields


def start(step=0, time=1000.0, **fields):
    return {"kind": "start", "schema": 1, "time": time, "world_size": 2, "step": step, "steps": 400} | fields


def history(folder, *lines):
    file = folder / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def read(folder):
    run = Run(folder)
    run.read()
    return run


def shown(folder, width=80, now=1010.0):
    return [line.plain for line in view.lines(read(folder), now, width)]


def test_progress_pace_and_time_left(tmp_path):
    history(
        tmp_path,
        start(epochs=4),
        window(50),
        window(100),
        window(150),
        {"kind": "checkpoint", "time": 1006, "step": 100},
    )
    run = read(tmp_path)
    assert run.step == 150 and run.pace() == pytest.approx(0.05) and run.left() == pytest.approx(250 * 0.05)
    text = "\n".join(shown(tmp_path))
    assert "step 150/400  epoch 1/4  38%  12 s left" in text and "checkpoint of step 100, 4 s ago" in text


def test_the_slowest_rank_by_its_own_time_comes_first(tmp_path):
    ranks = window(50)["ranks"] | {"compute": [0.02, 0.09], "wait": [0.07, 0.0], "step": [0.1, 0.1]}
    history(tmp_path, start(), window(50, ranks=ranks))
    run = read(tmp_path)
    assert [one.rank for one in run.slowest()] == [1, 0]
    assert run.slowest()[0].own == pytest.approx(0.1)
    assert "Ranks, slowest first: █░" in shown(tmp_path)  # 0.1 and 0.03


def test_of_many_ranks_the_file_names_the_slowest(tmp_path):
    ranks = window(50)["ranks"] | {"rank": [7, 900], "quantiles": {"step": [0.1] * 5, "device": None}}
    history(tmp_path, start(world_size=1000), window(50, ranks=ranks))
    assert [one.rank for one in read(tmp_path).slowest()] == [7, 900]
    assert any("and 998 more" in line for line in shown(tmp_path))


def test_a_resumed_job_takes_no_step_twice(tmp_path):
    history(tmp_path, start(), window(50), window(100), window(150), start(100, time=2000.0),
            window(150, time=2005.0), {"kind": "end", "time": 2006.0, "step": 150})  # fmt: skip
    run = read(tmp_path)
    assert (run.jobs, run.step, run.state(9000.0)) == (2, 150, "ended")
    assert [one.step for one in run.windows] == [50, 100, 150]
    assert run.pace() == pytest.approx(5 / 50), "of the newest job, without the time between both"


def test_a_training_that_goes_back_keeps_the_checkpoints_before(tmp_path):
    checkpoints = [{"kind": "checkpoint", "time": 1000 + step, "step": step} for step in (10, 20, 30)]
    history(tmp_path, start(), window(35), *checkpoints, start(25, time=2000.0, schema=2), window(27))
    assert read(tmp_path).checkpoint.step == 20 and read(tmp_path).step == 27


def test_no_news_is_said(tmp_path):
    history(tmp_path, start(), window(50), window(100))
    assert read(tmp_path).state(1030.0) == "running"
    assert "silent: no news for 33 min" in " ".join(shown(tmp_path, now=3000.0))


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    file = history(tmp_path, start(), window(50))
    run = read(tmp_path)

    def step():
        run.read()
        return run.step

    whole = f"{json.dumps(window(100))}\n"
    for cut in (1, len(whole) // 2, len(whole) - 1):
        with file.open("a") as out:
            out.write(whole[:cut])
        assert step() == 50
        with file.open("r+") as out:
            out.truncate(file.stat().st_size - cut)
    with file.open("a") as out:
        out.write(whole)
    assert step() == 100
    other = tmp_path / "other"
    other.write_text(f"{json.dumps(start(70))}\n")
    other.replace(file)
    assert step() == 70, "a history that was begun again is another file"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([window(50)], "begins with window"),
        ([start(schema=3)], "schema 3"),
        ([start(), {"kind": "window", "time": 1}], "line 2: Object missing required field"),
        ([start(), window(50, ranks=window(50)["ranks"] | {"wait": [1.0]})], "lists of different lengths"),
        ([start(world_size=0)], "line 1: Expected `int` >= 1"),
        ([], "no complete line"),
    ],
)
def test_what_is_no_history_is_one_sentence(tmp_path, capsys, lines, says):
    history(tmp_path, *lines)
    assert cli.run(["watch", str(tmp_path), "--once"]) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_kinds_of_later_versions_are_passed_over(tmp_path):
    history(tmp_path, start(later=1), {"kind": "later", "time": "x"}, window(50))
    assert read(tmp_path).step == 50


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), min_size=1, max_size=40),
    st.text(min_size=1, max_size=30),
    st.integers(20, 200),
)
def test_no_line_is_wider_than_the_terminal_and_none_obeys_a_name(tmp_path_factory, values, name, width):
    folder = tmp_path_factory.mktemp("run")
    lines = [window(50 * at, logs={name: one}, grad_norm=one) for at, one in enumerate(values, 1)]
    report = {"kind": "report", "time": 1, "step": 50, "about": name, "cause": name, "text": f"\x1b[2J{name}"}
    history(folder, start(), *lines, report)
    console = Console(width=width, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    for line in view.lines(read(folder), 1010.0, width):
        assert line.cell_len <= width
        assert line.plain.isprintable()
        console.print(line)


def test_a_terminal_without_unicode_gets_escapes():
    words = [sys.executable, "-m", "hvdkit.cli", "watch", str(DATA), "--once"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "Ranks, slowest first: \\u2588" in done.stdout, done.stderr


def test_the_plain_view_of_a_file(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.run(["watch", str(DATA), "--once"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert "Ranks, slowest first: █▒" in text and re.search(r"^ +6 +54\.2 ms +1\.63× +23\.1 ms", text, re.MULTILINE)
    assert "step 1350  Rank 6 waits for its input" in text


def test_on_a_terminal_it_stays_and_ctrl_c_is_quiet(tmp_path):
    file = history(tmp_path, start(), window(50))
    main, other = pty.openpty()
    words = [sys.executable, "-m", "hvdkit.cli", "watch", str(tmp_path)]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    job = subprocess.Popen(
        words,
        stdin=other,
        stdout=other,
        stderr=other,
        env=environ,
        # a suite in the background of a shell has inherited it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(other)
    said = read_until(main, b"step 50/400")
    with file.open("a") as out:
        out.write(f"{json.dumps(window(100))}\n")
    said += read_until(main, b"step 100/400")
    job.send_signal(signal.SIGINT)
    said += read_until(main, None)
    assert job.wait(60) == 0
    assert b"Traceback" not in said and b"Interrupted" not in said
    assert b"\x1b[" in said


def read_until(terminal, wanted, patience=120):
    said, end = b"", time.monotonic() + patience
    while wanted is None or wanted not in said:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, f"{wanted} did not come: {said[-2000:]}"
        try:
            more = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            more = b""
        if not more:
            assert wanted is None, said[-2000:]
            break
        said += more
    return said


def test_times_read_as_people_say_them():
    said = [span_text(seconds) for seconds in (0, 42.4, 99.6, 3600, 11100, 90_000, 187_200)]
    assert said == ["0 s", "42 s", "2 min", "60 min", "3 h 05 min", "25 h 00 min", "2 d 4 h"]
    spans = [span_text(seconds) for seconds in range(0, 400_000, 7)]
    assert not [text for text in spans if re.search(r"h 60 min|d 24 h", text)]
    assert len(list(itertools.groupby(spans))) == len(set(spans)), "they only grow"


def picture():
    console = Console(record=True, width=80, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115, PTH123
    run = read(DATA)
    run.path = Path("runs/digits")
    for line in view.lines(run, run.updated + 2, 80):
        console.print(line)
    drawn = console.export_svg(title="hvdkit watch runs/digits", code_format=SVG, unique_id="watch")
    return drawn.replace("\N{NO-BREAK SPACE}", "&#160;")


def test_the_picture_of_the_docs_is_what_it_shows():
    assert PICTURE.read_text() == picture(), "draw it with: python tests/tools/test_watch.py"


if __name__ == "__main__":
    PICTURE.write_text(picture())
