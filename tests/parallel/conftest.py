"""Starts real ranks for the tests of this directory."""

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks as real
from ranks import GIVEN, HERE, launcher_argv, rank_environment


@pytest.fixture
def ranks_command() -> Callable[[int, str], tuple[list[str], dict[str, str]]]:
    """What to put before a command to start it on n ranks, and their environment."""
    return lambda n, controller: (launcher_argv(n, controller) if n > 1 else [], rank_environment())


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function of a test's file on n ranks, each a process that a launcher starts; returns their JSON results.

    With ``fails=True`` the job must fail, and what it wrote to stderr is returned. ``warm`` names the framework that
    the ranks have imported before they begin (``ranks.FRAMEWORKS``).
    """

    def run(
        function: Callable[..., Any],
        n: int,
        *,
        controller: str = "mpi",
        fails: bool = False,
        warm: str = "",
        **arguments: Any,
    ) -> list[Any]:
        out = tmp_path / f"{function.__name__}-{n}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        words = [inspect.getfile(function), function.__name__, str(out), json.dumps(arguments)]
        source = real.warm(warm) if warm else None
        python = source.stub("rank_main") if source else [sys.executable, str(HERE / "rank_main.py")]
        environment = source.environment if source else rank_environment()
        start = launcher_argv(n, controller) if n > 1 else []
        done = subprocess.run(
            [*start, *python, *words], env=environment, capture_output=True, text=True, timeout=240, cwd=out
        )
        if fails:
            assert done.returncode != 0, done.stdout[-4000:]
            return [done.stderr]
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(n)]

    return run


@pytest.fixture
def run_job(tmp_path: Path) -> Callable[..., Any]:
    """Run a function of a test's file on ranks that begin and end with it; returns what each rank returned, by rank.

    The function gets what ``on_ranks`` gives a test, where its parameters have these names. With ``fails=True`` the job
    must fail, and how it did is returned.
    """

    def run(
        framework: str, function: Callable[..., Any], n: int = 2, mpi: bool = False, fails: bool = False, **given: Any
    ) -> Any:
        lacking = real.missing(framework)
        if lacking:
            pytest.skip(f"needs {', '.join(lacking)} (`make test` installs all)")
        started = real.ranks_of(real.Kind(framework, n, "mpi" if mpi else "gloo", True))
        try:
            found = started.run(inspect.getfile(function), function.__name__, given, tmp_path)
        except real.FailedOnRanks as failed:
            if fails:
                return str(failed)
            raise
        finally:
            started.end()
        assert not fails, "the job did not fail"
        return [pickle.loads(one) for one in found]  # noqa: S301

    return run


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[real.Ranks]:
    """The ranks of a test with ``on_ranks``."""
    lacking = real.missing(request.param.framework)
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)} (`make test` installs all)")
    yield real.ranks_of(request.param)
    if request.param.fresh and request.param in real._alive:
        real._alive[request.param].end()


def given_by_ranks(name: str) -> Any:
    return pytest.fixture(name=name)(lambda: None)


hk, on, world, everyone, alone = map(given_by_ranks, GIVEN)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The body of a test with ``on_ranks`` runs on the ranks, not here."""
    started = pyfuncitem.funcargs.get("ranks")
    if not isinstance(started, real.Ranks):
        return None
    real.run_test(started, pyfuncitem, pyfuncitem.funcargs["tmp_path"])
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on ranks of one kind follow each other; those on ranks of their own, and without, come after them.

    Of a test's cases the first one stays for frameworks on which it is a smoke test.
    """

    def order(item: pytest.Item) -> tuple[Any, ...]:
        kind = getattr(item, "callspec", None) and item.callspec.params.get("ranks")
        return (0, kind.framework, kind.fresh, kind) if isinstance(kind, real.Kind) else (1,)

    smoked, further = set(), []
    for item in items:
        if item.get_closest_marker("first_case_only"):
            test = item.path, item.originalname, item.callspec.params["ranks"]
            if test in smoked:
                further.append(item)
            smoked.add(test)
    items[:] = sorted((item for item in items if item not in further), key=order)
    config.hook.pytest_deselected(items=further)


def pytest_sessionfinish() -> None:
    real.end_all()
