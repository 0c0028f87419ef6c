"""docs/tutorials.md: every command in it runs, in the repository's own environment, and ends with status 0."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, rank_environment

from hvdkit.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials.md").read_text()
MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
BLOCKS = re.findall(r"^(?:<!-- ([\w ]+): (.+?) -->\n)?```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RUN = [block for block in BLOCKS if block[0] != "executed by"]
LONGEST_S = 280


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def name_of(block: tuple[str, str, str]) -> str:
    """A block's script, or the command of hvdkit that it begins with."""
    script = re.search(r"examples/\S+/(\w+\.py)(?: .*?(--backend \w+))?", block[2])
    command = re.search(r"hvdkit (\w[\w-]*)", block[2])
    return " ".join(part.strip() for match in (command, script) if match for part in match.groups() if part)


def test_the_page_has_a_part_for_each_tutorial_and_commands_in_it():
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert [part[0] for part in parts] == list("ABCDE")
    assert all("```sh" in part and "|---|" in part for part in parts)


def test_it_names_commands_files_and_pages_that_exist():
    commands = set(re.findall(r"hvdkit (?!launch\b)([a-z][a-z-]+)", "\n".join(re.findall(r"`([^`\n]+)`", PAGE))))
    assert commands <= set(COMMANDS)
    for path in re.findall(r"(?:examples|tests)/[\w/]+\.(?:py|json)", PAGE):
        assert (ROOT / path).is_file(), path
    for page in re.findall(r"\]\((\w+\.md)\)", PAGE):
        assert (ROOT / "docs" / page).is_file(), page


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0] == "executed by"], ids=name_of)
def test_what_another_test_executes_is_executed_there(block):
    (script,) = re.findall(r"examples/\w+/\w+\.py", block[2])
    if block[1] == "docs/tutorials.md":  # another block of this page starts it in the same way, among other things
        assert any(script in commands and "hvdkit launch -n 2" in commands for kind, _, commands in RUN)
    else:
        assert Path(script).stem in (ROOT / block[1]).read_text()


@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_the_commands_run(block, tmp_path):
    kind, what, commands = block
    if kind == "needs" and (absent := [name for name in what.split(", ") if not found(name)]):
        pytest.skip(f"needs {', '.join(absent)}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**rank_environment(), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    if "hvdkit launch" in commands and "--dry-run" not in commands:
        assert "[0] " in done.stdout
    for written in re.findall(r"(?:-o|--plot|--json|--timeline|--profile|--mpi-profile) ([\w.]+)", commands):
        assert (tmp_path / written).exists(), written
