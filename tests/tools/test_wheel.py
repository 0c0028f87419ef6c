"""The built wheel, without any extra, in an environment of its own: nothing that it needs was left in the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = ("click", "libcst", "msgspec", "numpy", "pyyaml", "rich", "markdown-it-py", "mdurl", "Pygments")
"""What installing hvdkit brings, and nothing else."""
EVERY_HELP = """
import click
from hvdkit.cli import hvdkit_command, run

def walk(command, words):
    print(" ".join(words))
    assert run([*words, "--help"]) == 0, words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            walk(command.get_command(context, name), [*words, name])

walk(hvdkit_command, [])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from what git tracks: a stray file of the checkout must not help."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "hvdkit", "examples", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, text=True, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory):
    """Runs Python with the wheel and what it needs, and nothing else of this environment."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in NEEDS:
        for file in metadata.files(name) or ():
            first = file.parts[0]
            if first != ".." and not (site / first).exists():
                (site / first).symlink_to(Path(sysconfig.get_path("purelib")) / first)
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")

    def run(*words):
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site), "COLUMNS": "100"}
        return subprocess.run(
            [base, "-S", "-P", *words], env=environ, cwd=site, capture_output=True, text=True, timeout=120
        )

    return run


def test_the_wheel_holds_every_file_of_the_package(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "hvdkit"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    present = {name for name in tracked if (ROOT / name).is_file()}
    assert len(present) > 300
    with zipfile.ZipFile(wheel) as archive:
        assert present - set(archive.namelist()) == set()


def test_the_examples_come_with_it_and_can_be_copied(wheel, alone, tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT / "examples", capture_output=True, text=True, check=True)
    names = {name for name in tracked.stdout.split() if (ROOT / "examples" / name).is_file()}
    assert len(names) > 15
    done = alone("-m", "hvdkit", "examples", "copy", str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    copied = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert copied == names
    again = alone("-m", "hvdkit", "examples", "copy", str(tmp_path / "mine"))
    assert again.returncode == 2 and "exists already" in again.stderr
    assert alone("-m", "hvdkit", "examples", "copy", "/proc/mine").returncode == 2


def test_nothing_else_is_in_reach(alone):
    extras = ["torch", "tensorflow", "keras", "horovod", "mpi4py", "scipy", "matplotlib", "jinja2", "h5py", "sklearn"]
    found = alone("-c", f"from importlib.util import find_spec; print([n for n in {extras} if find_spec(n)])")
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize("words", [("-m", "hvdkit", "--help"), ("-c", "from hvdkit.cli import main; main()")])
def test_the_command_starts(alone, words):
    done = alone(*words)
    assert "install" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_every_help_of_every_command_works(alone):
    done = alone("-c", EVERY_HELP)
    assert done.returncode == 0, done.stderr
    commands = {line for line in done.stdout.splitlines() if line.count(" ") < 2}
    assert {"timeline report", "bench synthetic", "emulate sizes", "mpi-profile show"} <= commands


TOOLS = {
    "doctor": "doctor",
    "test": "test",
    "examples": "examples list",
    "check": "check examples/pytorch/cnn.py",
    "job": "job --system slurm --nodes 2 --ppn 2 --walltime 1:00:00 -- python train.py",
    "launch": "launch -n 2 --launcher horovodrun --dry-run -- echo started",
    "plan steps": "plan steps --samples 60000 --batch-size 64 --lr 0.01 -n 1,2",
    "plan memory": "plan memory --parameters 1e9",
    "timeline summary": "timeline summary {timeline}",
    "timeline report": "timeline report {timeline} -o {out}/page.html",
    "diff": "diff {timeline} {timeline}",
    "mpi-profile": "mpi-profile show {mpi}",
    "bench synthetic": "bench synthetic",
    "emulate sizes": "emulate sizes --sizes 400,800",
    "plan as a picture": "plan steps --samples 60000 --batch-size 64 --lr 0.01 -n 1,2 --plot {out}/plan.png",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_works_or_names_what_it_lacks(alone, tool, tmp_path):
    paths = {
        "timeline": next((ROOT / "tests/data/timelines").glob("*.json")),
        "mpi": ROOT / "tests/data/mpi_profiles/mpi_profile.2500161.0",
        "out": tmp_path,
    }
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in TOOLS[tool].split()]
    done = alone("-m", "hvdkit", *(word.format(**paths) for word in words))
    assert "Traceback" not in done.stderr
    if done.returncode != 0:
        sentence = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.stdout
        lacks = ("pip install", "hvdkit install", "python -m venv")
        assert tool == "doctor" or any(fix in sentence for fix in lacks), (done.returncode, done.stdout, done.stderr)
