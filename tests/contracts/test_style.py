"""The linter and the type checker are part of the tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [("check", "--no-cache"), ("format", "--no-cache", "--check")], ids=["check", "format"]
)
def test_ruff(arguments):
    done = run("ruff", *arguments, ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="mypy reads PyTorch's types; it is not installed")
def test_mypy_strict():
    done = run("mypy")
    assert done.returncode == 0, done.stdout + done.stderr
