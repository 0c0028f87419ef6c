"""The pictures of the documentation, drawn by the tools themselves from files of the tests: `make figures`."""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
TIMELINE = ROOT / "tests/data/timelines/atpesc-2023-cpu-8ranks.json"
WIDTH, HEIGHT = 1000, 760


def timeline_report() -> None:
    """The top of the page of a public run on 8 ranks."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = Path(directory) / "report.html"
        command = [sys.executable, "-m", "hvdkit", "timeline", "report", TIMELINE, "-o", page]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        window.goto(page.as_uri())
        window.screenshot(path=ROOT / "docs/timeline_report.png")
        browser.close()


if __name__ == "__main__":
    timeline_report()
    subprocess.run([sys.executable, "tests/tools/test_watch.py"], cwd=ROOT, check=True)
