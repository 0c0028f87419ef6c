"""What the pages and ``--help`` tell people to type exists: commands, options, names and keywords of the adapters."""

import ast
import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest
from pages import every_command

from hvdkit.cli import COMMANDS, hvdkit_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^|[;&|]\s*|-- )\$? ?(hvdkit [a-z-]+\b(?!:).*)")


def subcommand(command, words):
    """The command that the words lead to, and the words after its name."""
    context = click.Context(command)
    while isinstance(command, click.Group) and words and command.get_command(context, words[0]):
        command, words = command.get_command(context, words[0]), words[1:]
    return command, words


def wrong_words(line):
    """The words of a command line of ``hvdkit`` that its parser does not know."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:  # prose with an apostrophe after the command
        words = line.split()[1:]
    if words and words[0] in ("-h", "--help", "--version"):
        return []
    if not words or words[0] not in COMMANDS:
        return [words[:1]]
    command, rest = subcommand(hvdkit_command, words)
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    own = rest[: rest.index("--")] if "--" in rest else rest
    for end in ("|", "&&", "||", ";", ">", ">>"):
        own = own[: own.index(end)] if end in own else own
    if not command.context_settings.get("allow_interspersed_args", True):  # what follows a script is the script's
        own = own[: next((place for place, word in enumerate(own) if word.endswith(".py")), len(own))]
    given = [re.match(r"-{1,2}[a-zA-Z][\w-]*", word.lstrip("[(")) for word in own]
    return [(command.name, word[0]) for word in given if word and word[0] not in options and word[0][:2] not in options]


def commands_of(text):
    """Each command line of ``hvdkit`` in a page, from its blocks and from its sentences."""
    for _, block in FENCED.findall(text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if found := CALL.search(line.strip()):
                yield found[1]
    yield from (" ".join(one.split()) for one in re.findall(r"`(hvdkit [a-z][^`]*)`", FENCED.sub("", text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_known(page):
    assert [(line, wrong) for line in commands_of(page.read_text()) if (wrong := wrong_words(line))] == []


def test_the_commands_in_every_help_are_known():
    found = [
        (name, line, wrong)
        for name, command in every_command()
        for line in (command.help or "").splitlines()
        if line.strip().startswith("hvdkit ") and (wrong := wrong_words(line.strip()))
    ]
    assert found == []


def face(adapter):
    """Names of an adapter, each with the keywords that it takes; None where it takes any, or is no function."""
    found = {}
    for node in ast.parse((ROOT / "hvdkit" / adapter / "__init__.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found[node.name] = None if node.args.kwarg else {one.arg for one in arguments}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update((alias.asname or alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update((target.id, None) for target in targets if isinstance(target, ast.Name))
    return found


FACES = {adapter: face(adapter) for adapter in ADAPTERS}


def wrong_names(code, adapters):
    """What a program takes from ``hk`` that none of the adapters has, and keywords that none takes."""
    named = re.findall(r"import hvdkit\.(\w+) as hk", code)
    faces = [FACES[one] for one in named or adapters if one in FACES]
    for node in ast.walk(ast.parse(code)):
        of = node.func if isinstance(node, ast.Call) else node
        if not (isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id == "hk"):
            continue
        taken = [one[of.attr] for one in faces if of.attr in one]
        if not taken:
            yield f"hk.{of.attr}"
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if taken and all(one is not None and keyword.arg not in one for one in taken):
                yield f"hk.{of.attr}({keyword.arg}=)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_parse_and_use_names_that_exist(page):
    for language, block in FENCED.findall(page.read_text()):
        if language == "python":
            code = textwrap.dedent(block)
            assert list(wrong_names(code, ADAPTERS)) == [], code


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_public_name_is_used_in_a_program(adapter, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from uses import public, uses

    assert len(public(adapter)) > 15
    assert [name for name in public(adapter) if not uses(adapter, name)] == []


def test_pages_have_commands_and_programs():
    """Else the tests above would pass on nothing."""
    texts = [page.read_text() for page in PAGES]
    assert sum(len(list(commands_of(text))) for text in texts) > 150
    assert sum(language == "python" for text in texts for language, _ in FENCED.findall(text)) > 20
    assert wrong_words("hvdkit launch --no-such-option -n 2 -- python t.py") == [("launch", "--no-such-option")]
    assert wrong_words("hvdkit lanch -n 2") == [["lanch"]]
    assert list(wrong_names("hk.distribute(o, compresion='fp16'); hk.shards()", ADAPTERS)) != []
