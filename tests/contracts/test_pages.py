"""README.md, docs/ and --help: what they name exists, links lead somewhere, sentences are short; no program is run."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pages import DOCS, blocks, every_command
from programs_pages import OF_THEIR_OWN, RUN, Place

from hvdkit.cli import COMMANDS
from hvdkit.prepare.check.rules import check_script
from hvdkit.prepare.check.source import Script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CODE = re.compile(r"^ *```.*?^ *```|(?<=\n\n) {4}\S[^\n]*(?:\n(?: *\n)? {4}[^\n]*)*|`[^`]*`", re.MULTILINE | re.DOTALL)
"""In fences, in indented lines after an empty one (deeper items of a list have none before them), in backticks."""
BLOCKS = re.compile(r"\n\s*\n|\n(?=\||#| *(?:[-*>]|\d+\.) )")
WORDS = 30
"""In a sentence, or in a part of one that a semicolon or a colon ends; what is in parentheses does not count."""
FILE = re.compile(r"(?<![\w/.-])(?:benchmarks|examples|hvdkit|tests)/[\w/*.-]+\.(?:py|patch|md|html|json)\b")
LINK = re.compile(r'(?:\]\(|src(?:set)?=")([^)"\s]+)')


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


def test_files_that_pages_name_are_there():
    found = [(page.name, path) for page in PAGES for path in FILE.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 50
    assert [one for one in found if not any(ROOT.glob(one[1]))] == []


def sentences(text: str) -> Iterator[str]:
    for block in BLOCKS.split(CODE.sub("code", text)):
        if not block.lstrip().startswith(("|", "#", "<")):
            yield from re.split(r"(?<=[.:;])\s+", re.sub(r"\([^()]*\)", "", " ".join(block.split())))


def test_no_sentence_is_too_long():
    found = [one for page in PAGES if page.parent.name == "docs" for one in sentences(page.read_text(encoding="utf-8"))]
    found += sentences(README)
    assert len(found) > 1000
    assert [one for one in found if len(one.split()) > WORDS] == []


def help_texts(command: click.Command) -> list[str]:
    """A command's --help and those of its options, with an item of a list for each line that click leaves as it is."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    text = "\n\n".join(re.sub(r"\n *", "\n- ", one) if one.startswith("\b") else one for one in paragraphs)
    return [text, *(one.help for one in command.params if isinstance(one, click.Option) and one.help)]


def test_no_sentence_of_a_help_is_too_long():
    found = [
        (name, one) for name, command in every_command() for text in help_texts(command) for one in sentences(text)
    ]
    assert len(found) > 500
    assert [(name, one) for name, one in found if len(one.split()) > WORDS] == []


def test_the_readme_is_short_and_names_every_command():
    assert len(README.splitlines()) <= 140
    assert README.index("make demo") < 1000 and README.index("make test") < 1000
    pages = {name.replace("_", "-") for name in re.findall(r"docs/(\w+)\.md", README)}
    assert {name for name in COMMANDS if name not in pages and f"hvdkit {name}" not in README} <= {"examples"}


def test_check_has_no_finding_in_either_program_of_the_page_on_migration() -> None:
    for text, library in zip(blocks("migrate.md")["DDP before and after"], ("ddp", "hvdkit"), strict=True):
        checked = check_script(Script("train.py", ast.parse(text)))
        assert (checked.library, checked.findings) == (library, [])


def exported(framework: str) -> set[str]:
    """The names of ``__all__``, read without importing the framework."""
    source = (DOCS.parent / "hvdkit" / framework / "__init__.py").read_text()
    return set(re.findall(r'^    "(\w+)",$', source, re.MULTILINE))


def test_what_the_tables_on_migration_name_exists() -> None:
    frameworks = {
        "From Horovod in TensorFlow": exported("tensorflow"),
        "From Horovod in Keras": exported("keras"),
        "From MultiWorkerMirroredStrategy": exported("tensorflow") | exported("keras"),
    }
    sections = re.split(r"^## (.+)$", (DOCS / "migrate.md").read_text(), flags=re.MULTILINE)
    for heading, text in zip(["", *sections[1::2]], sections[::2], strict=True):
        unknown = set(re.findall(r"\bhk\.(\w+)", text)) - frameworks.pop(heading, exported("torch"))
        assert not unknown, f"{heading}: {unknown}"
    assert not frameworks


def test_every_python_block_of_a_page_runs_in_a_test() -> None:
    """A new block needs a row in parallel/programs_pages.py, or its heading in the test of a page that has its own."""
    found = {
        Place(page.name, heading, number)
        for page in DOCS.glob("*.md")
        for heading, code in blocks(page.name).items()
        for number in range(len(code))
    }
    fences = sum(len(re.findall("^ *```python$", page.read_text(), re.MULTILINE)) for page in DOCS.glob("*.md"))
    assert len(found) == fences  # none is indented, or before the first heading, or below two of one name
    assert {one for one in found if one.page not in OF_THEIR_OWN} == set(RUN)
    for page in OF_THEIR_OWN:
        test = (ROOT / "tests" / "parallel" / f"test_{page.removesuffix('.md')}.py").read_text()
        assert [one for one in found if one.page == page and f'"{one.heading}"' not in test] == []


def test_every_picture_has_an_alternative_text_and_is_small() -> None:
    found = []
    for page in PAGES:
        written = page.read_text(encoding="utf-8")
        for text, path in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", written):
            found.append((page.parent / path).resolve())
            assert len(text.split()) >= 4, f"{page.name}: {path}"
            assert found[-1].stat().st_size < 100_000, path
    assert set(found) >= {*DOCS.glob("*.svg"), *DOCS.glob("*.png")}
