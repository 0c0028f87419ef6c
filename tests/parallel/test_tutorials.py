"""docs/tutorials.md: every command in it runs, in the repository's own environment, and ends with status 0."""

import ast
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import tutorials_page
from ranks import BIN, rank_environment
from tutorials_page import BLOCKS, LAUNCH, PAGE, ROOT, Block, lines_of

from hvdkit.cli import COMMANDS

MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
RUN = [block for block in BLOCKS if block.kind != "executed by"]
ELSEWHERE = [block for block in BLOCKS if block.kind == "executed by"]
LONGEST_S = 280
LEAN = Path(__file__).parent / "lean"


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def name_of(block: Block) -> str:
    """A block's script, or the command of hvdkit that it begins with."""
    script = re.search(r"examples/\S+/(\w+\.py)(?: .*?(--backend \w+))?", block.commands)
    command = re.search(r"hvdkit (\w[\w-]*)", block.commands)
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


def taken(test: str) -> list[list[str]]:
    """The commands that a test file asks the page for, and lists of words in it that could be one."""
    path = ROOT / test
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("arguments", "tool"):
            words = [one.value for one in node.args[1:] if isinstance(one, ast.Constant)]
            options = {option.arg: ast.literal_eval(option.value) for option in node.keywords if option.arg}
            found.append(getattr(tutorials_page, node.func.id)(str(path), *words, **options))
        elif isinstance(node, ast.List):
            found.append([one.value for one in node.elts if isinstance(one, ast.Constant)])
    return found


@pytest.mark.parametrize("block", ELSEWHERE, ids=name_of)
def test_what_another_test_executes_is_executed_there_with_the_words_of_the_page(block):
    for words in lines_of(block):
        if words[0] == "hvdkit" and words[1] != "launch":
            assert words[1:] in taken(block.what), words
        else:
            assert words[0] == "python" or words[: len(LAUNCH)] == LAUNCH
            script = words.index("python") + 1
            assert words[script + 1 :] in taken(block.what), words
            assert words[script].rpartition("/")[2] in (ROOT / block.what).read_text()


@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_the_commands_run(block, tmp_path):
    kind, what, commands = block
    if kind == "needs" and (absent := [name for name in what.split(", ") if not found(name)]):
        pytest.skip(f"needs {', '.join(absent)}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**rank_environment(), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{LEAN}{os.pathsep}{environment['PYTHONPATH']}"
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
        assert re.search(r"^\[0\] Hvd Procs 2 Total time: [\d.]+ second$", done.stdout, re.MULTILINE)
    for written in re.findall(r"(?:-o|--plot|--json|--report|--timeline|--profile|--mpi-profile) ([\w.]+)", commands):
        assert (tmp_path / written).exists(), written
