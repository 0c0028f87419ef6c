"""The table of the eight steps, and everything that is known about one script."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check import step_data, step_device, step_gradients, step_rate, step_state
from hvdkit.prepare.check.collectives import Branches
from hvdkit.prepare.check.data import Data
from hvdkit.prepare.check.facts import Facts
from hvdkit.prepare.check.training import Training
from hvdkit.prepare.check.verdict import MISSING, Verdict, undecided


class Case:
    """One script and what is known about it.

    Attributes:
        facts, training, data, branches: what rules ask.
        verdicts: of the eight steps, in order.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.facts = Facts(tree)
        self.training = Training(self.facts)
        self.data = Data(self.facts, self.training)
        self.branches = Branches(self.facts)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What is said of each step."""
        if self.facts.library == "none":
            doubt = next(iter([*self.facts.others, *self.facts.names.strangers()]), None)
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
        steps = {event.order for event in self.training.steps}
        return any(one.reached and (one.order in steps or self.facts.role(one.node)) for one in self.facts.events)


@dataclass(frozen=True)
class Step:
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
    Step(1, "initialise", lambda case: step_device.init(case.facts)),
    Step(2, "pin one GPU per process", lambda case: step_device.pin(case.facts)),
    Step(3, "scale the learning rate", lambda case: step_rate.learning_rate(case.facts, case.training)),
    Step(4, "distribute the optimizer", lambda case: step_gradients.distribute(case.facts, case.training)),
    Step(5, "broadcast the state", lambda case: step_state.broadcast(case.facts, case.training)),
    Step(6, "checkpoint on one rank", lambda case: step_state.checkpoint(case.facts, case.training)),
    Step(7, "shard the data", lambda case: step_data.shard(case.facts, case.training, case.data)),
    Step(8, "same steps per epoch", lambda case: step_data.steps_per_epoch(case.facts, case.training, case.data)),
)
