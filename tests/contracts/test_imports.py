"""Imports flow down: cli -> tools -> steps -> errors, adapters -> steps -> errors; the top loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit
from hvdkit.cli import COMMANDS

PACKAGE = Path(hvdkit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
WITHOUT_HOROVOD = ("arrays",)  # over mpi4py
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py", "tf_keras"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of an hvdkit module: errors, steps, an adapter with its insides, cli, or the tool's name."""
    first = module.split(".")[1] if "." in module else "top"
    return next((adapter for adapter in ADAPTERS if first == adapter or first.startswith(f"{adapter}_")), first)


def imported(path: Path, *, at_import_time: bool) -> set[str]:
    """Absolute names of what a module imports; only what runs when it is imported, or anywhere in it."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "hvdkit")
        for child in ast.iter_child_nodes(node):
            if not (at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


def hvdkit_rooms(names: set[str]) -> set[str]:
    own = {name for name in names if name.startswith("hvdkit.")}
    return {room_of(name) for name in own if (PACKAGE / name.split(".")[1]).is_dir() or _is_module(name.split(".")[1])}


def _is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_flow_down(path):
    module = name_of(path)
    room = room_of(module)
    rooms = hvdkit_rooms(imported(path, at_import_time=False)) - {room}
    if room == "errors":
        allowed = set()
    elif room in ("steps", "top"):
        allowed = {"errors"} | ({"steps"} if room == "top" else set())
    elif room in ADAPTERS:
        allowed = {"errors", "steps"} | ({"tensorflow"} if room == "keras" else set())
        if module == "hvdkit.tensorflow":
            allowed |= {"keras"}  # distribute(optimizer): the optimizer of a TensorFlow loop is a Keras optimizer
    else:
        allowed = {other for other in map(room_of, map(name_of, MODULES)) if other not in ADAPTERS and other != "cli"}
    assert rooms <= allowed, f"{module} ({room}) imports {rooms - allowed}"


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(name_of(path)) not in ADAPTERS], ids=name_of)
def test_only_adapters_import_a_framework_at_import_time(path):
    roots = {name.split(".")[0] for name in imported(path, at_import_time=True)}
    assert not roots & FRAMEWORKS


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split(".")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("code", ["import hvdkit", "from hvdkit.cli import run; assert run(['--help']) == 0"])
def test_the_top_level_loads_no_framework_and_no_numpy(code):
    assert not loaded_by(code) & (FRAMEWORKS | {"numpy", "scipy", "rich", "matplotlib", "sklearn"})


def test_import_hvdkit_needs_the_standard_library_only():
    assert loaded_by("import hvdkit") - loaded_by("") - set(sys.stdlib_module_names) <= {"hvdkit"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches_and_loads_no_framework(command):
    done = subprocess.run([sys.executable, "-m", "hvdkit.cli", command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"hvdkit {command}" in done.stdout.split("Options:")[0].split("\n", 2)[2], "no example in the help"
    assert not loaded_by(f"import {COMMANDS[command][0].partition(':')[0]}") & FRAMEWORKS


@pytest.mark.parametrize("adapter", [adapter for adapter in ADAPTERS if _is_module(adapter)])
@pytest.mark.parametrize("missing", ["framework", "horovod"])
def test_an_adapter_without_its_framework_names_the_command_that_helps(adapter, missing):
    if missing == "horovod" and adapter in WITHOUT_HOROVOD:
        pytest.skip(f"hvdkit.{adapter} needs no Horovod")
    framework = "mpi4py" if adapter in WITHOUT_HOROVOD else adapter
    hidden = framework if missing == "framework" else "horovod"
    code = (
        f"import sys\nsys.modules[{hidden!r}] = None\nimport hvdkit\n"
        f"try:\n    import hvdkit.{adapter}\nexcept hvdkit.MissingFrameworkError as error:\n"
        "    assert isinstance(error, ImportError)\n    print('MESSAGE', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (message,) = [line for line in done.stdout.splitlines() if line.startswith("MESSAGE")]
    assert ("pip install" if missing == "framework" else "hvdkit install") in message


HIDE_EXTRAS = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
from hvdkit import cli
for words in sys.argv[2:]:
    status = cli.run(words.split())
    if status:
        sys.exit(f"hvdkit {words}: {status}")
"""
EXTRAS = "scipy,matplotlib,jinja2,h5py,perfetto,sklearn,mpi4py,torch,tensorflow,keras,horovod"


def test_help_and_plain_arithmetic_need_no_extra():
    """A new user reads what a command does before installing what it needs."""
    commands = [f"{name} --help" for name in COMMANDS]
    sums = ["plan --samples 100 --batch-size 3 --lr 1 -n 2", "memory --parameters 1e9", "bench scaling --help"]
    argv = [sys.executable, "-c", HIDE_EXTRAS, EXTRAS, *commands, *sums, "emulate sizes --sizes 400,800"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
