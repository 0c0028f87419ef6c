"""The launchers of batch systems: which are installed, which one a batch job calls for, and what each is told.

Each function of ``LINES`` makes a command line up to the user's command, and raises InvalidArgumentError for what its
launcher cannot do.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdkit.common.programs import version
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.model import LauncherLine, Setting
from hvdkit.jobs.launch.options import Request, words_of
from hvdkit.steps.launchers import BATCH_JOBS

_SYSTEMS = {"Slurm": "srun", "PBS": "mpiexec", "LSF": "jsrun", "Cobalt": "aprun"}
_UNTIED = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
_NODE = re.compile(r"(?:nid)?0*([0-9]+)")


def choice(search_path: str, environ: Mapping[str, str]) -> tuple[str, str, Path] | None:
    """The launcher that the batch job around this process calls for, why, and its path; None where there is none.

    Args:
        search_path: directories, as in PATH.
        environ: the environment of this process.
    """
    for system, name in _SYSTEMS.items():
        variable = BATCH_JOBS[system]
        if environ.get(variable) and (program := find(name, search_path, environ)) is not None:
            which = "PALS's mpiexec" if name == "mpiexec" else name
            return name, f"this is {system} job {environ[variable]} ({variable}), and {which} is installed", program
    return None


def find(name: str, search_path: str, environ: Mapping[str, str]) -> Path | None:
    """A launcher of ``LINES`` on a search path; an mpiexec only where it lies in a directory of PALS, or says so."""
    found = shutil.which(name, path=search_path)
    if found is None:
        return None
    program = Path(found).absolute()
    of_pals = "pals" in program.resolve().parts or "/pals/" in found
    if name == "mpiexec" and not of_pals and "PALS" not in version(program, environ).text:
        return None
    return program


def _pals(request: Request, program: Path) -> LauncherLine:
    """PALS's mpiexec, of HPE Cray systems under PBS, such as Polaris.

    Source: ALCF, "Running Jobs on Polaris": ``mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind depth ...``.
    """
    settings = [
        Setting("one process per rank", ("-n", str(request.n))),
        *_given("mpiexec", "ppn", request.ppn, "--ppn: ranks on each host"),
        *_given("mpiexec", "depth", request.depth if request.bind != "none" or request.cpu_bind is None else None),
        _binding(request, "mpiexec"),
        *_given("mpiexec", "hosts", ",".join(_chosen(request)) or None, "the hosts that you named"),
    ]
    return LauncherLine(program, tuple(settings), "", pass_on=_told("--env", values=True))


def _aprun(request: Request, program: Path) -> LauncherLine:
    """aprun, of Cray XC systems (ALPS), such as Theta.

    Source: aprun(1); ALCF's tutorials: ``aprun -n 8 -N 4 --cc depth -d 16 python ...``.
    """
    nodes = []
    for host in _chosen(request):
        match = _NODE.fullmatch(host)
        if match is None:
            raise InvalidArgumentError(f"host {host!r}: aprun takes node ids, such as 12 or nid00012.")
        nodes.append(match[1])
    settings = [
        Setting("one process per rank", ("-n", str(request.n))),
        *_given("aprun", "ppn", request.ppn, "--ppn: ranks on each host"),
        _binding(request, "aprun"),
        *_given("aprun", "depth", request.depth),
        *_given("aprun", "hosts", ",".join(nodes) or None, "the hosts that you named, by their node ids"),
    ]
    return LauncherLine(program, tuple(settings), "", pass_on=_told("-e", values=True))


def _binding(request: Request, launcher: str) -> Setting:
    """What each rank is tied to, said to PALS or to ALPS, its predecessor."""
    if request.cpu_bind is not None:
        why = f"{request.binding}: the cores of each rank on a host"
        return Setting(why, words_of("cpu_bind", launcher, request.cpu_bind))
    if request.depth is not None:
        why = "each rank is tied to the cores of its --depth, all of them"
        return Setting(why, words_of("cpu_bind", launcher, "depth"))
    return Setting(_UNTIED, words_of("cpu_bind", launcher, "none"))


def _srun(request: Request, program: Path) -> LauncherLine:
    """srun, of Slurm.

    Source: srun(1).
    """
    settings = [Setting("one process per rank", (f"--ntasks={request.n}",))]
    nodes = None
    if request.ppn is not None:
        # A rank reads from SLURM_NTASKS_PER_NODE how many share its host, so that it must not be a mere maximum.
        ppn = min(request.ppn, request.n)
        nodes = -(-request.n // ppn)
        words = (f"--ntasks-per-node={ppn}", f"--nodes={nodes}")
        settings.append(Setting("--ppn: ranks on each host, and so many hosts", words))
    depth = "--depth: cores of each rank; since Slurm 22.05 srun no longer takes it from sbatch"
    settings += [
        *_given("srun", "depth", request.depth, depth),
        *_given("srun", "gpus_per_node", request.gpus_per_node, "--gpus-per-node"),
    ]
    if request.cpu_bind is not None:
        settings += _given("srun", "cpu_bind", request.cpu_bind, f"{request.binding}: the cores of each rank on a host")
    elif request.depth is not None:
        why = "each rank is tied to the cores of its --depth; by itself Slurm ties only ranks that fill their host"
        settings.append(Setting(why, ("--cpu-bind=cores",)))
    else:
        settings.append(Setting(_UNTIED, ("--cpu-bind=none",)))
    settings += [
        *_given("srun", "hosts", ",".join(_chosen(request)[:nodes]) or None, "the hosts that you named"),
        Setting("a rank that fails ends the job; otherwise the others wait for it", ("--kill-on-bad-exit=1",)),
        Setting("one Ctrl-C ends the job; otherwise srun asks for two", ("--quit-on-interrupt",)),
    ]
    exported = Setting("ranks on every host get the variables of this process", ("--export=ALL",))
    return LauncherLine(program, tuple(settings), "SLURM_PROCID", pass_on=lambda _added, _environ: exported)


def _jsrun(request: Request, program: Path) -> LauncherLine:
    """jsrun, of IBM's LSF systems, such as Summit: a resource set of cores and GPUs for each rank.

    Source: OLCF, "Summit User Guide": ``jsrun -n 8 -a 1 -c 16 -g 1 ...``.
    """
    if _chosen(request):
        raise InvalidArgumentError("jsrun takes the hosts of the LSF job; leave --hosts and --hostfile out.")
    gpus = request.gpus_per_node
    if gpus is not None and (request.ppn is None or gpus % request.ppn):
        got = "no --ppn" if request.ppn is None else f"--ppn {request.ppn}"
        raise InvalidArgumentError(
            f"jsrun gives each rank its own GPUs: --gpus-per-node {gpus} must be a multiple of --ppn, got {got}."
        )
    each = None if gpus is None or request.ppn is None else gpus // request.ppn
    settings = [
        Setting("one resource set for each rank", ("-n", str(request.n), "-a", "1")),
        *_given("jsrun", "depth", request.depth),
        *_given("jsrun", "gpus_per_node", each, "--gpus-per-node: GPUs of each rank"),
        *_given("jsrun", "ppn", request.ppn, "--ppn: ranks on each host"),
    ]
    if request.depth is not None:
        tied = "each rank may use all its cores; otherwise jsrun ties it to the first of them"
        settings.append(Setting(tied, ("-b", f"packed:{request.depth}")))
    notes = () if request.depth else ("jsrun gives each rank one core unless told; say how many with --depth.",)
    return LauncherLine(program, tuple(settings), "", pass_on=_told("-E", values=False), notes=notes)


LINES = {"mpiexec": _pals, "aprun": _aprun, "srun": _srun, "jsrun": _jsrun}
"""Launchers that belong to a batch system, each with what makes its command line; mpiexec is that of PALS alone."""


def _given(launcher: str, name: str, value: object, why: str = "--depth: cores of each rank") -> list[Setting]:
    """What a launcher is told of an option where the user gave a value."""
    return [] if value is None else [Setting(why, words_of(name, launcher, value))]


def _chosen(request: Request) -> list[str]:
    """Names of the hosts that the user named."""
    return [host.name for host in request.hosts] if request.hosts_chosen else []


def _told(option: str, *, values: bool) -> Callable[[Mapping[str, str], Mapping[str, str]], Setting]:
    """A ``LauncherLine.pass_on``: an option for each variable, with its value or only its name."""

    def pass_on(added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
        words: list[str] = []
        for name, value in added.items():
            words += [option, f"{name}={value}" if values else name]
        return Setting("variables for the ranks on every host", tuple(words))

    return pass_on
