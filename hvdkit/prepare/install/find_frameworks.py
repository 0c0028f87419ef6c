"""Finds the installed frameworks without importing them: their own version files say what they are."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from hvdkit.common.files import text_if_there
from hvdkit.prepare.install.facts import FrameworkFacts

TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws", "intel-tensorflow",
    "tf-nightly", "tf-nightly-cpu",
)  # fmt: skip


def find_frameworks() -> tuple[FrameworkFacts, ...]:
    """PyTorch and TensorFlow as this interpreter would import them, those that are there."""
    return tuple(found for found in (find_torch(), find_tensorflow()) if found is not None)


def find_torch() -> FrameworkFacts | None:
    """PyTorch, read from its ``version.py``; None when it is not installed."""
    location = package_directory("torch")
    if location is None:
        return None
    facts = literals(location / "version.py")
    package = distribution("torch")
    return FrameworkFacts(
        name="torch",
        version=str(facts.get("__version__") or (package.version if package else "")),
        location=location,
        build=f"{facts.get('git_version', '')} cxx11abi={_torch_cxx11_abi(location)}",
        cuda=facts.get("cuda"),
        rocm=facts.get("hip"),
    )


def find_tensorflow() -> FrameworkFacts | None:
    """TensorFlow, read from its distribution and ``build_info.py``; None when it is not installed."""
    location = package_directory("tensorflow")
    if location is None:
        return None
    package = _tensorflow_distribution(location)
    info = _build_info(location / "python" / "platform" / "build_info.py")
    return FrameworkFacts(
        name="tensorflow",
        version=package.version if package else "",
        location=location,
        build=package.metadata["Name"] if package else "",
        cuda=str(info.get("cuda_version", "")) if info.get("is_cuda_build") else None,
        rocm=str(info.get("rocm_version", "")) if info.get("is_rocm_build") else None,
    )


def package_directory(name: str) -> Path | None:
    """Directory of an importable top-level package, None when there is none; nothing is imported."""
    spec = importlib.util.find_spec(name)
    # A namespace package has no origin: a directory that happens to be called `torch` is no PyTorch.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def distribution(name: str) -> importlib.metadata.Distribution | None:
    """What pip knows of an installed package, None when it is not installed."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def literals(file: Path) -> dict[str, Any]:
    """The top-level ``name = literal`` assignments of a Python file; {} when it cannot be read."""
    try:
        tree = ast.parse(text_if_there(file))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                found[name] = value
    return found


def _build_info(file: Path) -> dict[str, Any]:
    """TensorFlow's build facts, written as an OrderedDict of pairs in a Python file."""
    pairs = re.search(r"OrderedDict\((\[.*?\])\)\s*$", text_if_there(file), re.DOTALL)
    try:
        return dict(ast.literal_eval(pairs.group(1))) if pairs else {}
    except (SyntaxError, ValueError):
        return {}


def _torch_cxx11_abi(location: Path) -> str:
    text = text_if_there(location / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    flag = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", text)
    return flag.group(1) if flag else "default" if text else "unknown"


def _tensorflow_distribution(location: Path) -> importlib.metadata.Distribution | None:
    candidates = [found for name in TENSORFLOW_DISTRIBUTIONS if (found := distribution(name)) is not None]
    beside = [found for found in candidates if Path(str(found.locate_file(""))) == location.parent]
    return next(iter(beside or candidates), None)
