"""hvdkit.torch.gather: all ranks' rows, whose gradients are summed. In training: test_published."""

import subprocess
import sys

import pytest
from ranks import on_ranks

import hvdkit


def rows_of(rank, dtype=None):
    """(rank + 1, 2), other numbers on each rank."""
    import torch

    return (torch.arange(2.0 * (rank + 1)).reshape(-1, 2) + 10 * rank + 0.5).to(dtype or torch.float64)


@on_ranks("torch", n=(1, 3))
def test_a_rank_s_rows_get_the_sum_of_what_all_losses_say_of_them(hk, world):
    import torch

    everyone = torch.cat([rows_of(rank) for rank in range(world.size)])
    own = rows_of(world.rank).requires_grad_()
    assert hk.gather(own).equal(everyone)
    losses = sum((world.rank + 1) * (hk.gather(own * scale) ** 2).sum() for scale in (1, 2))
    losses.backward()
    ranks = sum(rank + 1 for rank in range(world.size))
    assert own.grad.equal(ranks * (2 + 8) * rows_of(world.rank))


@on_ranks("torch", n=2)
def test_rows_of_every_type_arrive_bit_for_bit(hk, world):
    import torch

    types = (torch.bfloat16, torch.float16, torch.float32, torch.complex64, torch.complex128, torch.int64, torch.bool)
    for dtype in types:
        own = rows_of(world.rank, dtype)
        if dtype.is_complex:
            own = (own * (1 + 2j)).conj()
        own.requires_grad_(dtype.is_floating_point or dtype.is_complex)
        everyone = hk.gather(own)
        assert everyone.dtype == dtype
        assert everyone.detach()[world.rank : 2 * world.rank + 1].equal(own.detach()), dtype
        if own.requires_grad:
            (everyone * 3).abs().sum().backward()
            assert own.grad.abs().flatten().tolist() == pytest.approx([6.0] * own.numel(), rel=1e-2), dtype


@on_ranks("torch", n=2)
def test_gather_within_a_compiled_loss_and_without_gradients(hk, world):
    import torch

    @torch.compile(backend="aot_eager")
    def loss(rows):
        return (hk.gather(rows * 2) * 3).sum()

    own = rows_of(world.rank).requires_grad_()
    loss(own).backward()
    assert own.grad.eq(12).all()
    with torch.inference_mode():
        assert len(hk.gather(rows_of(world.rank))) == 3


@on_ranks("torch", n=2)
def test_a_single_number_has_no_rows(hk, world):
    import torch

    with pytest.raises(hvdkit.InvalidArgumentError, match=r"got a single number; give it number.reshape\(1\)"):
        hk.gather(torch.tensor(1.0))


@pytest.mark.parallel
def test_who_imports_hvdkit_waits_for_no_compiler():
    """A second of processor time, which a spawned worker that only reads data has no use for."""
    pytest.importorskip("horovod.torch")
    show = "import sys, hvdkit.torch; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
