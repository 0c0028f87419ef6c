"""An environment to install into, and a Horovod that compiles in no time: only its source and its tools are stand-ins.

Run as a program, it is ``hvdkit install`` with the stand-in's sum in place of the released one's. STANDIN_DIE names a
place where it kills itself, as a machine without power would.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

from hvdkit.prepare.install.facts import RUNTIME_NEEDS

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("platlib"))
OWN = ("horovod", "hvdkit", "__pycache__", "__editable__")

SETUP = """
import os, pathlib, sys, time, zipfile
with open(os.environ["STANDIN_LOG"], "a") as log:
    log.write("compiled\\n")
gate = pathlib.Path(os.environ.get("STANDIN_GATE", "/"))
while not gate.exists():
    print("[ 10%] Building CXX object a/CMakeFiles/b.cc.o", flush=True)  # ends it when nobody reads, as it does Ninja
    time.sleep(0.05)
out = pathlib.Path(sys.argv[sys.argv.index("--dist-dir") + 1])
out.mkdir()
with zipfile.ZipFile(out / "horovod-0.28.1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("horovod/__init__.py", "")
    built = "".join(f"{name}_built = lambda: {value}; " for name, value in dict(mpi=0, gloo=1, nccl=0).items())
    wheel.writestr("horovod/torch/__init__.py", built)
    wheel.writestr("horovod/torch/mpi_lib_v2.so", bytes(range(256)) * 1200)
    info = "horovod-0.28.1.dist-info"
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
"""
BACKEND = """
import os
def prepare_metadata_for_build_wheel(directory, settings=None):
    os.mkdir(f"{directory}/horovod-0.28.1.dist-info")
    with open(f"{directory}/horovod-0.28.1.dist-info/METADATA", "w") as file:
        file.write("Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n")
    return "horovod-0.28.1.dist-info"
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
PACKER = """#!python
import hashlib, base64, pathlib, sys, zipfile
if sys.argv[1] == "unpack":
    zipfile.ZipFile(sys.argv[4]).extractall(pathlib.Path(sys.argv[3], "horovod-0.28.1"))
else:
    tree, lines = pathlib.Path(sys.argv[4]), []
    with zipfile.ZipFile(pathlib.Path(sys.argv[3], "horovod-0.28.1-py3-none-any.whl"), "w") as wheel:
        for file in sorted(path for path in tree.rglob("*") if path.is_file()):
            data, name = file.read_bytes(), str(file.relative_to(tree))
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(data)}\\n")
            wheel.writestr(name, data)
        record = "horovod-0.28.1.dist-info/RECORD"
        wheel.writestr(record, "".join(lines) + f"{record},,\\n")
"""
COMPILER = """#!/bin/sh
case "$1" in --version) echo "c++ (Test) 12.2.0"; echo "Free Software Foundation";; -dumpmachine) echo x86_64;; esac
"""


class Environment:
    """A virtual environment whose packages are links to those of this one, without Horovod and hvdkit."""

    def __init__(self, prefix: Path, cache: Path) -> None:
        self.prefix, self.cache = prefix, cache
        self.started: list[subprocess.Popen[str]] = []
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
        self.site = prefix / SITE.relative_to(sys.prefix)
        self.link(SITE, self.site)

    def link(self, source: Path, target: Path) -> None:
        for entry in source.iterdir():
            link = target / entry.name
            if not entry.name.startswith(OWN) and not link.exists():
                link.symlink_to(entry)

    def start(self, *words: str | Path, **environ: str) -> subprocess.Popen[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        outside = [entry for entry in os.environ["PATH"].split(os.pathsep) if Path(entry) != Path(sys.prefix) / "bin"]
        path = os.pathsep.join([str(self.prefix / "bin"), *outside])
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.cache)}
        process = subprocess.Popen(
            words,
            env={**base, **own, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.prefix,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, status: int = 0, **environ: str) -> str:
        return ended(self.start(self.prefix / "bin/python", *words, **environ), status)

    def files(self) -> dict[str, bytes]:
        """What Horovod is made of here, without bytecode and without what says by which path pip had the wheel."""
        found = [path for path in self.site.glob("[h~]*orovod*/**/*") if path.is_file()]
        found = [path for path in found if path.suffix != ".pyc" and path.name not in ("direct_url.json", "RECORD")]
        return {str(path.relative_to(self.site)): path.read_bytes() for path in found}

    def wheels(self) -> list[Path]:
        return list(self.cache.glob("hvdkit/wheels/**/*.whl"))


class StandIn(Environment):
    """``install`` builds the stand-in here, for a PyTorch that is none."""

    def __init__(self, directory: Path, name: str = "env") -> None:
        super().__init__(directory / name, directory / "cache")
        self.log, self.bin, self.torch = directory / "compiled", directory / "bin", directory / "packages/torch"
        self.tools, self.source = directory / "tools-0-py3-none-any.whl", directory / "sources/horovod-0.28.1.tar.gz"
        for made in (self.bin, self.torch, self.source.parent):
            made.mkdir(parents=True, exist_ok=True)
        for compiler in ("c++", "cc"):
            (self.bin / compiler).write_text(COMPILER)
            (self.bin / compiler).chmod(0o755)
        (self.torch / "__init__.py").touch()
        (self.torch / "version.py").write_text("__version__ = '9.9.9'\ncuda = None\nhip = None\ngit_version = 'a'\n")
        with zipfile.ZipFile(self.tools, "w") as wheel:
            for name, text in {"wheel": PACKER, "patchelf": "#!python\n"}.items():
                script = zipfile.ZipInfo(f"tools-0.data/scripts/{name}")
                script.external_attr = 0o100755 << 16
                wheel.writestr(script, text)
            wheel.writestr("tools-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tools\nVersion: 0\n")
            wheel.writestr("tools-0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr("tools-0.dist-info/RECORD", "")
        for need in RUNTIME_NEEDS:  # which this environment has only where Horovod was installed into it
            if not any(importlib.metadata.distributions(name=need)):
                info = self.site / f"{need}-99.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {need}\nVersion: 99\n")
        if not self.source.exists():
            write_source(self.source)
        self.sum = hashlib.sha256(self.source.read_bytes()).hexdigest()

    def environ(self, **environ: str) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.torch.parent}",
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(self.source.parent),
            "STANDIN_LOG": str(self.log),
            "STANDIN_SUM": self.sum,
            "STANDIN_TOOLS": str(self.tools),
            **environ,
        }

    def command(self, *words: str) -> list[str]:
        return [str(self.prefix / "bin/python"), __file__, "install", "--without-mpi", "--frameworks", "torch", *words]

    def start_install(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return self.start(*self.command(*words), **self.environ(**environ))

    def install(self, *words: str, status: int = 0, **environ: str) -> str:
        return ended(self.start_install(*words, **environ), status)

    def compiled(self) -> int:
        """How many times it was compiled, or begun to be."""
        return self.log.read_text().count("compiled") if self.log.exists() else 0


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate()
    assert process.returncode == status, output
    return output


def write_source(file: Path, setup: str = SETUP) -> None:
    write_archive(file, {"setup.py": setup, "backend.py": BACKEND, "pyproject.toml": PYPROJECT})


def write_archive(file: Path, texts: dict[str, str]) -> None:
    """A source distribution of Horovod with these files."""
    with tarfile.open(file, "w:gz") as archive:
        for name, text in texts.items():
            info = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


def main() -> int:
    from hvdkit import cli
    from hvdkit.prepare.install import adjust, build, cache

    build.HOROVOD_SHA256 = os.environ["STANDIN_SUM"]  # type: ignore[misc]
    build.BUILD_TOOLS = (os.environ["STANDIN_TOOLS"],)  # type: ignore[assignment, misc]
    adjust.applying = lambda target: ()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test that runs in the background has ignored

    def half_a_copy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    def half_an_install(wheel: Path, plan: object, log: object) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)  # noqa: S202  # with all that says it is installed, and half of the library
        (SITE / "horovod/torch/mpi_lib_v2.so").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    match os.environ.get("STANDIN_DIE"):
        case "copy":
            cache.shutil.copyfile = half_a_copy  # type: ignore[assignment]
        case "install":
            build.install = half_an_install
    return cli.run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
