"""The commands of docs/tutorials.md: for the test of the page, and for tests that run some of them beside others."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials.md").read_text()
LAUNCH = ["hvdkit", "launch", "-n", "2", "--"]


class Block(NamedTuple):
    """A block to type, and what is said of it in the comment before: nothing, ``needs`` or ``executed by``."""

    kind: str
    what: str
    commands: str


BLOCKS = [
    Block(*found)
    for found in re.findall(r"^(?:<!-- ([\w ]+): (.+?) -->\n)?```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]


def lines_of(block: Block) -> list[list[str]]:
    """The words of each line of a block that is marked ``executed by``, with the variables that it sets put in."""
    variables: dict[str, str] = {}
    found = []
    for line in block.commands.splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line)
        if (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])) and len(words) == 1:
            variables[assigned[1]] = assigned[2]
        else:
            found.append(words)
    return found


def arguments(test: str, script: str, *having: str, lacking: tuple[str, ...] = ()) -> list[str]:
    """What the page gives to a script, in the one command with these words that it says this test executes.

    A test that takes them from here starts the script with the words of the page, alone or on two ranks.
    """
    found = []
    for block in BLOCKS:
        if block.kind == "executed by" and Path(block.what).name == Path(test).name:
            for words in lines_of(block):
                start = words[len(LAUNCH) :] if words[: len(LAUNCH)] == LAUNCH else words
                named = start[0] == "python" and Path(start[1]).name == script
                if named and set(having) <= set(words) and not set(lacking) & set(words):
                    found.append(start[2:])
    (words,) = found
    return words


def tool(test: str, command: str) -> list[str]:
    """The words after ``hvdkit`` in the one command of a tool that the page says this test executes."""
    (words,) = [
        words
        for block in BLOCKS
        if block.kind == "executed by" and Path(block.what).name == Path(test).name
        for words in lines_of(block)
        if words[:2] == ["hvdkit", command]
    ]
    return words[1:]
