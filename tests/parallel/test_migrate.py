"""docs/migrate.md: its programs and blocks run, and say what its tables say; see contracts/test_pages.py too."""

import contextlib
import os
import re
import socket
from typing import Any

import pytest
from pages import blocks, run
from ranks import on_ranks

import hvdkit

BLOCKS = blocks("migrate.md")
BEFORE, AFTER = BLOCKS["DDP before and after"]


def weights(model: Any) -> list[float]:
    return [number for one in model.parameters() for number in one.detach().reshape(-1).tolist()]


def small(hk: Any, world: Any, kind: str = "float64") -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to(getattr(torch, kind))
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(24, width, generator=generator, dtype=getattr(torch, kind)) for width in (4, 1))
    own = slice(world.rank, None, world.size)
    parts = [(one[own], other[own]) for one, other in zip(x.split(8), y.split(8), strict=True)]
    return {
        "hk": hk,
        "torch": torch,
        "contextlib": contextlib,
        "device": torch.device("cpu"),
        "world": world,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss_of": torch.nn.MSELoss(),
        "loader": parts,
        "parts": parts,
    }


def in_one_process(block: str, names: dict[str, Any]) -> list[float]:
    """The weights after a block on the global batch, without what is between ranks."""
    lines = [line for line in block.splitlines() if not re.search(r"hvd|hk\.broadcast|synchronize\(\)$", line)]
    text = "\n".join(lines).replace("hk.no_sync(model)", "contextlib.nullcontext()")
    text = text.replace("optimizer.skip_synchronize()", "contextlib.nullcontext()")
    return weights(run(text, names)["model"])


@on_ranks("torch", n=2, fresh=True)
def test_the_program_for_ddp_and_the_one_for_hvdkit_end_with_the_same_weights(hk, world, everyone, tmp_path):
    before = BEFORE.replace("DistributedSampler(train_set)", "DistributedSampler(train_set, shuffle=False)")
    after = AFTER.replace("batch_size=16)", "batch_size=16, shuffle=False)")
    assert before != BEFORE and after != AFTER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = everyone(free.getsockname()[1])[0]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(world.rank), WORLD_SIZE=str(world.size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    theirs = run(before, {})
    ours = run(after, {})
    assert weights(ours["model"]) == pytest.approx(weights(theirs["model"]), rel=1e-5, abs=1e-6)
    assert everyone(weights(ours["model"])) == [weights(ours["model"])] * 2
    assert ours["mean"] == pytest.approx(theirs["mean"].item() / 2, rel=1e-5)
    assert (tmp_path / "last.pt").is_file() and list((tmp_path / "runs").glob("step-*"))


@pytest.mark.parametrize("heading", ["Accumulated gradients", "Mixed precision", "Horovod's own optimizer"])
@on_ranks("torch", n=2)
def test_a_block_trains_like_one_process_on_the_union_batch(hk, world, everyone, heading):
    (block,) = BLOCKS[heading]
    kind, close = ("float32", 0.01) if "bfloat16" in block else ("float64", 1e-10)
    names = small(hk, world, kind)
    start = weights(names["model"])
    if "hvd." not in block:
        hk.distribute(names["optimizer"], names["model"])
    found = weights(run(block, names)["model"])
    assert found == pytest.approx(in_one_process(block, small(hk, hvdkit.Topology(0, 1), kind)), abs=close)
    assert max(abs(one - other) for one, other in zip(found, start, strict=True)) > 10 * close
    assert everyone(found) == [found] * 2


@on_ranks("torch", n=2)
def test_collectives(hk, world):
    import torch

    (block,) = BLOCKS["Collectives"]
    names = run(block, {"hk": hk, "world": world, "x": torch.full((1 + world.rank, 2), float(world.rank))[:1]})
    assert names["mean"].tolist() == [[0.5, 0.5]] and names["total"].tolist() == [[1.0, 1.0]]
    assert names["rows"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert names["objects"] == [{"rank": 0}, {"rank": 1}] and names["name"] == "run-1"
    uneven = hk.gather(torch.full((1 + world.rank, 2), float(world.rank)))
    assert uneven.shape == (3, 2)
