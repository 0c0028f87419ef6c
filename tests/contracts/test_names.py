"""The same names, in the same order, in every adapter; and every public name is documented."""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import hvdkit
from hvdkit import errors

PACKAGE = Path(hvdkit.__file__).parent
ROOT = PACKAGE.parent
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
STEPS = (
    "init", "pin_device", "scale_lr", "distribute", "broadcast_state", "Checkpoints", "shard", "steps_per_epoch",
)  # fmt: skip
BESIDE = ("warmup", "average_metrics", "check_agreement", "CheckAgreement", "seed_everything", "fit")


def exported(adapter: str) -> list[str]:
    """``__all__`` of an adapter, read without importing its framework."""
    tree = ast.parse((PACKAGE / adapter / "__init__.py").read_text())
    (node,) = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return list(ast.literal_eval(node.value))


def definition_lines(adapter: str) -> dict[str, int]:
    """Line of each step in an adapter: where it is defined, or where a section heading says where it is defined."""
    text = (PACKAGE / adapter / "__init__.py").read_text()
    lines = {name: node.lineno for name, node in definitions(text).items()}
    for number, line in enumerate(text.splitlines(), start=1):
        heading = re.match(r"# [1-8]: (\w+) is (?:the neutral one|in (\w+)) -", line)
        if heading and (heading[2] is None or heading[1] in definitions_in(PACKAGE / adapter / f"{heading[2]}.py")):
            lines.setdefault(heading[1], number)
    return lines


def definitions_in(path: Path) -> dict[str, ast.stmt]:
    """The functions and classes of a file, by name."""
    return definitions(path.read_text())


def definitions(text: str) -> dict[str, ast.stmt]:
    """The functions and classes of a module, by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


FILES = {
    "1 init": (("topology", "launchers"), "__init__"),
    "2 device": (("device",), "device"),
    "3 learning rate, warmup": (("learning_rate",), "schedule"),
    "4 gradients": (("gradients",), "optimizer"),
    "5 broadcast": (("agreement",), "state"),
    "6 checkpoints": (("checkpoint",), "checkpoint"),
    "7 sharding": (("shards",), "data"),
    "8 steps per epoch": (("shards",), None),
    "agreement": (("agreement",), "agreement"),
    "seeds": (("seeds",), "seeds"),
}
"""Step: where its framework-neutral part is in steps/, and the file of that name in every adapter."""
SEVERAL = {"monitor", "elastic", "loss", "divergence", "outer", "private", "sharded"}
"""Files of two or three adapters, where the framework needs them."""


@pytest.mark.parametrize("step", FILES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_step_is_found_under_the_same_name_in_every_adapter(adapter, step):
    neutral, file = FILES[step]
    assert [name for name in neutral if not (PACKAGE / "steps" / f"{name}.py").is_file()] == []
    assert file is None or (PACKAGE / adapter / f"{file}.py").is_file()


def test_the_table_is_that_of_the_tree():
    """What all adapters have is a row, and what several have is known: a new file gets its name here."""
    held = Counter(path.stem for adapter in ADAPTERS for path in (PACKAGE / adapter).glob("*.py"))
    rows = {file for _, file in FILES.values() if file}
    assert {name for name, times in held.items() if times == len(ADAPTERS)} == rows
    assert {name for name, times in held.items() if 1 < times < len(ADAPTERS)} == SEVERAL


def test_an_adapter_hides_no_function_behind_a_module_of_its_name():
    """``hvdkit.torch.profile`` would be the module once it is imported, not the function."""
    for adapter in ADAPTERS:
        modules = {path.stem for path in (PACKAGE / adapter).iterdir()}
        assert len(modules) > 5
        assert modules & set(exported(adapter)) == set()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_has_the_eight_steps_in_order(adapter):
    assert set(STEPS + BESIDE) <= set(exported(adapter))
    lines = definition_lines(adapter)
    assert [name for name in sorted(lines, key=lines.__getitem__) if name in STEPS] == list(STEPS)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_fit_is_at_most_forty_lines(adapter):
    tree = ast.parse((PACKAGE / adapter / "__init__.py").read_text())
    (fit,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "fit"]
    docstring = fit.body[0]
    assert fit.end_lineno - fit.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1) <= 40


def test_the_error_tree_is_the_one_drawn_in_its_docstring():
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    drawn = {word for line in errors.__doc__.splitlines() for word in line.replace("(", " ").split() if word in classes}
    assert drawn == set(classes)
    assert all(issubclass(value, errors.HvdkitError) for value in classes.values())
    assert set(classes) <= set(hvdkit.__all__)


def test_exported_names_exist():
    assert all(hasattr(hvdkit, name) for name in hvdkit.__all__)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every module of the package, by its path there; parsed once."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


IN_SEVERAL_ADAPTERS = {"CheckAgreement", "Checkpoints", "ElasticState", "Monitor", "ShardedStream", "Warmup"}
"""The same for each framework, and what is the same in all of them in steps/."""


def test_a_class_name_is_said_once(trees):
    """``Plan`` in four places says nothing; what is the same lives in common/ or steps/."""
    where: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(path)
    assert len(where) > 400
    assert {name: paths for name, paths in where.items() if len(paths) > 1 and name not in IN_SEVERAL_ADAPTERS} == {}


def test_every_public_name_has_a_docstring(trees):
    public = [
        (f"{path}:{node.name}", ast.get_docstring(node))
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(public) > 1000
    assert [name for name, docstring in public if not docstring] == []


def test_every_long_private_function_says_what_it_takes_and_gives(trees):
    long = [
        (f"{path}:{node.name}", ast.get_docstring(node))
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
        if node.end_lineno - node.lineno >= 19
    ]
    assert len(long) > 100
    assert [name for name, docstring in long if not docstring] == []


def test_every_module_has_a_docstring(trees):
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_tests_and_examples_hold_no_packages():
    assert [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("__init__.py")] == []


MOST_POSITIONAL = 7


def test_what_takes_many_arguments_takes_them_by_name(trees):
    """Eight values in a row say nothing of what they are, and two of them are soon exchanged."""
    long, seen = set(), 0
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                seen += 1
                if len(set(names) - {"self", "cls"}) > MOST_POSITIONAL:
                    long.add(node.name)
            elif isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                long.add(ast.unparse(node.func))
    assert seen > 1000
    # A list of layers; and what the reader of a timeline makes by the million, which names would slow down.
    assert long == {"nn.Sequential", "Operation", "_ROW.pack"}
