"""Ranks of tests import a framework without what it imports on the side; nothing else is kept from them."""

import gc
import importlib
import sys

import pytest
from lean_imports import lean_imports

LIBRARY = """
import importlib
found = []
for name in ("jax", "matplotlib", "sklearn"):
    ways = 0
    for load in (__import__, importlib.import_module):
        try:
            load(name)
        except ImportError:
            continue
        ways += 1
    found += [name] * (ways > 0)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Imports a package of LIBRARY's code, under a name, and says which packages it found."""
    for name in ("jax", "matplotlib", "sklearn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def loaded():
        ours = ("jax", "matplotlib", "sklearn", "keras", "tensorflow", "program")
        return [one for one in sys.modules if one.split(".")[0] in ours]

    before = {module: sys.modules[module] for module in loaded()}

    def found(name):
        for module in loaded():
            del sys.modules[module]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(LIBRARY)
        importlib.invalidate_caches()
        return importlib.import_module(name).found

    yield found
    for module in loaded():
        del sys.modules[module]
    sys.modules.update(before)


def test_the_frameworks_find_nothing_on_the_side_and_a_program_finds_all(library, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    with lean_imports():
        assert library("keras") == library("tensorflow") == []
        assert library("program") == ["jax", "matplotlib", "sklearn"]
    assert library("keras") == ["jax", "matplotlib", "sklearn"]


def test_keras_finds_jax_where_it_computes_with_it(library, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with lean_imports():
        assert library("keras") == ["jax"]


def test_garbage_is_collected_again_after_the_imports_and_they_are_not_searched(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with pytest.raises(ZeroDivisionError), lean_imports():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled() and frozen == [True]
