"""docs/libraries.md: its programs run on two ranks; unchanged programs train under hvdkit launch as under torchrun."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, run
from ranks import needs, on_ranks, rank_environment

pytestmark = needs("transformers", "accelerate", "lightning", "torchmetrics")


@on_ranks("torch", n=2, fresh=True)
def test_the_programs_of_the_page_run(hk, world, everyone, tmp_path, monkeypatch):
    """One after the other, those with a process group last; a metric that is older than ``init`` computes as others."""
    import test_integrations_lightning as lightning_tests
    import test_integrations_transformers as trainer_tests
    import torch

    headings = ("torchmetrics", "Lightning", "accelerate", "transformers: Trainer")
    code = {heading: blocks("libraries.md")[heading][0] for heading in headings}
    title = "Trainer, Lightning, accelerate, torchmetrics, KerasTuner, keras-hub, Hydra, Optuna"
    others = {title, "KerasTuner", "keras-hub", "Hydra and Optuna: a trial is a job"}
    assert set(code) == set(blocks("libraries.md")) - others
    run(code["torchmetrics"], {})

    loader = lightning_tests.loader(world.size)
    module = lightning_tests.classifier()
    run(code["Lightning"], {"module": module, "loader": loader})
    assert len(module.rates) == len(loader) // world.size
    hk.check_agreement(module, None, world)

    model = torch.nn.Linear(4, 2)
    names = run(code["accelerate"], {"model": model, "loader": loader})
    hk.check_agreement(model, None, world)
    assert type(names["model"]).__name__ == "Linear" and len(names["loader"]) == 6

    names = run(code["transformers: Trainer"], {"model": trainer_tests.classifier(), "data": trainer_tests.sentences()})
    everyone(None)
    assert names["trainer"].state.global_step == 9 and Path("runs/checkpoint-9/hvdkit_complete").exists()
    hk.check_agreement(names["model"], None, world)


@on_ranks("torch", n=2, fresh=True)
def test_a_metric_is_of_all_ranks_whenever_it_was_made(alone):
    """Imported and made before ``init``, made after it: the value of one process."""
    import torch
    import torchmetrics

    import hvdkit.torch as hk

    before = torchmetrics.classification.MulticlassAUROC(3)
    world = hk.init()
    after = torchmetrics.classification.MulticlassAUROC(3)
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(30, 3, generator=generator), torch.randint(0, 3, (30,), generator=generator)
    for metric in (before, after):
        metric.update(scores[world.rank :: world.size], labels[world.rank :: world.size])
        assert float(metric.compute()) == pytest.approx(
            float(torchmetrics.functional.auroc(scores, labels, "multiclass", num_classes=3))
        )


# Unchanged programs ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, time
sys.path.insert(0, {here!r})
what, out = sys.argv[1:]

def told(weights, **facts):
    return {{"weights": [float(abs(one).sum()).hex() for one in weights], **facts}}

if what == "transformers":
    import transformers, test_integrations_transformers as tests
    found = {{}}
    for kind in ("classifier", "language"):
        made = tests.trained(transformers.Trainer, 2, out, kind)
        found[kind] = told(made["weights"], norms=made["norms"], metrics=made["metrics"])
elif what == "accelerate":
    import accelerate, test_integrations_transformers as tests
    made = tests.Pair().train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), 2)
    assert made["wrapped"] == "DistributedDataParallel"
    found = told(made["weights"], norms=made["norms"], seen=made["seen"])
else:
    import test_integrations_lightning as tests
    module = tests.gan(plain=True)
    trainer = tests.trainer_of("ddp_find_unused_parameters_true", devices=2)
    trainer.fit(module, tests.loader(2))
    assert trainer.world_size == 2
    found = told([one.detach().numpy() for one in module.parameters()])
with open(f"{{out}}/rank-{{os.environ['RANK']}}.json", "w") as file:
    json.dump(found, file)
time.sleep(1)  # PyTorch aborts a process whose Gloo threads drop a tensor while Python ends (its pull request 179291)
"""


@pytest.mark.parallel
@pytest.mark.parametrize("what", ["transformers", "accelerate", "lightning"])
def test_an_unchanged_program_trains_under_the_launcher_as_under_torchrun(tmp_path, what):
    """A classifier and a language model by the Trainer; accelerate's loop; a GAN by manual optimization, in DDP."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(here=str(Path(__file__).parent)))
    launchers = {
        "hvdkit": [sys.executable, "-m", "hvdkit", "launch", "-n", "2", sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    }
    found: dict[str, Any] = {}
    for launcher, command in launchers.items():
        out = tmp_path / launcher
        out.mkdir()
        script = [*command, str(program), what, str(out)]
        done = subprocess.run(script, env=rank_environment(), cwd=out, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert "trained apart" not in done.stderr
        found[launcher] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found["hvdkit"] == found["torchrun"]
    assert found["hvdkit"][0] == found["hvdkit"][1]


# What is missing, and what a library changes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("accelerate", "accelerate", "transformers"),
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
    ],
)
def test_a_missing_library_is_one_sentence(module, library, extra):
    hidden = f"import sys; sys.modules[{library!r}] = None\ntry:\n    import hvdkit.integrations.{module}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}except ImportError as error:\n    print(type(error).__name__, error)"],
        env=rank_environment(),
        capture_output=True,
        text=True,
    )
    expected = f"needs {library}, which is not installed; pip install 'hvdkit[{extra}]'."
    assert done.stdout.strip().endswith(expected) and "MissingFrameworkError" in done.stdout, done.stderr


def test_what_hvdkit_replaces_in_the_libraries_is_still_there():
    """A version that renames one of these would leave DistributedDataParallel, or one process's part, in place."""
    import inspect

    import accelerate
    import transformers
    from lightning.pytorch.strategies import ParallelStrategy

    from hvdkit.integrations.lightning import HorovodStrategy
    from hvdkit.integrations.transformers import HorovodMixin

    model = inspect.signature(accelerate.Accelerator.prepare_model).parameters
    assert "evaluation_mode" in model
    source = inspect.getsource(accelerate.Accelerator)
    assert all(f"self.{name}" in source for name in ("_models", "_optimizers"))
    own = {name for name, value in vars(HorovodMixin).items() if isinstance(value, types.FunctionType)}
    replaced = own - {"__init__", "_divides_by_items"}
    assert replaced and all(hasattr(transformers.Trainer, name) for name in replaced)
    for name, value in vars(HorovodStrategy).items():
        if not name.startswith("_") and name not in ("strategy_name", "is_distributed", "world"):
            assert hasattr(ParallelStrategy, name), name
            assert isinstance(value, property) == isinstance(getattr(ParallelStrategy, name), property), name


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("library", "words", "says"),
    [
        ("hydra", ["--multirun", "rate=0.5,1", "ranks=2"], ["rate 0.5: loss 0.25", "rate 1: loss 0.5"]),
        ("optuna", [], ["2 trials, the best with rate "]),
    ],
)
def test_a_trial_of_a_sweep_is_a_job(tmp_path, library, words, says):
    pytest.importorskip(library, reason=f"needs {library} (`make test` installs it)")
    (code,) = (
        code for code in blocks("libraries.md")["Hydra and Optuna: a trial is a job"] if f"import {library}" in code
    )
    (tmp_path / "sweep.py").write_text(code)
    command = [sys.executable, "sweep.py", *words]
    done = subprocess.run(command, env=rank_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in says:
        assert line in done.stdout
