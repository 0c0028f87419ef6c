"""What there is to launch with: cores, Horovod, MPI, launchers; no more is asked of the machine than a job needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdkit.common import programs
from hvdkit.common.files import exists
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import horovodrun, hosts, lines, options, plan, stage, tuned
from hvdkit.jobs.launch.model import Command, Horovod, LaunchFacts, LaunchPlan, Mpi
from hvdkit.jobs.launch.options import Request
from hvdkit.jobs.launch.recordings import recorder
from hvdkit.prepare.doctor.host import cpu_quota
from hvdkit.prepare.install.record import horovod_directory, mpi_bin, read_record
from hvdkit.steps import launchers, meeting

CGROUPS = Path("/sys/fs/cgroup")
_SUPPORTED = ("Open MPI", "Intel MPI", "MPICH")
_SYSTEMS = {"Slurm": "srun", "PBS": "mpiexec", "LSF": "jsrun", "Cobalt": "aprun"}
_PYTHON = re.compile(r"python[0-9.]*$")
_FILES, _FILES_OF_A_RANK = 20, 8
"""Open MPI's mpirun starts 2 ranks with 32 open files, not with 28."""
CPUS = Path("/sys/devices/system/cpu")
# The first framework whose part of Horovod loads answers for all: they share one build of the controllers.
_PROBE = """
import importlib
reasons = []
for framework in ("torch", "tensorflow"):
    try:
        module = importlib.import_module("horovod." + framework)
        print(f"\\nhvdkit: built {bool(module.mpi_built())} {bool(module.gloo_built())}")
        break
    except Exception as error:
        reasons.append(f"horovod.{framework}: {error}".splitlines()[0])
else:
    raise SystemExit("\\nhvdkit: failed " + "; ".join(reasons))
"""
_ANSWER = re.compile(r"^hvdkit: (?:built (\w+) (\w+)|failed (.*))$", re.MULTILINE)


def own_python() -> Path:
    """Absolute path of the interpreter that runs hvdkit.

    Links are not followed: a virtual environment's interpreter is a link to one that knows nothing of it.
    """
    return Path(sys.executable).absolute()


def has_mpi4py() -> bool:
    """Whether mpi4py is installed beside hvdkit."""
    return importlib.util.find_spec("mpi4py") is not None


def job_path(environ: Mapping[str, str], python: Path) -> str:
    """PATH for the job: the directory of the interpreter comes first if ``python`` were another one otherwise."""
    path = environ.get("PATH", os.defpath)
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    if found is not None and Path(found).absolute().parent == python.parent:
        return path
    own = str(python.parent)
    return os.pathsep.join([own, *(directory for directory in path.split(os.pathsep) if directory not in ("", own))])


def gather(request: Request, environ: Mapping[str, str]) -> LaunchFacts:
    """The facts that ``plan.build`` needs for this request.

    Raises:
        LaunchError: Horovod or mpirun is there and does not work.
        InstallError: Horovod's build record cannot be read.
    """
    python = own_python()
    path = job_path(environ, python)
    programs, chosen = {}, None
    here_alone = not request.hosts and (request.hosts_chosen or launchers.hosts_of_job(environ))
    if request.launcher in lines.BATCH:
        if (program := find_batch_launcher(request.launcher, path, environ)) is not None:
            programs = {request.launcher: program}
    elif request.launcher == "auto" and not here_alone and (called := called_for(path, environ)) is not None:
        name, why, program = called
        programs, chosen = {name: program}, (name, why)
    open_choice = request.launcher == "auto" and chosen is None
    horovod = installed_horovod(python) if open_choice else recorded_horovod()
    wants_mpi = request.launcher == "mpirun" or (open_choice and (horovod is None or horovod.mpi))
    own = None if horovod is None else horovod.mpi_bin  # where that is not known, the first mpirun on PATH is taken
    mpirun = None
    if wants_mpi:
        where = path if own is None else str(own)
        found = shutil.which("mpirun", path=where) or shutil.which("mpiexec", path=where)
        mpirun = None if found is None else Path(found).absolute()
    if mpirun is not None and str(mpirun.parent) not in path.split(os.pathsep):
        path = os.pathsep.join([path, str(mpirun.parent)])  # Intel's mpirun looks for its parts there
    horovodrun = shutil.which("horovodrun", path=path)
    records = request.mpi_profile is not None and request.launcher != "horovodrun"
    without_mpi = request.launcher == "auto" and horovod is not None and not horovod.mpi
    mpi_bin = own if mpirun is None else mpirun.parent
    return LaunchFacts(
        cores=usable_cores(),
        root=os.geteuid() == 0,
        python=python,
        path=path,
        horovod=horovod,
        mpi=None if mpirun is None else identify(mpirun, {**environ, "PATH": path}),
        horovodrun=None if horovodrun is None else Path(horovodrun).absolute(),
        mpi4py=has_mpi4py(),
        programs=programs,
        batch=chosen,
        mpi_recorder=recorder(mpi_bin, environ, dry=request.dry_run) if records and not without_mpi else None,
        master_port=None if request.elastic else free_port(1 + (request.n if request.tf_config else 0)),
    )


def settle(command: tuple[str, ...], environ: Mapping[str, str], **typed: Any) -> Request:
    """What is typed as one request, with what it names read: hosts, a tuned file, the environment to stage.

    Args:
        command: what each rank runs.
        environ: the environment, which may name hosts.
        typed: values by the names of ``options.OPTIONS``; what is left out is as if it were not typed.
    Raises:
        InvalidArgumentError: an option needs or excludes another; a file cannot be used, or hosts do not fit.
        LauncherError: the batch job's list of hosts cannot be read.
    """
    options.check(typed)
    settled = {name: typed.get(name) for name in ("hosts", "tuned", "explain_job", "stage")}
    if not (typed.get("n") or typed.get("ppn")):
        raise InvalidArgumentError(
            "The number of processes is missing; give -n N, or --ppn P (also --nproc-per-node P) for P on each host."
        )
    typed["n"] = typed.get("n") or 0  # a launch by --ppn alone: as many as its hosts take
    if typed.get("module") and command:
        command = ("python", "-m", *command)
    request = Request(command=command, **{name: value for name, value in typed.items() if name not in settled})
    for_speed, source, left = (tuned.Tuned(), "", ()) if settled["tuned"] is None else tuned.read(settled["tuned"])
    left = tuple(sorted({*left} - {*request.variables}))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    request = replace(
        request,
        tuned=for_speed,
        tuned_by=source,
        notes=tuple(f"--tuned leaves out {name}, which its best row has on; give --env {name}=1." for name in left),
        explain_job=(request.explain_dir or Path(f"hvdkit-job-{stamp}").absolute()) if settled["explain_job"] else None,
        stall_dir=request.stall_dir or Path(f"hvdkit-stall-{stamp}").absolute(),
        stage=stage.wanted(request.stage_dir) if settled["stage"] else None,
    )
    given = None if settled["hosts"] is None else hosts.parse(settled["hosts"])
    if request.hostfile is not None:
        given = hosts.read(request.hostfile)
    if request.host_discovery_script or request.min_np or request.max_np:
        if not request.n:
            raise InvalidArgumentError("An elastic job needs -n, the number of ranks that it starts with.")
        if request.tf_config:
            raise InvalidArgumentError("--tf-config names every rank, and in an elastic job they change; leave it out.")
        own = {**environ, "PATH": job_path(environ, own_python())}
        return horovodrun.elastic(replace(request, hosts_chosen=given is not None), own)
    return hosts.placed(request, given, environ, anywhere=request.launcher in lines.BATCH)


def planned(request: Request, environ: Mapping[str, str]) -> tuple[LaunchFacts, LaunchPlan]:
    """What there is for a request, and the plan of its job.

    Raises:
        InvalidArgumentError, LaunchError, InstallError: see ``gather``, ``resolve`` and ``plan.build``.
    """
    python = own_python()
    environ = launchers.without_place(environ)  # an outer job's rank would win over that of the launcher
    command = resolve(request.command, request.variables.get("PATH", job_path(environ, python)), python)
    found = gather(request, environ)
    return found, plan.build(request, found, command, environ)


def identify(mpirun: Path, environment: Mapping[str, str]) -> Mpi:
    """Whose mpirun it is, by what it prints for ``--version``.

    Raises:
        LaunchError: neither Open MPI's nor Hydra, or it cannot be run.
    """
    answer = programs.version(mpirun, environment)
    implementation, version = programs.identify_mpi(answer.text)
    numbers = re.match(r"\d+(\.\d+)*", version)
    if not answer.ok:
        raise LaunchError(f"{mpirun} does not work here: {answer.problem}; mend that, or use --launcher horovodrun.")
    if implementation not in _SUPPORTED or numbers is None:
        raise LaunchError(
            f"{mpirun} is neither Open MPI's nor MPICH's or Intel MPI's (Hydra): its --version says "
            f"{answer.first_line!r}; put the directory of one of these first on PATH, or use --launcher horovodrun."
        )
    return Mpi(mpirun, implementation, tuple(map(int, numbers[0].split("."))))


def called_for(search_path: str, environ: Mapping[str, str]) -> tuple[str, str, Path] | None:
    """The launcher that the batch job around this process calls for, why, and its path; None where there is none.

    Args:
        search_path: directories, as in PATH.
        environ: the environment of this process.
    """
    for system, name in _SYSTEMS.items():
        variable = launchers.BATCH_JOBS[system]
        if environ.get(variable) and (program := find_batch_launcher(name, search_path, environ)) is not None:
            which = "PALS's mpiexec" if name == "mpiexec" else name
            return name, f"this is {system} job {environ[variable]} ({variable}), and {which} is installed", program
    return None


def find_batch_launcher(name: str, search_path: str, environ: Mapping[str, str]) -> Path | None:
    """A launcher of ``lines.BATCH`` on a search path; an mpiexec only where its directory or what it says is PALS's."""
    found = shutil.which(name, path=search_path)
    if found is None:
        return None
    program = Path(found).absolute()
    of_pals = "pals" in program.resolve().parts or "/pals/" in found
    if name == "mpiexec" and not of_pals and "PALS" not in programs.version(program, environ).text:
        return None
    return program


def installed_horovod(python: Path) -> Horovod | None:
    """What Horovod was built with: from the record of ``hvdkit install``, else by loading it in another process.

    Args:
        python: the interpreter to load it in.
    Returns:
        None when it is not installed.
    Raises:
        LaunchError: it is installed and cannot be loaded.
        InstallError: its build record cannot be read.
    """
    if horovod_directory() is None:
        return None
    if (recorded := recorded_horovod()) is not None:
        return recorded
    answer = programs.ask([str(python), "-P", "-c", _PROBE])
    match = _ANSWER.search(answer.text)
    if match is None or match[3] is not None:
        reason = answer.problem if match is None else match[3]
        raise LaunchError(
            f"Horovod is installed but cannot be loaded ({reason}); run 'hvdkit doctor', or name a launcher for a "
            "command that does not use Horovod: --launcher mpirun."
        )
    return Horovod(match[1] == "True", match[2] == "True")


def recorded_horovod() -> Horovod | None:
    """The same from the record alone; None without one.

    Raises:
        InstallError: the build record cannot be read.
    """
    record = read_record()
    return None if record is None else Horovod(record.mpi is not None, record.gloo, mpi_bin(record))


def why_no_rank_starts(n: int) -> str:
    """What keeps any launcher from starting ``n`` ranks here, for the middle of a sentence; "" for nothing."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _FILES + _FILES_OF_A_RANK * n:
        return f": this process may have {files} files open, too few for {n} ranks (raise it: ulimit -n)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return ""
    except OSError as error:
        return f": this machine has no loopback interface ({error.strerror}; 'ip link set lo up')"


def usable_cores() -> int:
    """Cores that this process may use, at least 1: physical cores in its affinity, at most its container's share."""
    cores = physical_cores(os.sched_getaffinity(0), CPUS)
    quota = cpu_quota(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    return cores if quota is None else max(1, min(cores, int(quota)))


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports on which nothing listens here, and that the system gives to no outgoing connection.

    Raises:
        LaunchError: a hundred of them are taken.
    """
    for first in random.sample(meeting.PORTS[: len(meeting.PORTS) - count + 1], 100):
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
            return first
    raise LaunchError(f"the ports {meeting.PORTS[0]} to {meeting.PORTS[-1]} of this machine are taken.")


def physical_cores(cpus: set[int], directory: Path) -> int:
    """Number of physical cores behind the logical ``cpus``; hyperthreads of one core count once.

    Args:
        directory: the kernel's description of the CPUs, as in /sys/devices/system/cpu.
    """
    cores = set()
    for cpu in cpus:
        try:
            cores.add((directory / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii"))
        except OSError:  # a virtual machine that does not tell: a core of its own
            cores.add(str(cpu))
    return len(cores)


# What each rank runs


def resolve(words: Sequence[str], search_path: str, python: Path) -> Command:
    """Find the program and, for Python, the script.

    Args:
        words: as typed; a first word that ends in ``.py`` is a script for ``python``.
        search_path: directories to look for the program in, as in PATH.
        python: the interpreter to use where none is named, or where ``python`` is not on the path.
    Raises:
        InvalidArgumentError: no command, or the program or the script does not exist.
    """
    if not words:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit launch -n 2 python train.py")
    is_script = words[0].endswith(".py")
    if is_script:
        words = (str(python), *words)
    is_python = is_script or _PYTHON.match(Path(words[0]).name) is not None
    program = str(python) if is_script else shutil.which(words[0], path=search_path)
    if program is None and is_python and "/" not in words[0]:
        program = str(python)
    if program is None:
        raise InvalidArgumentError(_why_not_runnable(words[0]))
    script = _script_index(words) if is_python else None
    if script is not None and not exists(Path(words[script])):
        where = "" if Path(words[script]).is_absolute() else f" in {Path.cwd()}"
        raise InvalidArgumentError(
            f"Script {words[script]!r} does not exist{where}; give the path of an existing file."
        )
    return Command((str(Path(program).absolute()), *words[1:]), script)


def _why_not_runnable(word: str) -> str:
    if "/" not in word:
        return f"Command {word!r} was not found on PATH; give an installed program or the path of one."
    what = "is not an executable file" if exists(Path(word)) else "does not exist"
    return f"Command {word!r} {what}; give the path of a program, or of a script that ends in .py."


def _script_index(words: Sequence[str]) -> int | None:
    """Index of the script in a Python command line; None for ``-c``, ``-m`` and standard input."""
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--check-hash-based-pycs":
            index += 1
        elif not word.startswith("-"):
            return index
        elif word == "-":
            return None
        elif not word.startswith("--"):
            for position, letter in enumerate(word[1:], start=1):
                if letter in "cm":
                    return None
                if letter in ("W", "X"):  # which have a value
                    index += position == len(word) - 1
                    break
        index += 1
    return None
