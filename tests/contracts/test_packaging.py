"""packaging/: the recipes ask for what setup.cfg and pyproject.toml ask for, under the version of the package."""

import ast
import configparser
import re
import tomllib
from pathlib import Path

import yaml

import hvdkit

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
RUN = SETUP["options"]["install_requires"].split()
PYTHON = SETUP["options"]["python_requires"]
(BUILD,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
CONDA = yaml.safe_load((ROOT / "packaging/conda-forge/recipe.yaml").read_text())
SPACK = ast.parse((ROOT / "packaging/spack/spack_repo/hvdkit/packages/py_hvdkit/package.py").read_text())


def in_spack(function: str) -> list[tuple[str, dict[str, object]]]:
    """The first argument and the keywords of each call of a directive."""
    calls = [one for one in ast.walk(SPACK) if isinstance(one, ast.Call) and getattr(one.func, "id", "") == function]
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
