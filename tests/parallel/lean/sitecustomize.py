"""First on PYTHONPATH: every Python there imports Keras and TensorFlow without what ``lean_imports.py`` leaves out."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[1])
sys.path.append(TESTS)

from lean_imports import Missing  # noqa: E402

sys.path.remove(TESTS)
sys.meta_path.insert(0, Missing())
