"""docs/ray_spark.md: its programs run on two ranks. Neither Ray nor Spark is part of `make test`'s environment."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
from pages import blocks
from ranks import BIN, missing, rank_environment

BLOCKS = blocks("ray_spark.md")
PROGRAMS = {"train.py": BLOCKS["train.py"], "ray_train.py": BLOCKS["Ray"], "ray_trainer.py": BLOCKS["ray.train"]}
PROGRAMS["spark_train.py"] = BLOCKS["Spark"]
SUBMIT = ["spark-submit", "--master", "local[2]", "--conf", "spark.python.worker.reuse=false", "--py-files", "train.py"]
LONGEST_S = 280
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(missing("torch")), reason="needs torch and horovod (`make test` installs all)"),
]


def lacks(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:  # ray is there, ray.train says which of its packages is not
        return True


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            [sys.executable, "ray_train.py"],
            marks=pytest.mark.skipif(lacks("ray"), reason="needs Ray (pip install ray)"),
        ),
        pytest.param(
            [sys.executable, "ray_trainer.py"],
            marks=pytest.mark.skipif(lacks("ray.train.torch"), reason="needs Ray Train (pip install 'ray[train]')"),
        ),
        pytest.param(
            [str(BIN / SUBMIT[0]), *SUBMIT[1:], "spark_train.py"],
            marks=pytest.mark.skipif(
                lacks("pyspark") or shutil.which("java") is None, reason="needs Spark (pip install pyspark) and Java"
            ),
        ),
    ],
    ids=lambda command: command[-1],
)
def test_a_program_of_the_page_trains_on_two_ranks(command, tmp_path):
    for name, (text,) in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    # Where tests run beside each other, importing PyTorch can take longer than the minute that Ray Train gives a start.
    environment = {**rank_environment(), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LONGEST_S)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    for rank in range(2):
        assert f"rank {rank} of 2, local rank {rank}" in said
    losses = re.findall(r"\{'loss': ([\d.e-]+)\}", said)
    assert len(losses) >= 2 and len(set(losses)) == 1 and float(losses[0]) < 0.01
