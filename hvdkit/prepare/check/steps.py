"""The table of the eight steps, and what is said of each for one script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check import step_data, step_gradients, step_start, step_state
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.verdict import MISSING, Verdict, done, may_do_it, undecided


@dataclass(frozen=True)
class StepRule:
    """A row of the table.

    Attributes:
        number: 1 to 8.
        name: in a few words.
        judge: whether a script does it.
        done_by: calls that do it; the judge is asked where there are none.
    """

    number: int
    name: str
    judge: Callable[[Case], Verdict]
    done_by: tuple[Role, ...] = ()


STEPS = (
    StepRule(1, "initialise", step_start.init),
    StepRule(2, "pin one GPU per process", step_start.pin),
    StepRule(3, "scale the learning rate", step_start.learning_rate, (Role.FIT,)),
    StepRule(4, "distribute the optimizer", step_gradients.distribute, (Role.DISTRIBUTE, Role.FIT, Role.LOAD_MODEL)),
    StepRule(5, "broadcast the state", step_state.broadcast),
    StepRule(6, "checkpoint on one rank", step_state.checkpoint),
    StepRule(7, "shard the data", step_data.shard, (Role.FIT,)),
    StepRule(8, "same steps per epoch", step_data.steps_per_epoch, (Role.STEPS, Role.FIT)),
)


class JudgedCase(Case):
    """A script and what is said of its steps."""

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What is said of each step, in order."""
        if self.library == "none":
            doubt = next(iter([*self.others, *self.strangers()]), None)
            return [may_do_it(doubt) if doubt else Verdict(MISSING)] * len(STEPS)
        found = [self._verdict(step) for step in STEPS]
        training = {event.order for event in self.steps}
        if any(one.reached and (one.order in training or self.role(one.node)) for one in self.events):
            return found
        elsewhere = undecided("this text only defines functions; what calls them may do it")
        return [elsewhere if verdict.status == MISSING else verdict for verdict in found]

    def _verdict(self, step: StepRule) -> Verdict:
        calls = self.having(*step.done_by)
        return done(self.lines(calls)) if calls else step.judge(self)
