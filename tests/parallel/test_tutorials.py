"""docs/tutorials.md: typed in order in the environment of `make demo`, every command ends with status 0."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import rank_environment

from hvdkit.cli import COMMANDS

MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials.md").read_text()
LONGEST_S = 280


class Block(NamedTuple):
    """A block to type, and the package that the comment before it says it needs, or an empty string."""

    needs: str
    commands: str


BLOCKS = [
    Block(*found)
    for found in re.findall(r"^(?:<!-- needs: (.+?) -->\n)?```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]


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


def test_what_a_table_or_a_sentence_names_with_options_is_in_a_command_that_runs():
    """`hvdkit plan --plot` in a table: a block has it with this option. Capitals are for the reader to fill in."""
    commands = [line.split() for block in BLOCKS for line in block.commands.splitlines()]
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = [(line, name) for line in text.splitlines() for name in re.findall(r"`([^`]+)`", line)]
    named = [(line, name) for line, name in named if re.match(r"(hvdkit|python|\S+\.py) .*-", name)]
    assert len(named) >= 15
    for line, name in named:
        words = [word for word in re.split(r"[ :]", name) if not word.isupper()]
        runs = any(all(is_in(command, word) for word in words) for command in commands)
        assert runs or line.startswith("Not run by a test"), name


def is_in(command: list[str], word: str) -> bool:
    """Whether a word, or a file of this name, is in a command."""
    return any(one == word or one.endswith(f"/{word}") for one in command)


@pytest.fixture
def demo_environment(tmp_path):
    """What `make demo` installs, and nothing else: a command must not need what only the tests install."""
    made = tmp_path / "demo"
    variables = {**rank_environment(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    del variables["PYTHONPATH"]
    make = subprocess.run(
        ["make", "-C", str(ROOT), f"VENV={made}", str(made / ".demo")], env=variables, capture_output=True, text=True
    )
    assert make.returncode == 0, make.stdout + make.stderr
    variables.update(PATH=f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}", VIRTUAL_ENV=str(made))
    subprocess.run(["hvdkit", "install"], env=variables, check=True, capture_output=True)
    yield variables
    shutil.rmtree(made)  # 2 GB


@pytest.mark.timeout(900)
def test_the_blocks_run_typed_in_order_after_make_demo(demo_environment, tmp_path):
    for name in ("examples", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    for needs, commands in BLOCKS:
        if needs and importlib.util.find_spec(needs) is None:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=demo_environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        if re.search(r"launch -n 2 .*cnn", commands):
            assert re.search(r"^\[0\] Hvd Procs 2 Total time: [\d.]+ second$", done.stdout, re.MULTILINE), commands
        for written in re.findall(r"(?:-o|--plot|--json|--timeline|--profile|--mpi-profile) ([\w.]+)", commands):
            assert (tmp_path / written).exists(), written
