"""transformers.Trainer and accelerate with hvdkit's gradients: n ranks train as one process on the global batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import needs, on_ranks, rank_environment, warm

pytestmark = needs("transformers", "accelerate")

GLOBAL_BATCH, SAMPLES = 6, 36


class Rows(list):
    """A data set."""


def sentences() -> Rows:
    """Classified by their first word; short ones are filled up and masked."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = Rows()
    for number in range(SAMPLES):
        ids = torch.randint(1, 40, (8,), generator=generator)
        mask = (torch.arange(8) < 4 + number % 5).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": (ids[0] % 3).long()})
    return rows


def texts() -> Rows:
    """Of unequal lengths: a rank's mean loss is over fewer tokens than another's."""
    rows = Rows(dict(row) for row in sentences())
    for row in rows:
        row["labels"] = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
    return rows


def classifier(dropout: float = 0.0) -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=8, num_labels=3, **sizes, **rates)
    return transformers.BertForSequenceClassification(config)


def language_model() -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, **rates)
    )


def trainer_of(kind: Any, model: Any, rows: Rows, ranks: int, directory: Any, **options: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        str(directory),
        per_device_train_batch_size=GLOBAL_BATCH // ranks,
        per_device_eval_batch_size=12 // ranks,
        learning_rate=0.5,
        optim="sgd",
        warmup_steps=2,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no", **options},
    )
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=right)


def right(predicted: Any) -> dict[str, float]:
    scores, labels = predicted.predictions, predicted.label_ids
    return {"right": float((scores.argmax(-1) == labels).mean()), "seen": float(len(labels))}


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}


def trained(kind: Any, ranks: int, directory: Any, what: str) -> dict[str, Any]:
    model, rows = (classifier(), sentences()) if what == "classifier" else (language_model(), texts())
    options = ACCUMULATED if what == "language" else {"max_grad_norm": 0.3}
    trainer = trainer_of(kind, model, rows, ranks, directory, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "weights": [parameter.detach().numpy() for parameter in model.parameters()],
        "norms": [entry["grad_norm"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        "metrics": {name: trainer.evaluate()[name] for name in ("eval_loss", "eval_right", "eval_seen")},
    }


def as_one_process(what: str) -> dict[str, Any]:
    import tempfile

    import transformers

    with tempfile.TemporaryDirectory() as directory:
        return trained(transformers.Trainer, 1, directory, what)


def require_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    import numpy as np

    for mine, whole in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, whole, rtol=0, atol=tolerance)
    for name in ("norms", "losses"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


@on_ranks("torch", n=2, fresh=True)
def test_trainer_trains_as_one_process_on_the_global_batch(hk, world, alone, tmp_path):
    """Clipped, and the language model accumulated over unequal numbers of tokens; metrics are of all samples."""
    from hvdkit.integrations.transformers import Trainer, init

    init()
    for what in ("classifier", "language"):
        found = trained(Trainer, world.size, tmp_path, what)
        expected = alone(as_one_process, what=what)
        assert max(expected["norms"]) > 0.3, "nothing was clipped"
        require_alike(found, expected)


class Pair:
    """Two models with an optimizer each, and one optimizer of a model whose first layer is frozen."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(5)
        self.models = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)) for _ in "ab"]
        self.models[1][0].requires_grad_(False)
        self.optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in self.models]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 4, generator=generator)
        self.data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

    def train(self, accelerator: Any, ranks: int, one_by_one: bool = False) -> dict[str, Any]:
        """Four backwards of a batch of twelve; every second one steps, with clipped gradients."""
        import torch

        loader = torch.utils.data.DataLoader(self.data, batch_size=12 // ranks)
        if one_by_one:
            optimizers = [accelerator.prepare_optimizer(one) for one in self.optimizers]
            models = [accelerator.prepare_model(one) for one in self.models]
            loader = accelerator.prepare_data_loader(loader)
        else:
            *made, loader = accelerator.prepare(*self.models, *self.optimizers, loader)
            models, optimizers = made[:2], made[2:]
        norms = []
        for x, y in [batch for _ in range(3) for batch in loader]:
            with accelerator.accumulate(*models):
                for model, optimizer in zip(models, optimizers, strict=True):
                    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                    optimizer.step()
                    optimizer.zero_grad()
        seen = accelerator.gather_for_metrics(torch.arange(accelerator.process_index, 12, ranks))
        weights = [parameter.detach().numpy() for model in self.models for parameter in model.parameters()]
        return {"weights": weights, "norms": norms, "seen": sorted(seen.tolist()), "wrapped": type(models[0]).__name__}


def accelerate_as_one_process() -> dict[str, Any]:
    import accelerate

    return Pair().train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), 1)


@on_ranks("torch", n=2, fresh=True)
def test_an_accelerator_trains_as_one_process_on_the_global_batch(hk, world, alone):
    """Ranks begin with weights of their own, gradients are averaged once, metrics are of all samples."""
    import accelerate
    import numpy as np
    import torch
    from accelerate.state import AcceleratorState

    from hvdkit import errors
    from hvdkit.integrations.accelerate import Accelerator

    expected = alone(accelerate_as_one_process)
    for one_by_one in (False, True):
        pair = Pair()
        with torch.no_grad():
            for parameter in pair.models[0].parameters():
                parameter += world.rank
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        found = pair.train(accelerator, world.size, one_by_one)
        for mine, whole in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
        assert max(expected["norms"]) > 0.1 and found["seen"] == expected["seen"]
        assert found["wrapped"] == "Sequential", "DistributedDataParallel averages a second time"
    accelerator.prepare_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
    with pytest.raises(errors.InvalidArgumentError, match="SGD was prepared and holds parameters of no prepared model"):
        accelerator.backward(torch.ones((), requires_grad=True))

    AcceleratorState._reset_state(reset_partial_state=True)
    place = {name: os.environ.pop(name) for name in ("LOCAL_RANK", "WORLD_SIZE")}
    with pytest.raises(errors.TopologyMismatchError, match=r"process 0 of 1, Horovod rank \d of .*init\(\) before"):
        Accelerator.of(accelerate.Accelerator(cpu=True))
    os.environ.update(place)


# A training that is killed --------------------------------------------------------------------------------------------

RESUMED = """
import os, signal, sys
sys.path.insert(0, {here!r})
import test_integrations_transformers as tests
from hvdkit.integrations.transformers import Trainer, init

world = init()
class Killed(Trainer):
    def _save_rng_state(self, output_dir):
        if sys.argv[2] == "kill" and self.state.global_step == 6 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

model = tests.classifier(dropout=0.2)
options = dict(save_strategy="steps", save_steps=2, max_steps=9)
trainer = tests.trainer_of(Killed, model, tests.sentences(), world.size, sys.argv[1], **options)
trainer.train(resume_from_checkpoint=sys.argv[2] == "resume")
print("WEIGHTS", world.rank, sum(float(one.detach().double().abs().sum()) for one in model.parameters()).hex())
"""


@pytest.mark.parallel
def test_a_trainer_that_was_killed_while_it_saved_goes_on_as_if_it_had_not_been(tmp_path):
    """Rank 1 dies within the third checkpoint, which looks complete to the Trainer; the second is the last complete."""
    program = tmp_path / "train.py"
    program.write_text(RESUMED.format(here=str(Path(__file__).parent)))

    def run(directory: str, how: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "hvdkit",
            "launch",
            "-n",
            "2",
            *warm("torch").stub("rank_script", str(program)),
        ]
        return subprocess.run(
            [*command, str(tmp_path / directory), how],
            env=rank_environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def weights(done: subprocess.CompletedProcess[str]) -> list[str]:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return sorted(line.partition("WEIGHTS ")[2] for line in done.stdout.splitlines() if "WEIGHTS" in line)

    whole = weights(run("whole", "whole"))
    assert len({line.split()[1] for line in whole}) == 1 and len(whole) == 2
    assert run("killed", "kill").returncode != 0
    third = tmp_path / "killed" / "checkpoint-6"
    assert (third / "model.safetensors").exists() and not (third / "hvdkit_complete").exists()
    assert weights(run("killed", "resume")) == whole
    nothing = run("nothing", "resume")
    assert nothing.returncode != 0 and "found no complete checkpoint in" in nothing.stderr
