"""README.md: its two programs train, and ship; contracts/test_pages.py reads it and the other pages."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import rank_environment, warm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {"-": "digits_single.py", "+": "digits.py"}


def side(sign: str) -> str:
    """The program before ("-") or after ("+") the steps, of the README's diff."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in ("", " ", sign))


def test_both_programs_ship():
    for sign, name in PROGRAMS.items():
        shipped = ast.parse((ROOT / "examples" / "pytorch" / name).read_text(encoding="utf-8"))
        assert ast.unparse(shipped.body[1:]) == ast.unparse(ast.parse(side(sign)))


@pytest.mark.parallel
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "horovod", "sklearn")),
    reason="needs torch, horovod and scikit-learn (`make test` installs all)",
)
@pytest.mark.parametrize(("sign", "n"), [("-", 1), ("+", 1), ("+", 2)])
def test_both_programs_train(sign, n, tmp_path):
    """In forks of a process that has imported PyTorch and scikit-learn."""
    (tmp_path / "digits.py").write_text(side(sign))
    start = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(n), "--no-tag", "--"] if sign == "+" else []
    done = subprocess.run(
        [*start, *warm("torch").stub("rank_script", "digits.py")],
        cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+) after \d+ steps$", done.stdout, re.M)]
    assert len(losses) == 10, done.stdout
    assert losses[-1] < 0.5 * losses[0]
