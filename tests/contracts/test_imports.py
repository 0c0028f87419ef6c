"""Imports flow down: cli, measure, run, prepare and read, common, observe, steps, core, errors; bindings above."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import hvdkit
from hvdkit.cli import COMMANDS, hvdkit_command

PACKAGE = Path(hvdkit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
FLOORS = ("prepare", "jobs", "measure", "read")
WITHOUT_HOROVOD = ("arrays",)  # over mpi4py
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py", "tf_keras"}
BELOW = {
    "errors": set(),
    "core": {"errors"},
    "steps": {"errors", "core"},
    "observe": {"errors", "core", "steps"},
    "top": {"errors", "core", "steps", "jobs"},  # jobs when hvdkit.run is asked for
    "common": {"top", "errors", "core", "steps", "observe"},
    "torch": {"top", "errors", "core", "steps", "observe"},
    "arrays": {"top", "errors", "core", "steps", "observe"},
    "integrations": {"top", "errors", "steps", "torch"},
    "tf_shared": {"errors", "core", "steps"},
    "tensorflow": {"top", "errors", "core", "steps", "observe", "tf_shared"},
    "keras": {"top", "errors", "core", "steps", "observe", "tf_shared", "tensorflow", "torch"},
    "datasets": {"top", "errors", "core", "steps", "observe", "common"},
    "flags": {"top", "errors", "core", "steps", "datasets"},
    "synthetic": {"top", "errors", "core", "steps", "observe", "common", "torch", "tensorflow", "keras"},
    "prepare": {"top", "errors", "core", "steps", "observe", "common"},
    "read": {"top", "errors", "core", "steps", "observe", "common"},
    "jobs": {"top", "errors", "core", "steps", "observe", "common", "prepare", "read"},
    "measure": {"top", "errors", "core", "steps", "observe", "common", "prepare", "read", "jobs", "synthetic"},
    "notebook": {"top", "errors", "steps", "common", "jobs"},
    "cli": {"top", "errors", "common"},
    "__main__": {"cli"},
}
"""What each room may import; nothing upward, no circle."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def room_of(module: str) -> str:
    """The first part of a module's name after ``hvdkit``: a floor, an adapter, steps, errors, cli ..."""
    return module.split(".")[1] if "." in module else "top"


def imported(path: Path, *, at_import_time: bool) -> set[str]:
    """Absolute names of what a module imports; only what runs when it is imported, or anywhere in it."""
    when_imported, anywhere = imports(path)
    return when_imported if at_import_time else anywhere


@functools.cache
def imports(path: Path) -> tuple[set[str], set[str]]:
    """What a module imports when it is imported, and anywhere in it."""
    when_imported: set[str] = set()
    anywhere: set[str] = set()

    def visit(node: ast.AST, at_import_time: bool) -> None:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        anywhere.update(names)
        when_imported.update(names if at_import_time else ())
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # holds no statement, and is most of a tree
                visit(child, at_import_time and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), True)
    return when_imported, anywhere


def hvdkit_modules(names: set[str]) -> set[str]:
    """The modules of hvdkit among imported names: of ``hvdkit.steps.shards.steps_per_epoch`` it is the module."""
    found = set()
    for name in names:
        if name.split(".")[0] == "hvdkit":
            while name not in NAMES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found


def command_of(module: str) -> str:
    """The command's folder of a module on a floor, such as ``prepare.install``."""
    return ".".join(module.split(".")[1:3])


def test_the_package_is_one_look():
    """What is at the top: the house's rooms, and at most six modules."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {
        "core",
        "steps",
        "observe",
        "tf_shared",
        *ADAPTERS,
        "integrations",
        "datasets",
        "synthetic",
        *FLOORS,
        "common",
    }
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    assert {room_of(name) for name in NAMES} == set(BELOW), "every room has a row in BELOW, and every row a room"


def test_imports_flow_down():
    upward = {}
    for path in MODULES:
        room = room_of(name_of(path))
        rooms = {room_of(name) for name in hvdkit_modules(imported(path, at_import_time=False))}
        upward[name_of(path)] = rooms - {room} - BELOW[room]
    assert len(upward) > 200
    assert not {module: rooms for module, rooms in upward.items() if rooms}


@pytest.mark.parametrize("floor", FLOORS)
def test_no_circle_among_the_commands_of_a_floor(floor):
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        module = name_of(path)
        if room_of(module) == floor:
            own = {name for name in hvdkit_modules(imported(path, at_import_time=False)) if room_of(name) == floor}
            edges.setdefault(command_of(module), set()).update(map(command_of, own))
    assert len(edges) > 1, f"nothing was found on {floor}"
    left = {room: others - {room, floor} for room, others in edges.items() if room != floor}
    while free := [room for room, others in left.items() if not others & left.keys()]:
        for room in free:
            del left[room]
    assert not left, f"circle among {sorted(left)}"


BESIDE_FRAMEWORKS = (*ADAPTERS, "tf_shared", "integrations", "synthetic")
TOOLS = [path for path in MODULES if room_of(name_of(path)) not in BESIDE_FRAMEWORKS]


def test_only_adapters_import_a_framework_at_import_time():
    roots = {name_of(path): {name.split(".")[0] for name in imported(path, at_import_time=True)} for path in TOOLS}
    assert {"numpy", "click"} < set().union(*roots.values())
    assert not {module: found & FRAMEWORKS for module, found in roots.items() if found & FRAMEWORKS}


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


def test_check_and_launch_start_without_what_the_doctor_finds_out():
    """They take two of its modules; all of it would be a tenth of their start."""
    code = "import sys, hvdkit.prepare.check.cli, hvdkit.jobs.launch.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    doctors = {name for name in done.stdout.split() if name.startswith("hvdkit.prepare.doctor.")}
    assert doctors == {f"hvdkit.prepare.doctor.{name}" for name in ("finding", "host", "job")}


@pytest.mark.parametrize(
    "code",
    ["import hvdkit", "import hvdkit.prepare.install.here"],
    ids=["what a script imports", "what .ci/gpu-build asks a Python without an environment"],
)
def test_the_standard_library_is_enough(code):
    assert loaded_by(code) - loaded_by("") - set(sys.stdlib_module_names) <= {"hvdkit"}


def test_a_job_on_this_machine_loads_no_server_of_http():
    code = "from hvdkit.jobs.launch import peer; peer.listener([], here=True); import hvdkit.notebook"
    assert "http" not in loaded_by(code)


def test_a_folder_of_that_name_beside_the_script_hides_nothing(tmp_path):
    """A clone, for instance: an editable installation by a finder came after it."""
    (tmp_path / "hvdkit" / "docs").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import hvdkit\nprint(hvdkit.__file__)\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("hvdkit/__init__.py\n"), done.stdout + done.stderr


HELP_OF_EACH = """
import json, os, sys
from hvdkit import cli
for command in cli.COMMANDS:
    sys.stdout.flush()
    if os.fork() == 0:
        status = cli.run([command, "--help"])
        print("\\0", json.dumps([command, status, sorted(sys.modules)]), sep="", end="\\0", flush=True)
        os._exit(0)
    os.wait()
"""
"""The help of every command in a process of its own, forked: only what the command itself imports is there."""


@pytest.fixture(scope="module")
def helps():
    """By command: its help, exit status and the modules that it loads."""
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH], capture_output=True, text=True, check=True)
    parts = done.stdout.split("\0")
    told = map(json.loads, parts[1::2])
    return {
        command: (text, status, modules) for text, (command, status, modules) in zip(parts[::2], told, strict=False)
    }


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches_and_loads_no_framework(helps, command):
    text, status, modules = helps[command]
    assert status == 0, text
    assert f"hvdkit {command}" in text.split("Options:")[0].split("\n", 2)[2], "no example in the help"
    assert COMMANDS[command][0].partition(":")[0] in modules
    assert not {name.split(".")[0] for name in modules} & FRAMEWORKS


WITHOUT = """
import sys
for name in (sys.argv[1], "jax", "matplotlib", "sklearn"):  # those after the first import slowly
    sys.modules[name] = None
import hvdkit
for adapter in sys.argv[2:]:
    try:
        __import__(f"hvdkit.{adapter}")
    except hvdkit.MissingFrameworkError as error:
        assert isinstance(error, ImportError)
        print("MESSAGE", adapter, error)
"""


def messages(hidden: str, *adapters: str) -> dict[str, str]:
    """What adapters say when they are imported where a package is missing; no word of those that say nothing."""
    argv = [sys.executable, "-c", WITHOUT, hidden, *adapters]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("MESSAGE")]
    assert len(lines) == len(dict(lines))
    return dict(lines)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_without_its_framework_names_the_command_that_helps(adapter):
    said = messages("mpi4py" if adapter in WITHOUT_HOROVOD else adapter, adapter)
    assert said.keys() == {adapter} and "pip install" in said[adapter]


@pytest.mark.slow
def test_an_adapter_without_horovod_names_the_command_that_helps():
    """One process for all: it imports TensorFlow once."""
    over_horovod = set(ADAPTERS) - set(WITHOUT_HOROVOD)
    said = messages("horovod", *sorted(over_horovod))
    assert said.keys() == over_horovod
    assert all("hvdkit install" in message for message in said.values())


HIDE_EXTRAS = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
from hvdkit import cli
failed = [words for words in sys.argv[2:] if cli.run(words.split())]
sys.exit(f"failed: {failed}" if failed else 0)
"""
EXTRAS = "scipy,matplotlib,jinja2,h5py,sklearn,mpi4py,torch,tensorflow,keras,horovod"


def command_lines(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command and subcommand of a group, as it is typed after ``hvdkit``."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield " ".join([*words, name])
        if isinstance(command, click.Group):
            yield from command_lines(command, (*words, name))


def test_help_and_plain_arithmetic_need_no_extra():
    """A new user reads what a command does before installing what it needs."""
    commands = [f"{line} --help" for line in command_lines(hvdkit_command)]
    assert {"bench scaling --help", "timeline report --help"} < set(commands)
    sums = [
        "plan steps --samples 100 --batch-size 3 --lr 1 -n 2",
        "plan memory --parameters 1e9",
        "emulate sizes --sizes 400,800",
    ]
    argv = [sys.executable, "-c", HIDE_EXTRAS, EXTRAS, *commands, *sums]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
