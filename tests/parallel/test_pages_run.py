"""Every Python block of docs/*.md runs as it stands there; programs_pages.py says what it begins with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, run
from programs_pages import (
    ARRAYS,
    KERAS,
    LOOP,
    PROGRAM,
    READ,
    RECORDED,
    TORCH,
    TRAINED,
    KerasShelf,
    Place,
    QuickShelf,
    Shelf,
    arrays_begin,
    names_of,
    true_after,
)
from ranks import missing, on_ranks

TIMELINE = Path(__file__).parents[1] / "data" / "timelines" / "atpesc-2023-cpu-8ranks.json"


def code(place: Place) -> str:
    return blocks(place.page)[place.heading][place.number]


@pytest.mark.parametrize("place", TORCH, ids=str)
@on_ranks("torch", n=2)
def test_a_block_for_pytorch_runs(hk, world, everyone, place):
    names = run(code(place), names_of(TORCH[place], Shelf(hk, world, everyone)))
    everyone(None)  # what only the root writes is there
    assert true_after(TORCH[place].after, names), TORCH[place].after


@on_ranks("torch", n=1)
def test_the_block_that_uses_a_trained_model_runs(hk, world):
    import torch

    shelf = Shelf(hk, world, None)
    hk.Checkpoints("runs/own", keep_best=1).save(shelf.model, shelf.optimizer, step=1, score=0.5)
    example = torch.ones(2, 4)
    names = run(code(TRAINED), {"hk": hk, "torch": torch, "example": example, "Net": lambda: torch.nn.Linear(4, 3)})
    expected = shelf.model(example)
    assert torch.equal(names["model"](example), expected) and names["saved"].score == 0.5
    assert torch.equal(torch.export.load("model.pt2").module()(example), expected)
    for file in ("model.pt", names["saved"].path / "model.pt"):
        assert torch.equal(torch.load(file, weights_only=True)["weight"], shelf.model.weight)


@pytest.mark.parametrize("place", KERAS, ids=str)
@on_ranks("keras", n=2)
def test_a_block_for_keras_runs(hk, world, place):
    names = run(code(place), names_of(KERAS[place], KerasShelf(hk, world)))
    assert true_after(KERAS[place].after, names), KERAS[place].after


@pytest.mark.parametrize("place", LOOP, ids=str)
@on_ranks("tensorflow", n=2)
def test_a_block_for_tensorflow_runs(place):
    names = run(code(place), names_of(LOOP[place], QuickShelf()))
    assert true_after(LOOP[place].after, names), LOOP[place].after


@on_ranks("torch", n=2, mpi=True, fresh=True)
def test_the_block_for_arrays_runs(everyone):
    names = run(code(ARRAYS), arrays_begin())
    weights = names["state"]["parameters"]["w"].tolist()
    assert everyone(weights) == [weights] * 2 and names["gradients"]["w"].shape == (4, 1)
    assert names["steps"] == len(names["loader"]) == 2


@on_ranks("torch", n=2, fresh=True)
def test_the_blocks_that_record_timelines_and_read_them_run(hk, everyone):
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    world = hk.init()
    shelf = Shelf(hk, world, everyone)
    first, second, third = map(code, RECORDED)
    pair = (shelf.torch.randn(2, 4), shelf.torch.tensor([0, 1]))
    names: dict[str, Any] = {"torch": shelf.torch, "world": world, "train": shelf.train}
    run(first, {**names, "loader": [pair] * 125})
    run(second, {**names, "hk": hk, "batches": iter([pair] * 20)})
    if world.is_root:
        run(third, {})
        assert Path("merged.json").stat().st_size > 0
    everyone(None)


@pytest.mark.parametrize("place", READ, ids=str)
def test_a_block_that_reads_a_timeline_runs(place, tmp_path, monkeypatch):
    shutil.copy(TIMELINE, tmp_path / "timeline.json")
    monkeypatch.chdir(tmp_path)
    names = run(code(place), {})
    assert true_after(READ[place], names)


@pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod (`make test` installs all)")
def test_the_program_that_starts_its_ranks_prints_what_it_says(tmp_path):
    (tmp_path / "program.py").write_text(code(PROGRAM))
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == code(PROGRAM).rpartition("# ")[2].strip() + "\n", done.stderr
