"""A real ``hvdkit install`` into another environment at another place, from the cache; more: test_install_builds.

The wheel that ``hvdkit install`` made for this environment is copied from the user's cache; without it this test
would have to compile for minutes, so it is skipped.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from install_machine import Environment

from hvdkit.errors import HvdkitError
from hvdkit.prepare.install.cache import Cache
from hvdkit.prepare.install.facts import Options
from hvdkit.prepare.install.here import cache_directory, gather_facts
from hvdkit.prepare.install.plan import BuildPlan, make_plan

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def plan() -> BuildPlan:
    try:
        plan = make_plan(gather_facts(gpu=False), Options())
    except HvdkitError as error:
        pytest.skip(f"Horovod cannot be built here: {error}")
    if Cache(cache_directory()).get(plan.key) is None:
        pytest.skip(f"the cache has no wheel with key {plan.key[:12]}; 'hvdkit install' makes it")
    return plan


@pytest.fixture
def environment(tmp_path: Path, plan: BuildPlan) -> Environment:
    """Has this one's programs and MPI too, and the wheel in its cache."""
    made = Environment(tmp_path / "env", tmp_path / "cache")
    for name in ("bin", "lib", "share", "etc", "include"):
        if (Path(sys.prefix) / name).is_dir():
            (made.prefix / name).mkdir(exist_ok=True)
            made.link(Path(sys.prefix) / name, made.prefix / name)
    for other in ("jax", "matplotlib", "sklearn"):  # TensorFlow imports them where they are, and they take seconds
        (made.site / other).unlink(missing_ok=True)
    entry = Path("hvdkit/wheels") / plan.key
    shutil.copytree(cache_directory().parent / entry, made.cache / entry)
    assert not (made.site / "horovod").exists()
    return made


def test_a_wheel_built_elsewhere_is_installed_from_the_cache_and_works(
    environment: Environment, plan: BuildPlan
) -> None:
    before = {entry.name for entry in environment.site.iterdir()}
    assert "from the cache" in environment.run("-m", "hvdkit.cli", "install")
    added = {entry.name for entry in environment.site.iterdir()} - before - {"__pycache__"}
    assert added == {"horovod", "horovod-0.28.1.dist-info"}
    for package in plan.run_paths:
        code = (
            f"import horovod.{package} as hvd; hvd.init(); assert hvd.size() == 1; "
            f"assert hvd.gloo_built() and hvd.mpi_built() == {plan.facts.mpi is not None}; print(hvd.__file__)"
        )
        environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        assert str(environment.site) in environment.run("-c", code, **environ)
    code = "from hvdkit.prepare.install.record import read_record; print(read_record().key)"
    assert environment.run("-c", code).strip() == plan.key
    assert "already installed" in environment.run("-m", "hvdkit.cli", "install")
