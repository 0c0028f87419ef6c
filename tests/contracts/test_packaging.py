"""packaging/: the recipes ask for what the package asks for, and patch Horovod as `hvdkit install` does."""

import ast
import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import hvdkit
from hvdkit.prepare.install import adjust, build
from hvdkit.prepare.install.facts import HOROVOD_SHA256, HOROVOD_VERSION, Options
from hvdkit.prepare.install.here import cache_directory

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
RUN = SETUP["options"]["install_requires"].split()
PYTHON = SETUP["options"]["python_requires"]
(BUILD,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
CONDA, CONDA_HOROVOD = (
    yaml.safe_load((ROOT / f"packaging/conda-forge/{name}/recipe.yaml").read_text()) for name in ("hvdkit", "horovod")
)
SPACK, SPACK_HOROVOD = (
    ast.parse((ROOT / f"packaging/spack/spack_repo/hvdkit/packages/{name}/package.py").read_text())
    for name in ("py_hvdkit", "py_horovod")
)
IN_SPACK = {
    "built for PyTorch": "frameworks=pytorch",
    "built for TensorFlow": "frameworks=tensorflow",
    "--gpu none": "~cuda",
    "--gpu nccl or mpi": "+cuda",
}
"""When a patch applies: by its head, and as Spack says it."""
RELEASED = cache_directory() / "sources" / build.SOURCE


def in_spack(function: str, recipe: ast.Module = SPACK) -> list[tuple[str, dict[str, object]]]:
    """The first argument and the keywords of each call of a directive."""
    calls = [one for one in ast.walk(recipe) if isinstance(one, ast.Call) and getattr(one.func, "id", "") == function]
    return [
        (ast.literal_eval(one.args[0]), {word.arg: ast.literal_eval(word.value) for word in one.keywords})
        for one in calls
    ]


def as_spack(requirement: str) -> str:
    """``click>=8.1`` as Spack says it; the end of a range, which is not in it, becomes the version before."""
    name, least, end = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<(\d+))?", requirement).groups()
    least = least.removesuffix(".0")
    return f"{name if name == 'python' else f'py-{name}'}@{least}:{int(end) - 1 if end else ''}"


def test_conda_asks_for_the_same() -> None:
    assert CONDA["context"] == {"version": hvdkit.__version__, "python_min": PYTHON.removeprefix(">=")}
    required = CONDA["requirements"]
    assert [one.replace(" ", "") for one in required["run"]] == ["__linux", "python>=${{python_min}}", *RUN]
    assert [one.replace(" ", "") for one in required["host"]] == ["python${{python_min}}.*", "pip", BUILD]
    about = {name: SETUP["metadata"][key] for name, key in (("summary", "description"), ("license", "license"))}
    assert CONDA["about"] == {**about, "license_file": SETUP["metadata"]["license_files"]}


def test_spack_asks_for_the_same() -> None:
    assert in_spack("version") == [(hvdkit.__version__, {})]
    assert f'"hvdkit/hvdkit-{hvdkit.__version__}.tar.gz"' in ast.unparse(SPACK).replace("'", '"')
    asked = in_spack("depends_on")
    always = [(name, words["type"]) for name, words in asked if "when" not in words]
    built = [(as_spack(BUILD), "build")]
    assert always == [
        (as_spack(f"python{PYTHON}"), ("build", "run")),
        *built,
        *((as_spack(one), ("build", "run")) for one in RUN),
    ]
    (mpi4py,) = (one for one in SETUP["options.extras_require"]["mpi"].split() if one.startswith("mpi4py"))
    assert [name for name, words in asked if words.get("when") == "+mpi"] == [as_spack(mpi4py), "mpi"]


def test_conda_patches_horovod_as_hvdkit_install_does() -> None:
    source = CONDA_HOROVOD["source"]
    assert (CONDA_HOROVOD["context"]["version"], source["sha256"]) == (HOROVOD_VERSION, HOROVOD_SHA256)
    applying = [one.name for one in adjust.applying(Options(frameworks=("torch", "tensorflow")))]
    listed = [ROOT / "packaging/conda-forge/horovod" / path for path in source["patches"]]
    assert [path.stem.partition("-")[2] for path in listed] == applying
    assert {path.resolve().parent for path in listed} == {adjust.PATCHES.resolve()}


def test_spack_patches_horovod_as_hvdkit_install_does() -> None:
    assert in_spack("version", SPACK_HOROVOD) == [(HOROVOD_VERSION, {"sha256": HOROVOD_SHA256})]
    (loop,) = (one for one in ast.walk(SPACK_HOROVOD) if isinstance(one, ast.For) and "name" in ast.unparse(one.target))
    assert [(name.partition("-")[2], when) for name, when in ast.literal_eval(loop.iter)] == [
        (one.name, " ".join(IN_SPACK[words] for words in one.when.split(", ") if words in IN_SPACK))
        for one in adjust.patches()
    ]
    (argument,) = (one.args[0] for one in ast.walk(loop) if isinstance(one, ast.Call))
    path = ast.unparse(argument).strip("f'").replace("{name}.patch", "")
    recipe = ROOT / "packaging/spack/spack_repo/hvdkit/packages/py_horovod"
    assert (recipe / path).resolve() == adjust.PATCHES.resolve()


@pytest.mark.skipif(not build.is_released(RELEASED), reason="the cache has no source of Horovod: hvdkit install")
@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch(1)")
def test_patch_of_every_distribution_gives_the_same_source(tmp_path: Path) -> None:
    """In the order of the recipe, without fuzz."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours, theirs = (build.unpack(RELEASED, tmp_path / name) for name in ("ours", "theirs"))
    adjust.apply(ours, adjust.applying(Options(frameworks=("torch", "tensorflow"))))
    for path in CONDA_HOROVOD["source"]["patches"]:
        patch = ROOT / "packaging/conda-forge/horovod" / path
        subprocess.run(["patch", "-p1", "-F0", "-s", "--no-backup-if-mismatch", "-i", patch], cwd=theirs, check=True)
    files = {hunk.file for one in adjust.patches() for hunk in one.hunks}
    assert len(files) > 20
    for file in files:
        assert (ours / file).read_text() == (theirs / file).read_text(), file
