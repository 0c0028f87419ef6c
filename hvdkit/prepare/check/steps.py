"""The table of the eight steps, and what is said of each for one script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check import step_data, step_device, step_gradients, step_rate, step_state
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.verdict import MISSING, Verdict, undecided


@dataclass(frozen=True)
class StepRule:
    """A row of the table.

    Attributes:
        number: 1 to 8.
        name: in a few words.
        judge: whether a script does it.
    """

    number: int
    name: str
    judge: Callable[[Case], Verdict]


STEPS = (
    StepRule(1, "initialise", step_device.init),
    StepRule(2, "pin one GPU per process", step_device.pin),
    StepRule(3, "scale the learning rate", step_rate.learning_rate),
    StepRule(4, "distribute the optimizer", step_gradients.distribute),
    StepRule(5, "broadcast the state", step_state.broadcast),
    StepRule(6, "checkpoint on one rank", step_state.checkpoint),
    StepRule(7, "shard the data", step_data.shard),
    StepRule(8, "same steps per epoch", step_data.steps_per_epoch),
)


class JudgedCase(Case):
    """A script and what is said of its steps."""

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What is said of each step, in order."""
        if self.library == "none":
            doubt = next(iter([*self.others, *self.strangers()]), None)
            verdict = undecided(f"{doubt} may do it, which is not read here") if doubt else Verdict(MISSING)
            return [verdict] * len(STEPS)
        found = [step.judge(self) for step in STEPS]
        if self._runs:
            return found
        elsewhere = undecided("this text only defines functions; what calls them may do it")
        return [elsewhere if verdict.status == MISSING else verdict for verdict in found]

    @property
    def _runs(self) -> bool:
        """Whether the text is a script: something of the library or a training step runs from the module down."""
        steps = {event.order for event in self.steps}
        return any(one.reached and (one.order in steps or self.role(one.node)) for one in self.events)
