"""What looks at the samples of all ranks: rows gathered with gradients, and BatchNorm over the global batch."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import horovod.torch as hvd
import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvdkit.errors import InvalidArgumentError
from hvdkit.torch.state import plain_name

_statistics = ("running_mean", "running_var")
_numbers = count()
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


def sync_batch_norm(model: torch.nn.Module) -> torch.nn.Module:
    """Let every BatchNorm of a model normalise by the statistics of the global batch, not of this rank's part.

    The modules change their class in place and keep their parameters, so that it does not matter whether the optimizer
    exists already. Works on CPUs and GPUs; Horovod's own ``SyncBatchNorm`` takes GPU tensors only. Each forward and
    each backward pass of a module waits for one small operation between the ranks. A filler of ``remainder="exact"``
    counts in the statistics of the last step like a sample.

    Args:
        model: with at least one BatchNorm; call it on all ranks.
    Returns:
        The same model.
    Raises:
        InvalidArgumentError: no BatchNorm in the model, or one whose forward does more, which would be lost.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        raise InvalidArgumentError(f"sync_batch_norm: {type(model).__name__} has no BatchNorm.")
    for name, module in found.items():
        own = getattr(module.forward, "__func__", None)
        if own not in (_BatchNorm.forward, *(one.forward for one in _SYNCHRONIZED)):
            raise InvalidArgumentError(
                f"sync_batch_norm: {name or 'the model'} ({type(module).__name__}) has a forward of its own, which "
                "would be lost; make what it does beside BatchNorm (an activation, dropout) a module of its own."
            )
    for module in found.values():
        if not isinstance(module, SyncBatchNorm):
            module.__class__ = SyncBatchNorm
            cast(SyncBatchNorm, module).name = f"hvdkit.batch_norm.{next(_numbers)}"
    return model


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm over the samples of all ranks. Made by ``hvdkit.torch.sync_batch_norm``.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", for joining the ranks' variances.
    """

    name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(m, channels, ...) -> the same shape."""
        if not (self.training or self.running_mean is None) or hvd.size() == 1:
            return super().forward(x)
        if x.dim() < 2:
            raise InvalidArgumentError(f"BatchNorm needs (samples, channels, ...), got the shape {tuple(x.shape)}.")
        over = [0, *range(2, x.dim())]
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(exact, over, correction=0)
        size = mean.new_full((1,), x.numel() // x.shape[1])
        everyone = gathered(torch.cat([size, mean, variance]).unsqueeze(0), hvd.rank(), self.name)
        sizes, (means, variances) = everyone[:, :1], everyone[:, 1:].chunk(2, dim=1)
        total = sizes.sum()
        mean = (sizes * means).sum(0) / total
        variance = (sizes * (variances + (means - mean) ** 2)).sum(0) / total
        if self.training:
            self._track(mean.detach(), (variance * (total / (total - 1))).detach())
        shape = [1, -1, *(1 for _ in over[1:])]
        scale = torch.rsqrt(variance + self.eps)
        normal = (exact - mean.reshape(shape)) * scale.reshape(shape)
        if self.affine:
            normal = normal * self.weight.reshape(shape) + self.bias.reshape(shape)
        return normal.to(x.dtype)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        """Called by PyTorch outside of training; any number of dimensions is right."""

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


_SYNCHRONIZED: tuple[type[_BatchNorm], ...] = (SyncBatchNorm, torch.nn.SyncBatchNorm, hvd.SyncBatchNorm)


def local_statistics(model: torch.nn.Module) -> list[str]:
    """Plain names of the running statistics that are each rank's own."""
    return [
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, (SyncBatchNorm, hvd.SyncBatchNorm))
        for name in _statistics
        if getattr(module, name) is not None
    ]


def average_statistics(model: torch.nn.Module) -> None:
    """Set BatchNorm's running statistics to their mean over the ranks; a collective.

    Before evaluation and before a checkpoint: otherwise both use the statistics of one rank's samples. (The mean of the
    variances leaves out how far the ranks' means are apart, which is little when samples are dealt out at random.)

    Args:
        model: nothing happens where it has none.
    """
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    for name in local_statistics(model):
        buffers[name].copy_(hvd.allreduce(buffers[name], op=hvd.Average, name=f"hvdkit.statistics.{name}"))
