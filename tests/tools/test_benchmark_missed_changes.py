"""benchmarks/missed_changes.py: the digests of check_agreement miss none of its structured changes."""

import subprocess
import sys
from pathlib import Path


def test_no_structured_change_is_missed():
    program = Path(__file__).parents[2] / "benchmarks" / "missed_changes.py"
    done = subprocess.run([sys.executable, str(program), "--pairs", "80000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *kinds, everything = done.stdout.splitlines()
    assert len(kinds) == 9 and all(kind.endswith(" pairs, 0 missed") for kind in (*kinds, everything))
