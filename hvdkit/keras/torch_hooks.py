"""Keras on torch: gradients travel while ``loss.backward()`` computes others, by the hooks of ``hvdkit.torch``.

Keras' trainer and loops of the user's own call ``backward()`` on real parameters of PyTorch and give ``.grad`` to
``optimizer.apply``. So the parameters that an optimizer is built for get the hooks, and ``.grad`` is the mean when
``backward()`` returns. ``apply`` averages what came by another way: gradients of ``torch.autograd.grad``, copies that
the program has changed, and those of the first step of an optimizer that ``apply`` builds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvdkit.core import listeners
from hvdkit.core.layout import Flags
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.transport import Transport
from hvdkit.steps import passes
from hvdkit.steps.gradients import GradientOptions
from hvdkit.tf_shared.keras_layers import common_names
from hvdkit.torch.backward import exchange_all, exchanges
from hvdkit.torch.buckets import BucketLayout, total_norm
from hvdkit.torch.divergence import is_other
from hvdkit.torch.exchange import Exchange


class TrainedVariables(torch.nn.Module):
    """What a Keras optimizer trains, as ``Exchange`` sees an optimizer and the model that names its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._variables: dict[int, Any] = {}  # by the id of its parameter
        self.param_groups: list[dict[str, list[torch.nn.Parameter]]] = [{"params": []}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer`` has it; Keras' never add any."""

    def follow(self, variables: Iterable[Any]) -> None:
        """Take part in the gradients of these Keras variables, too."""
        known = self.param_groups[0]["params"]
        for variable in variables:
            parameter = variable.value
            if id(parameter) not in self._variables and type(parameter) is torch.nn.Parameter and not parameter.is_meta:
                self._variables[id(parameter)] = variable
                known.append(parameter)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """In the order in which the optimizer has its variables."""
        return zip(common_names(self._variables.values()), self.parameters(), strict=True)

    def parameters(self, *_: Any, **__: Any) -> Iterator[torch.nn.Parameter]:
        """As above, without names."""
        return iter(self.param_groups[0]["params"])


class _Exchange(Exchange):
    """Knows which gradients it has made the mean of, until the next backward.

    Attributes:
        apart: another exchange, which averages otherwise, has some of its parameters: no hook knows which is meant.
        to_apply: a backward has averaged gradients since the last ``apply``.
    """

    transport: Transport
    apart = False
    to_apply = False

    def begin(self, late: bool = False) -> None:
        self.means: dict[int, tuple[torch.Tensor, int]] = {}
        if late or (self.transport.in_step and not self.apart):
            super().begin(late)
            # A rank whose batch reaches no variable comes in apply, after which Keras' own clipping sees the mean.
            self._flags = self._flags._replace(late=0.0)
        else:  # of one rank alone, maybe: saliency maps in a callback, or after fit
            with self.suspended():
                super().begin(late)

    def finish(self, flags: Flags) -> None:
        super().finish(flags)
        self.to_apply = self.exchanging
        if self.exchanging:
            gradients = [parameter.grad for _, parameter in self.training()]
            self.means = {id(one): (one, one._version) for one in gradients if one is not None}

    def averages_like(self, other: _Exchange) -> bool:
        """Whether it makes the same of gradients as another one."""
        return self._options == other._options and self.process_set is other.process_set

    def warn_of_changed(self) -> None:
        """Say where gradients of a backward that was not exchanged have been changed."""
        if any(is_other(one(), gradient, version) for one, gradient, version in self._local):
            warnings.warn(
                "optimizer.apply averages gradients that were changed after a backward() outside of fit's steps, where "
                "a rank may be alone. If they were clipped, it was by this rank's own norm: call hvdkit.keras.init() "
                "again before a loop of your own that follows fit, and backward() averages from its first step on.",
                stacklevel=7,
            )

    def average_now(self, given: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> list[Any]:
        """The means of gradients that no backward has averaged; ``.grad`` stays what it is. A collective."""
        self._register(parameter for parameter, _ in given)  # another optimizer of theirs may have taken them over
        named = {id(parameter) for parameter, _ in given}
        others = [one for _, one in self.training() if id(one) not in named]
        pairs = [*given, *((one, None) for one in others)]
        before = [(parameter, parameter.grad, parameter.requires_grad) for parameter, _ in pairs]
        for parameter, gradient in pairs:
            parameter.requires_grad_(parameter.requires_grad or gradient is not None)
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        try:
            self.begin(late=True)
            self.exchanging = self.active
            exchange_all([self])
            return [
                parameter.grad if gradient is None or parameter.grad is None else parameter.grad.to(gradient.dtype)
                for parameter, gradient in given
            ]
        finally:
            for parameter, gradient, trains in before:
                parameter.grad = gradient
                parameter.requires_grad_(trains)
            self.means = {}


def _like(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, which stays the program's own, as autograd would have left it in ``.grad``."""
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.to(parameter.device, parameter.dtype, copy=True).reshape(parameter.shape)


def _exchanges() -> list[_Exchange]:
    return [one for one in exchanges() if isinstance(one, _Exchange)]


class TorchGradients:
    """Makes the gradients that one Keras optimizer applies the mean over the ranks, or their sum.

    A sum is made of means, in ``apply``: what is a mean already can be averaged again.

    Args:
        transport: of the torch backend.
        options: how.
        process_set: Horovod's.
    """

    def __init__(self, transport: Transport, options: GradientOptions, process_set: Any) -> None:
        self._trained, self._sums, self._transport = TrainedVariables(), options.op == "sum", transport
        averaging, layout = replace(options, op="average"), BucketLayout(sparse_as_dense=True)
        self._exchange = _Exchange(self._trained, self._trained, averaging, layout, process_set)  # type: ignore[arg-type]
        self._exchange.transport, self._exchange.means = transport, {}

    def follow(self, variables: Sequence[Any]) -> None:
        """The optimizer has been built for these."""
        self._trained.follow(variables)
        self._keep_apart()
        self._exchange.follow_groups()

    def _keep_apart(self) -> None:
        """Average in ``apply`` alone what two optimizers train that average otherwise."""
        mine = set(map(id, self._trained.parameters()))
        for other in _exchanges():
            trained = other.optimizer()  # held weakly: hooks hold the exchange, and must not hold the parameters
            theirs = [] if trained is None else trained.param_groups[0]["params"]
            if not other.averages_like(self._exchange) and mine & set(map(id, theirs)):
                other.apart = self._exchange.apart = True

    # torch.compile would trace into Horovod's extension; outside of it, it calls this as it is.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """What ``apply`` was given, as the mean over the ranks or the sum."""
        passes.stepped()
        ranks = self._exchange.process_set
        if not ranks.included() or ranks.size() == 1:
            return gradients
        if any(one is None for one in variables):
            raise InvalidArgumentError(
                f"optimizer.apply got {len(gradients)} gradients for another number of variables; give one for each, "
                "None where there is none."
            )
        means = gradients if self._are_means(gradients, variables) else self._averaged(gradients, variables)
        for exchange in self._of(variables):
            exchange.to_apply = False
        self._exchange.take_fingerprint(self._trained)  # after as many allreduces on every rank, and before the step
        return [one if one is None else one * ranks.size() for one in means] if self._sums else means

    def _of(self, variables: list[Any]) -> list[_Exchange]:
        """The exchanges whose hooks average these variables' gradients as this optimizer asks for."""
        alike = [one for one in _exchanges() if one.averages_like(self._exchange)]
        return [one for one in alike if any(one.has(variable.value) for variable in variables)]

    def _averaged(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The means of gradients that no backward has averaged, or that were changed since."""
        self._exchange.warn_of_changed()
        self._transport.in_step = True  # a loop of the user's own, after fit
        self._trained.follow(variables)
        self._keep_apart()
        listeners.ready()
        pairs = zip(variables, gradients, strict=True)
        means = self._exchange.average_now([(variable.value, gradient) for variable, gradient in pairs])
        listeners.arrived()
        if listeners.wants_norm():
            listeners.tell_norm(total_norm([one for one in means if one is not None]))
        return means

    def _are_means(self, gradients: list[Any], variables: list[Any]) -> bool:
        """Whether the hooks have made these the mean, which they left in ``.grad``.

        Raises:
            InvalidArgumentError: they were changed there, and are about to be added up.
        """
        averaged = [one for one in self._of(variables) if one.to_apply]
        if not averaged:  # no backward since the last apply: this rank's batch reached no variable
            return False
        known: dict[int, tuple[torch.Tensor, int]] = {}
        for one in averaged:
            known.update(one.means)
        present = [one for one in gradients if one is not None]
        if not known.keys() >= set(map(id, present)):
            return False
        if self._sums and any(one._version != known[id(one)][1] for one in present):
            raise InvalidArgumentError(
                "optimizer.apply got gradients that were changed (clipped?) after backward(), when they were the mean "
                "over the ranks, and op='sum' adds them up now. Give the optimizer global_clipnorm=, clipnorm= or "
                "clipvalue=, or use op='average'."
            )
        absent = [one.value for one, gradient in zip(variables, gradients, strict=True) if gradient is None]
        return all(any(one.has(parameter) for one in averaged) or not parameter.requires_grad for parameter in absent)
