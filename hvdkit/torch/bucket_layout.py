"""Which gradients can travel, which travel together, and how they lie there; used by ``buckets``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvdkit.errors import InvalidArgumentError

Parameter = torch.nn.Parameter
Named = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """How gradients are put into buckets; see ``hvdkit.torch.distribute``.

    Attributes:
        bucket_mb: a bucket is full from so many MB (1,000,000 bytes) on; not with groups.
        groups: number of buckets of each type, or which parameters go together (the others: alone).
        sparse_as_dense: whether sparse gradients become dense ones.
    Raises:
        InvalidArgumentError: a number out of range, or groups that are neither.
    """

    bucket_mb: float = 4
    groups: int | list[list[torch.Tensor]] | None = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        size = self.bucket_mb
        if isinstance(size, bool) or not (isinstance(size, int | float) and math.isfinite(size) and size > 0):
            raise InvalidArgumentError(f"bucket_mb must be a positive, finite number of MB, got {size!r}.")
        groups = self.groups
        if isinstance(groups, list):
            members = [one for group in groups for one in group]
            if not all(isinstance(one, torch.Tensor) for one in members):
                raise InvalidArgumentError("groups must be a number, or lists of parameters.")
            if len({id(one) for one in members}) < len(members):
                raise InvalidArgumentError("a parameter stands twice in groups; each may be in one.")
        elif groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
            raise InvalidArgumentError(f"groups must be a number >= 1 or lists of parameters, got {groups!r}.")

    def split(self, named: Named) -> Iterable[Named]:
        """The members of each bucket, in their order."""
        groups = self.groups
        if isinstance(groups, list):
            group_of = {id(one): number for number, group in enumerate(groups) for one in group}
            kinds: dict[Any, list[tuple[str, Parameter]]] = {}
            for name, parameter in named:
                group = group_of.get(id(parameter), name)
                kinds.setdefault((group, parameter.dtype, parameter.device), []).append((name, parameter))
            return kinds.values()
        limit = 1e6 * self.bucket_mb
        if groups is not None:
            limit = sum(map(_bytes, named)) / groups
        open_ones: dict[Any, list[tuple[str, Parameter]]] = {}
        sizes: dict[Any, int] = {}
        full: list[Named] = []
        for one in named:
            kind = (one[1].dtype, one[1].device)
            open_ones.setdefault(kind, []).append(one)
            sizes[kind] = sizes.get(kind, 0) + _bytes(one)
            if sizes[kind] >= limit:
                full.append(open_ones.pop(kind))
                del sizes[kind]
        return [*full, *open_ones.values()]


class Members:
    """Which parameters buckets were made of, and of what kinds they were.

    Args:
        named: these.
    """

    def __init__(self, named: Named) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [weakref.ref(one) for _, one in named]
        self._kinds = _kinds(named)

    def living(self) -> list[tuple[str, Parameter]]:
        """Those that are still in use, with their names."""
        pairs = zip(self._names, (weak() for weak in self._parameters), strict=True)
        return [(name, one) for name, one in pairs if one is not None]

    def are(self, named: Named) -> bool:
        """Whether these are the same."""
        held = [weak() for weak in self._parameters]  # another parameter may have the id of one that is gone
        same = len(held) == len(named) and all(old is one for old, (_, one) in zip(held, named, strict=True))
        return same and _kinds(named) == self._kinds


def _kinds(named: Named) -> list[tuple[Any, ...]]:
    return [(one.dtype, one.device, one.shape, one.stride()) for _, one in named]


def _bytes(one: tuple[str, Parameter]) -> int:
    return one[1].numel() * one[1].element_size()


class BucketFlags(NamedTuple):
    """What a rank says in its buckets, 0 or 1; once they have arrived, the share of the ranks that say it.

    Attributes:
        changed: it needs another layout.
        late: it sends its gradients only in ``step()``.
        has_fingerprint: it has fingerprints of its parameters to compare; see ``hvdkit.steps.divergence``.
        failed: an error ended its backward when some buckets had left, and it went on.
    """

    changed: float = 0.0
    late: float = 0.0
    has_fingerprint: float = 0.0
    failed: float = 0.0


def obstacle_to(parameter: Parameter) -> str | None:
    """Why the parameter's gradient cannot travel, and what to do; None if it can."""
    if torch.nn.parameter.is_lazy(parameter) or parameter.device.type == "meta":
        why, fix = "it has no data yet", "run one batch through the model, or materialize it, before distribute"
    elif parameter.layout != torch.strided or hasattr(parameter, "to_local"):  # a DTensor
        why = f"it is a {'DTensor' if hasattr(parameter, 'to_local') else parameter.layout}"
        fix = "distribute takes plain dense parameters, whole on every rank"
    elif getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:  # since PyTorch 2.10
        why = f"its grad_dtype is {parameter.grad_dtype}, and its own is {parameter.dtype}"
        fix = "leave grad_dtype as it is; parameters in float32 and torch.autocast have gradients in float32"
    elif parameter.device.type not in ("cpu", "cuda"):
        why = f"it is on {parameter.device}"
        fix = "Horovod reduces on CPUs and on CUDA or ROCm GPUs: move the model there"
    else:
        return None
    return f"{why}; {fix}."


def strides(parameter: Parameter) -> tuple[int, ...]:
    """The parameter's own where they leave no gaps (channels_last), as autograd does it; else those of its shape."""
    if parameter.numel() and _is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of the axes."""
    steps = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    return all(stride == math.prod(length for _, length in steps[:number]) for number, (stride, _) in enumerate(steps))
