"""The pictures of the documentation, drawn by the tools themselves from files of the repository: `make figures`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from hvdkit.common import plot
from hvdkit.measure.plan.memory import of_numbers, per_rank

ROOT = Path(__file__).parents[1]
TIMELINE = ROOT / "tests/data/timelines/atpesc-2023-cpu-8ranks.json"
WIDTH, HEIGHT = 1000, 760
# What commands draw, of a file in docs/data or of the numbers that they are given.
PLOTS = {
    "rates.svg": "plan steps --samples 60000 --batch-size 512 --lr 0.01 --epochs 50 -n 1,8 --warmup-epochs 3",
    "scaling.svg": "bench show docs/data/scaling.json",
    "plan_scale.svg": "plan scale --alpha-us 10 --bandwidth-gbit 25 --ppn 4 --plan docs/data/vgg16.json --step-ms 489 "
    "--at 8,16,32,64,128,256,512 --fusion-threshold-mb 64 --cycle-time-ms 5",
}


def timeline_report() -> None:
    """The top of the page of a public run on 8 ranks."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = Path(directory) / "report.html"
        command = [sys.executable, "-m", "hvdkit", "timeline", "report", TIMELINE, "-o", page]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        window.goto(page.as_uri())
        path = ROOT / "docs" / "timeline_report.png"
        window.screenshot(path=path)
        browser.close()
        with Image.open(path) as picture:
            fewer = picture.convert("RGB").quantize(256)  # a third of the bytes
        fewer.save(path, optimize=True)


def plots() -> None:
    """Learning rates, a prediction, scaling."""
    for name, words in PLOTS.items():
        command = [sys.executable, "-m", "hvdkit", *words.split(), "--plot", f"docs/{name}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def large_batch() -> None:
    """The example trains twice, some 20 s each, and draws both."""
    with tempfile.TemporaryDirectory() as directory:
        script = ROOT / "examples/keras/large_batch.py"
        subprocess.run([sys.executable, script, "--device", "cpu"], cwd=directory, check=True)
        shutil.copy(Path(directory) / "large_batch.png", ROOT / "docs")


def shard_state() -> None:
    """Memory by the number of ranks, whole and divided."""
    ranks = (1, 2, 4, 8, 16, 32, 64)

    def draw(axes: Any) -> None:
        kinds: dict[str, dict[str, Any]] = {
            "float32": {},
            "bfloat16, float32 copies": {"dtype": "bfloat16", "mixed": True},
        }
        for words, settings in kinds.items():
            need = of_numbers(1.5e9, **settings)
            rows = [per_rank(need, number) for number in ranks]
            axes.plot(ranks, [row.zero[1] / 1e9 for row in rows], "o-", label=f"{words}, divided")
        axes.plot(ranks, [row.data_parallel / 1e9 for row in rows], "k--", label="either, whole")  # 16 bytes each
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.set(xlabel="ranks", ylabel="GB on one rank", ylim=(0, None))
        axes.legend()

    plot.write(ROOT / "docs/shard_state.svg", draw)


def slow_networks() -> None:
    """The tables of the page: a step's time by what travels, and how fast outer steps let ranks train."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs/slow_networks.md").read_text().splitlines()
        if line.startswith("|")
    ]
    begin = next(place for place, row in enumerate(rows) if row[0] == "gradients")
    times = {row[0].replace("`", ""): float(row[3]) for row in rows[begin + 2 :][:8] if "took" not in row[0]}
    begin = next(place for place, row in enumerate(rows) if row[0].startswith("80 MB of weights, 100 Mbit/s"))
    shares = {row[0].replace("`", ""): float(row[2].split(" ")[0]) for row in rows[begin + 2 :][:4]}

    def bars(values: dict[str, float], title: str) -> plot.Draw:
        def draw(axes: Any) -> None:
            axes.bar_label(axes.barh(range(len(values)), list(values.values())), padding=2)
            axes.set_yticks(range(len(values)), list(values))
            axes.invert_yaxis()
            axes.set_title(title, loc="left")
            axes.set_xlim(0, 1.12 * max(values.values()))

        return draw

    plot.write(
        ROOT / "docs/slow_networks.svg",
        bars(times, "ms a step: 80 MB of gradients, 1 Gbit/s, over Gloo"),
        bars(shares, "rate, alone = 1: 80 MB of weights, 100 Mbit/s"),
        size=(7.2, 5.6),
    )


def confusion() -> None:
    """What `hvdkit explain` named, of the jobs in docs/data."""
    words = "benchmarks/explain.py --out docs/data/explain.jsonl --minutes 0 --plot docs/explain.svg"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    timeline_report()
    plots()
    large_batch()
    shard_state()
    slow_networks()
    confusion()
    subprocess.run([sys.executable, "tests/tools/test_watch.py"], cwd=ROOT, check=True)
