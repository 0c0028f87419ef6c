"""Finishes the compiled wheel: run paths that move with the environment, and the build record inside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from hvdkit.common import json_files
from hvdkit.errors import InstallError
from hvdkit.prepare.install.facts import PythonFacts
from hvdkit.prepare.install.pins import HOROVOD_VERSION
from hvdkit.prepare.install.plan import BuildPlan, run_path
from hvdkit.prepare.install.record import FILE_NAME

Tool = Callable[[list[str]], list[str]]
"""Runs a build tool with arguments and returns the lines it wrote."""


def finish(wheel: Path, plan: BuildPlan, python: PythonFacts, work: Path, tool: Tool) -> Path:
    """Make a wheel relocatable and put the build record into it.

    Args:
        wheel: as setup.py made it.
        plan: gives the run paths and the record.
        python: the environment it was built in.
        work: the build's directory; run paths below it are dropped.
        tool: runs ``patchelf`` and ``wheel``.
    Returns:
        The finished wheel, below ``work``.
    Raises:
        InstallError: the library of a framework is not in the wheel.
    """
    tool(["wheel", "unpack", "--dest", str(work / "unpacked"), str(wheel)])
    tree = work / "unpacked" / f"horovod-{HOROVOD_VERSION}"
    for package, extra in plan.run_paths.items():
        libraries = list((tree / "horovod" / package).glob("*.so"))
        if not libraries:
            raise InstallError(f"The build made no library for {package}, although it was asked for and succeeded.")
        for library in libraries:
            lines = tool(["patchelf", "--print-rpath", str(library)])
            entries = [entry for entry in "".join(lines).strip().split(os.pathsep) if entry]
            moved = relocated(entries, package, python, work, extra)
            tool(["patchelf", "--set-rpath", os.pathsep.join(moved), str(library)])
    (tree / "horovod" / FILE_NAME).write_text(json_files.encode(plan.record), encoding="utf-8")
    finished = work / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    tool(["wheel", "pack", "--dest-dir", str(finished), str(tree)])
    return next(finished.glob("*.whl"))


def relocated(
    entries: Iterable[str], package: str, python: PythonFacts, work: Path, extra: Iterable[str] = ()
) -> list[str]:
    """Run paths that work wherever the environment lies.

    Args:
        entries: as the linker wrote them.
        package: "torch" or "tensorflow", whose library they belong to.
        python: the environment it was built in; entries inside it become relative to the library.
        work: the build's directory; entries inside it are dropped.
        extra: further entries, kept as they are.
    """
    moved: list[str] = []
    for entry in entries:
        path = Path(entry)
        if path.is_relative_to(work) or path.resolve().is_relative_to(work.resolve()):
            continue
        moved.append(entry if entry.startswith("$ORIGIN") else run_path(_as_named(path, python), package, python))
    moved += [entry for entry in extra if entry not in moved]
    return list(dict.fromkeys(moved))


def _as_named(path: Path, python: PythonFacts) -> Path:
    """A path inside the environment, by the environment's own name where the linker took it through a link."""
    if path.is_relative_to(python.prefix):
        return path
    real, prefix = path.resolve(), python.prefix.resolve()
    return python.prefix / real.relative_to(prefix) if real.is_relative_to(prefix) else path
