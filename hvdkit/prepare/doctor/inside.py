"""Runs in a child process: imports one thing after the other and writes down what happened.

``python -P inside.py FD SECONDS DISTRIBUTIONS STAGE...`` writes one JSON object per line to the file descriptor FD:
``{"begin": stage}``, then ``{"stage": stage, "value": ...}`` or ``{"stage": stage, "failure": ...}``. When an import
kills the process, the last ``begin`` without an end says which one it was. Standard output and stderr belong to what
is imported.

The file is started by its path and uses the standard library alone, so that it sees the environment as a training
script does, and works where hvdkit's own dependencies do not.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

EXTENSION_FILES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
"""Framework -> stem of its extension's file below ``horovod/<framework>/`` (horovod/common/util.py, 0.28)."""

DISTRIBUTIONS: dict[str, list[str]] = {}
"""Import name -> names under which its package is distributed; the caller gives them."""

_FEATURES = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl"}
MAX_DETAIL = 2000
_MPI_MAX_LIBRARY_VERSION_STRING = 8192  # MPICH's; Open MPI's is 256
_MPI_BINDINGS = re.compile(r"cxx|mpifh|usempi|fort|java")  # libraries for other languages, on top of the C library


def inventory() -> dict[str, Any]:
    """What is there, without an import: packages with their metadata, and Horovod's extensions."""
    packages = {name: _find(name) for name in DISTRIBUTIONS}
    extensions: dict[str, str | None] = {}
    if horovod := packages["horovod"]["location"]:
        for framework, stem in EXTENSION_FILES.items():
            file = Path(horovod, framework, stem + sysconfig.get_config_var("EXT_SUFFIX"))
            extensions[framework] = str(file) if file.is_file() else None
    return {
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "packages": packages,
        "extensions": extensions,
    }


def _find(name: str) -> dict[str, Any]:
    spec = importlib.util.find_spec(name)
    directories = list(spec.submodule_search_locations or []) if spec else []
    distribution, version = _distribution(name) if spec else (None, None)
    return {
        "present": spec is not None,
        "location": directories[0] if directories else spec and spec.origin,
        "distribution": distribution,
        "distribution_version": version,
    }


def _distribution(name: str) -> tuple[str | None, str | None]:
    for distribution in DISTRIBUTIONS[name]:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, None


def imported(name: str) -> dict[str, Any]:
    """Import a package; its version.

    Raises:
        ImportError: what was imported has no version, so it cannot be the package.
    """
    module = importlib.import_module(name)
    version = getattr(module, "__version__", None)
    if version is None:
        place = getattr(module, "__file__", None) or "a directory without __init__.py"
        raise ImportError(f"what is imported as {name} ({place}) has no __version__, so it is not the package")
    return {"version": str(version)}


def torch_devices() -> dict[str, Any]:
    """PyTorch's GPU build and the names of the devices it sees."""
    torch = importlib.import_module("torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    build = f"ROCm {torch.version.hip}" if getattr(torch.version, "hip", None) else build
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"build": build, "gpus": [torch.cuda.get_device_name(index) for index in range(count)]}


def tensorflow_devices() -> dict[str, Any]:
    """TensorFlow's GPU build and the names of the devices it sees."""
    tensorflow = importlib.import_module("tensorflow")
    information = tensorflow.sysconfig.get_build_info()
    build = f"CUDA {information.get('cuda_version', '')}".strip() if information.get("is_cuda_build") else None
    build = "ROCm" if information.get("is_rocm_build") else build
    gpus = tensorflow.config.list_physical_devices("GPU")
    names = [tensorflow.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
    return {"build": build, "gpus": names}


def tensorflow_keras() -> dict[str, Any]:
    """The Keras behind ``tf.keras``, which follows TF_USE_LEGACY_KERAS."""
    return {"version": str(importlib.import_module("tensorflow").keras.__version__)}


def extension(framework: str) -> dict[str, Any]:
    """Load Horovod's extension for a framework; what it was built with and the MPI library it brought along."""
    horovod = importlib.import_module(f"horovod.{framework}")
    built = [name for name, function in _FEATURES.items() if getattr(horovod, f"{function}_built")()]
    return {"built": built, "mpi": _loaded_mpi()}


def mpi4py() -> dict[str, Any]:
    """Load mpi4py and its MPI library, without MPI_Init."""
    module = importlib.import_module("mpi4py")
    module.rc.initialize = False
    importlib.import_module("mpi4py.MPI")
    return {**imported("mpi4py"), "mpi": _loaded_mpi()}


def _loaded_mpi() -> dict[str, str] | None:
    """Path and version line of the MPI library mapped into this process, None without one.

    Source: MPI 4.1, section 9.1.1, MPI_Get_library_version (may be called before MPI_Init).
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "/libmpi" in line}
    for path in sorted(path for path in paths if not _MPI_BINDINGS.search(path.name)):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "MPI_Get_library_version"):
            text, length = ctypes.create_string_buffer(_MPI_MAX_LIBRARY_VERSION_STRING), ctypes.c_int()
            library.MPI_Get_library_version(text, ctypes.byref(length))
            return {"path": os.path.realpath(path), "text": text.value.decode(errors="replace").strip()}
    return None


STAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "inventory": (inventory, ""),
    "horovod": (partial(imported, "horovod"), ""),
    "mpi4py": (mpi4py, ""),
    "torch": (partial(imported, "torch"), ""),
    "torch.devices": (torch_devices, "torch"),
    "torch.extension": (partial(extension, "torch"), "torch"),
    "tensorflow": (partial(imported, "tensorflow"), ""),
    "tensorflow.devices": (tensorflow_devices, "tensorflow"),
    "tensorflow.keras": (tensorflow_keras, "tensorflow"),
    "tensorflow.extension": (partial(extension, "tensorflow"), "tensorflow"),
    "keras": (partial(imported, "keras"), "tensorflow"),
}
"""By stage what it does, and the stage whose failure leaves nothing to find out, "" for none."""


def described(error: BaseException) -> dict[str, str]:
    """An exception as the fields of a Failure: its most telling line, and the end of its traceback."""
    message = _headline(error)
    if error.__cause__ is not None:
        message += f" (from {_headline(error.__cause__)})"
    detail = "".join(traceback.format_exception(error))[-MAX_DETAIL:]
    return {"how": "raised", "message": message, "detail": detail}


def _headline(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Traceback"):  # TensorFlow quotes a whole traceback in its ImportError
        lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def main(descriptor: int, stages: list[str]) -> None:
    """Run the stages in order; a stage whose prerequisite failed in this process is left out."""
    failed: set[str] = set()

    def write(line: dict[str, Any]) -> None:
        os.write(descriptor, (json.dumps(line) + "\n").encode())

    for stage in stages:
        function, needs = STAGES[stage]
        if needs in failed:
            failed.add(stage)
            continue
        write({"begin": stage})
        try:
            value = function()
        except BaseException as error:
            # Whatever an import throws, sys.exit() included, is what this file is here to find out.
            failed.add(stage)
            write({"stage": stage, "failure": described(error)})
        else:
            write({"stage": stage, "value": value})


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash that is only looked for leaves no core file
    signal.alarm(int(sys.argv[2]))  # ends a hanging import should the doctor itself be killed
    DISTRIBUTIONS.update(json.loads(sys.argv[3]))
    main(int(sys.argv[1]), sys.argv[4:])
    os._exit(0)  # all is written; a library that crashes or hangs on its way out has nothing to add
