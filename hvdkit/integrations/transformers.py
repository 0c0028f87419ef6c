"""``transformers.Trainer`` with hvdkit's gradients: ``Trainer`` from here, the rest of the program stays.

Which samples each rank takes, the loss over all ranks' tokens, gathered predictions and who writes are the Trainer's
own, over ``torch.distributed``; gradients travel as in ``hvdkit.torch.distribute``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError, of_extra
from hvdkit.integrations.accelerate import Accelerator, init

with of_extra("transformers", "hvdkit.integrations.transformers needs transformers"):
    import transformers
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

__all__ = ["HorovodMixin", "Seq2SeqTrainer", "Trainer", "init"]

_COMPLETE = "hvdkit_complete"


class HorovodMixin:
    """In front of a Trainer, any class of one: ``class MyTrainer(HorovodMixin, trl.SFTTrainer)``.

    Raises, when it is made:
        InvalidArgumentError: the arguments ask for DeepSpeed or FSDP.
        TopologyMismatchError: ``TrainingArguments`` was made for other ranks than Horovod's; call ``init`` before it.
    """

    args: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    _loss_is_known = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_callback(_Complete)  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, whose ``Accelerator`` becomes hvdkit's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator.of(self.accelerator)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """The Trainer's; ``resume_from_checkpoint=True`` takes the last checkpoint that all ranks completed.

        Raises:
            InvalidArgumentError: there is none in ``output_dir``.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = hvd.broadcast_object(
                _last_complete(self.args.output_dir) if hvd.rank() == 0 else None, 0, name="hvdkit.trainer.resume"
            )
            if resume_from_checkpoint is None:
                raise InvalidArgumentError(
                    f"resume_from_checkpoint=True found no complete checkpoint in {self.args.output_dir}; leave it out "
                    "for the first run."
                )
        return super().train(resume_from_checkpoint, *arguments, **named)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """The Trainer's, but for models whose loss is the batch's mean whatever ``num_items_in_batch`` says (BERT's).

        The Trainer takes every model with ``**kwargs`` for one that divides by that number, and multiplies its loss by
        the number of processes (transformers 5.24).
        """
        if not self._loss_is_known and self.model_accepts_loss_kwargs and self.compute_loss_func is None:  # type: ignore[attr-defined]
            self._loss_is_known = True
            self.model_accepts_loss_kwargs = self._divides_by_items(model, inputs)
        return super().compute_loss(model, inputs, *arguments, **named)  # type: ignore[misc]

    @torch.no_grad()
    def _divides_by_items(self, model: Any, inputs: Any) -> bool:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()  # the same twice: without dropout
        losses = [
            super(HorovodMixin, self).compute_loss(model, dict(inputs), num_items_in_batch=torch.tensor(number))  # type: ignore[misc]
            for number in (1, 2)
        ]
        for module, training in modes:
            module.training = training
        differs = (losses[0] != losses[1]).float().cpu()
        return bool(hvd.allreduce(differs, op=hvd.Max, name="hvdkit.trainer.loss"))


class Trainer(HorovodMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` over Horovod, see ``HorovodMixin``; arguments are the same."""


class Seq2SeqTrainer(HorovodMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` over Horovod, see ``HorovodMixin``; arguments are the same."""


def _last_complete(directory: str) -> str | None:
    """The newest checkpoint that is marked; where a plain Trainer wrote them, the newest whose state can be read."""
    found = [path for path in Path(directory).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step_of(path).isdigit()]
    found.sort(key=lambda path: int(_step_of(path)), reverse=True)
    marked = [path for path in found if (path / _COMPLETE).exists()]
    return next((str(path) for path in marked or found if _is_readable(path / TRAINER_STATE_NAME)), None)


def _step_of(checkpoint: Path) -> str:
    return checkpoint.name.rpartition("-")[2]


def _is_readable(state: Path) -> bool:
    try:
        json.loads(state.read_text())
    except (OSError, ValueError):
        return False
    return True


class _Complete(transformers.TrainerCallback):  # type: ignore[misc]
    """Marks a checkpoint when all ranks have written their part of it: a kill leaves one that looks like the last."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if hvd.size() > 1:
            hvd.barrier()
        if args.should_save:
            (Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / _COMPLETE).touch()
