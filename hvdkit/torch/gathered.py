"""All ranks' rows, for what compares the samples of a batch; ``batch_norm`` uses it, too."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.autograd.function import once_differentiable

from hvdkit.errors import InvalidArgumentError

_BITS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # what Horovod cannot send, and what has as many bits
_SUMMED = (torch.float32, torch.float64)


# As torch.compiler.disable, which imports dynamo at once: a second, also in workers that only read data.
@torch._disable_dynamo  # type: ignore[attr-defined]
def gather(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in the order of the ranks, with gradients: for losses that compare the samples of a batch.

    A rank's rows get the sum of what all ranks' losses say of them. With the mean that ``distribute`` takes, training
    ends as one process on the batches of all ranks together does. Horovod's own ``allgather`` gives the ranks' mean,
    which is too small by their number. A collective, in forward and in backward: call it on every rank alike.

    Args:
        rows: (m, ...), of real or complex numbers, integers or bools; other ranks may have another m.
    Returns:
        (sum of all m, ...), the same on every rank. This rank's begin at ``rank * m`` where all have as many.
    Raises:
        InvalidArgumentError: a single number, which has no rows.
    """
    if rows.dim() == 0:
        raise InvalidArgumentError("gather needs rows, (m, ...), got a single number; give it number.reshape(1).")
    if hvd.size() == 1:
        return rows
    if torch.is_inference_mode_enabled():  # Horovod resizes what it returns, which no inference tensor allows
        with torch.inference_mode(False), torch.no_grad():
            return gather(rows.clone())
    counts = hvd.allgather(torch.tensor([len(rows)]), name="hvdkit.gather.counts")
    return gathered(rows, int(counts[: hvd.rank()].sum()), "hvdkit.gather")


def gathered(rows: torch.Tensor, begin: int, name: str) -> torch.Tensor:
    """All ranks' rows, of which this rank's begin at ``begin``; ``name`` is the collective's."""
    if rows.is_complex():
        return torch.view_as_complex(gathered(torch.view_as_real(rows.resolve_conj()), begin, name))
    return _Gathered.apply(rows, begin, name)  # type: ignore[no-any-return,no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Collects rows; in backward a rank takes its part of the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, begin: int, name: str) -> torch.Tensor:
        ctx.own, ctx.name = slice(begin, begin + len(rows)), name
        sent = rows.detach().contiguous()
        everyone: torch.Tensor = hvd.allgather(sent.view(_BITS.get(rows.dtype, rows.dtype)), name=name)
        if everyone.is_cuda:  # Horovod's thread has made it, on a stream of its own
            everyone.record_stream(torch.cuda.current_stream(everyone.device))
        return everyone.view(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        wide = gradient if gradient.dtype in _SUMMED else gradient.float()
        total = hvd.allreduce(wide.contiguous(), op=hvd.Sum, name=f"{ctx.name}.gradient")
        return total[ctx.own].to(gradient.dtype), None, None
