"""A real ``hvdkit install`` into another environment at another place: from the cache, twice at once, and failing.

The wheel that ``hvdkit install`` made for this environment is copied from the user's cache; without it these tests
would have to compile for minutes, so they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.prepare.install.cache import Cache
from hvdkit.prepare.install.here import cache_directory, gather_facts
from hvdkit.prepare.install.plan import Plan, make_plan
from hvdkit.prepare.install.requirements import Options

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("platlib"))
OWN = ("horovod", "hvdkit", "__pycache__", "__editable__")


@pytest.fixture(scope="module")
def plan() -> Plan:
    try:
        plan = make_plan(gather_facts(gpu=False), Options())
    except HvdkitError as error:
        pytest.skip(f"Horovod cannot be built here: {error}")
    if not Cache(cache_directory()).has(plan.key):
        pytest.skip(f"the cache has no wheel with key {plan.key[:12]}; 'hvdkit install' makes it")
    return plan


class Environment:
    """A virtual environment whose packages are links to those of this one, without Horovod and hvdkit."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.prefix = directory / "env"
        self.cache = directory / "cache"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.prefix], check=True)
        self.site = self.prefix / SITE.relative_to(sys.prefix)
        self._link(SITE, self.site)
        self._link(Path(sys.prefix) / "bin", self.prefix / "bin")
        self._link(Path(sys.prefix) / "lib", self.prefix / "lib")
        for name in ("share", "etc", "include"):
            source = Path(sys.prefix) / name
            if source.is_dir():
                (self.prefix / name).mkdir(exist_ok=True)
                self._link(source, self.prefix / name)
        entry = Path("hvdkit/wheels") / plan.key
        shutil.copytree(cache_directory().parent / entry, self.cache / entry)

    def _link(self, source: Path, target: Path) -> None:
        for entry in source.iterdir():
            link = target / entry.name
            if not entry.name.startswith(OWN) and not link.exists():
                link.symlink_to(entry)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        path = os.pathsep.join([str(self.prefix / "bin"), self._path_without_this_environment()])
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.cache)}
        return subprocess.Popen(
            [self.prefix / "bin/python", *arguments],
            env={**base, **own, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.prefix,
        )

    def run(self, *arguments: str, status: int = 0, **environ: str) -> str:
        process = self.start(*arguments, **environ)
        output, _ = process.communicate()
        assert process.returncode == status, output
        return output

    def install(self, *arguments: str, status: int = 0, **environ: str) -> str:
        return self.run("-m", "hvdkit.cli", "install", *arguments, status=status, **environ)

    def files(self) -> dict[str, bytes]:
        """What Horovod is made of here, without bytecode."""
        found = [path for path in self.site.glob("horovod*/**/*") if path.is_file() and path.suffix != ".pyc"]
        return {str(path.relative_to(self.site)): path.read_bytes() for path in found}

    def wheel(self) -> Path:
        return next(self.cache.glob("hvdkit/wheels/*/*.whl"))

    @staticmethod
    def _path_without_this_environment() -> str:
        own = Path(sys.prefix) / "bin"
        return os.pathsep.join(entry for entry in os.environ["PATH"].split(os.pathsep) if Path(entry) != own)


@pytest.fixture
def environment(tmp_path: Path, plan: Plan) -> Iterator[Environment]:
    made = Environment(tmp_path, plan)
    assert not (made.site / "horovod").exists()
    yield made


def test_a_wheel_built_elsewhere_is_installed_from_the_cache_and_works(environment: Environment, plan: Plan) -> None:
    before = {entry.name for entry in environment.site.iterdir()}
    assert "from the cache" in environment.install()
    added = {entry.name for entry in environment.site.iterdir()} - before
    assert added == {"horovod", "horovod-0.28.1.dist-info"}
    for package in plan.run_paths:
        code = (
            f"import horovod.{package} as hvd; hvd.init(); assert hvd.size() == 1; "
            f"assert hvd.gloo_built() and hvd.mpi_built() == {plan.mpi is not None}; print(hvd.__file__)"
        )
        environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        assert str(environment.site) in environment.run("-c", code, **environ)
    code = "from hvdkit.prepare.install.record import read_record; print(read_record().key)"
    assert environment.run("-c", code).strip() == plan.key
    assert "already installed" in environment.install()


def test_a_damaged_library_is_installed_again(environment: Environment, plan: Plan) -> None:
    environment.install()
    good = environment.files()
    library = next(environment.site.glob("horovod/*/*.so"))
    library.write_bytes(library.read_bytes()[:1000])
    assert "from the cache" in environment.install()
    assert environment.files() == good


def test_two_installs_at_once_into_one_environment(environment: Environment) -> None:
    processes = [environment.start("-m", "hvdkit.cli", "install") for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted("already installed" in output for output in outputs) == [False, True]


def test_when_pip_fails_the_environment_stays_as_it_was(environment: Environment) -> None:
    environment.install()
    (environment.site / "horovod/marker.txt").write_text("mine")
    before = environment.files()
    record = environment.site / "horovod/hvdkit-build.json"
    record.write_text(record.read_text().replace('"key": "', '"key": "0'))
    before = environment.files()
    # The wheel in the cache is refused by pip: its name says another platform.
    wheel = environment.wheel()
    manifest = wheel.parent / "manifest.json"
    other = wheel.with_name(wheel.name.replace("linux_x86_64", "win32").replace("linux_aarch64", "win32"))
    wheel.rename(other)
    manifest.write_text(manifest.read_text().replace(wheel.name, other.name))
    output = environment.install(status=1)
    last = output.splitlines()[-1]
    assert last.startswith("hvdkit: Installing the wheel failed: ERROR: ")
    assert "the full log is" in last
    assert environment.files() == before


def test_when_nothing_can_be_fetched_the_damaged_cache_is_said_and_the_environment_untouched(
    environment: Environment,
) -> None:
    wheel = environment.wheel()
    wheel.write_bytes(wheel.read_bytes()[:-1])
    output = environment.install(status=1, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    assert "has SHA-256" in output
    assert "It is built again." in output
    assert output.splitlines()[-1].startswith("hvdkit: pip install failed: ERROR: ")
    assert environment.files() == {}
    assert not list(environment.cache.glob("hvdkit/wheels/*/*.whl"))


def test_with_the_compiler_hidden_nothing_is_done_although_the_wheel_is_there(environment: Environment) -> None:
    output = environment.install(status=1, PATH=str(environment.prefix / "bin"))
    assert output.count("\n") == 1
    assert "No C++ compiler was found on PATH" in output
    assert environment.files() == {}
