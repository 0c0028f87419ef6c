"""README.md: its two programs train, what it names exists, and every page's links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import rank_environment

from hvdkit.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def side(sign: str) -> str:
    """The program before ("-") or after ("+") the steps, of the README's diff."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in ("", " ", sign))


def anchors(text: str) -> set[str]:
    """What headings are called in a link, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def test_the_readme_is_short_and_names_every_command():
    assert len(README.splitlines()) <= 150
    assert README.index("make demo") < 1000 and README.index("make test") < 1000
    pages = {name.replace("_", "-") for name in re.findall(r"docs/(\w+)\.md", README)}
    assert {name for name in COMMANDS if name not in pages and f"hvdkit {name}" not in README} <= {"examples"}


@pytest.mark.parallel
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "horovod", "sklearn")),
    reason="needs torch, horovod and scikit-learn (`make test` installs all)",
)
@pytest.mark.parametrize(("sign", "n"), [("-", 1), ("+", 1), ("+", 2)])
def test_both_programs_train(sign, n, tmp_path):
    (tmp_path / "digits.py").write_text(side(sign))
    start = ["-m", "hvdkit.cli", "launch", "-n", str(n), "--no-tag", "--", sys.executable] if sign == "+" else []
    done = subprocess.run(
        [sys.executable, *start, "digits.py"],
        cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+) after \d+ steps$", done.stdout, re.M)]
    assert len(losses) == 10, done.stdout
    assert losses[-1] < 0.5 * losses[0]
