"""What `hvdkit check` says of each of the eight steps: done with its lines, missing, not needed or undecided."""

import ast
from pathlib import Path

import pytest

from hvdkit.prepare.check.rules import Checked, check_script
from hvdkit.prepare.check.source import Script, read_script
from hvdkit.prepare.check.steps import Verdict

CORRECT = Path(__file__).parents[1] / "data" / "check" / "correct"


def check_text(text: str) -> Checked:
    return check_script(Script("script.py", ast.parse(text)))


def steps_of(name: str) -> dict[int, Verdict]:
    return dict(enumerate(check_script(read_script(str(CORRECT / f"{name}.py"))).verdicts, start=1))


def line(name: str, text: str) -> int:
    """The first line with a text in a correct script."""
    lines = (CORRECT / f"{name}.py").read_text().splitlines()
    return next(number for number, content in enumerate(lines, 1) if text in content)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "horovod_torch",
            {
                1: ["hvd.init()"],
                2: ["set_device(hvd.local_rank())"],
                3: ["lr=args.lr * hvd.size()", 'group["lr"]'],
                4: ["hvd.DistributedOptimizer("],
                5: ["hvd.broadcast_parameters(", "hvd.broadcast_optimizer_state("],
                6: ["torch.save("],
                7: ["train_sampler = DistributedSampler(", "train_loader = DataLoader("],
            },
        ),
        (
            "horovod_tensorflow",
            {
                1: ["hvd.init()"],
                2: ["set_visible_devices(gpus[hvd.local_rank()]"],
                3: ["tf.optimizers.Adam(args.lr * hvd.size())"],
                4: ["hvd.DistributedGradientTape(tape)"],
                5: ["broadcast_variables(model.variables", "broadcast_variables(optimizer.variables"],
                6: ["checkpoint.save("],
                7: ["dataset.shard("],
                8: ["dataset.take(steps)"],
            },
        ),
        ("ddp_torchrun", {1: ["init_process_group("], 4: ["model = DDP("], 6: ["torch.save("]}),
    ],
)
def test_done_names_the_lines(name: str, texts: dict[int, list[str]]) -> None:
    steps = steps_of(name)
    for number, pieces in texts.items():
        assert steps[number].status == "done"
        assert set(steps[number].lines) >= {line(name, piece) for piece in pieces}


def test_ddp_broadcasts_itself_and_its_sampler_evens_out_the_steps() -> None:
    steps = steps_of("ddp_torchrun")
    assert (steps[5].status, steps[5].lines) == ("not needed", (line("ddp_torchrun", "model = DDP("),))
    assert steps[8].status == "not needed"
    assert "same number" in steps[8].note


def test_a_step_that_another_module_may_do_is_undecided_and_names_it() -> None:
    steps = steps_of("elsewhere")
    assert steps[1].status == "done"
    assert {number for number in range(2, 9) if steps[number].status == "undecided"} == set(range(2, 9))
    assert steps[4].note.startswith("build may do it")
    assert all(verdict.note for verdict in steps.values() if verdict.status == "undecided")


def test_random_draws_of_a_share_of_the_steps_are_left_to_the_reader() -> None:
    checked = check_text(
        "import tensorflow as tf\n"
        "import hvdkit.keras as hk, keras\n"
        "world = hk.init()\n"
        "(x, y), _ = keras.datasets.mnist.load_data()\n"
        "data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(10000).batch(128)\n"
        "model = keras.Sequential([keras.layers.Dense(10)])\n"
        "model.compile(hk.distribute(keras.optimizers.Adam(hk.scale_lr(0.001, world))), 'mse')\n"
        "model.fit(data, steps_per_epoch=500 // world.size, callbacks=[hk.BroadcastState()])\n"
    )
    assert checked.findings == []
    assert checked.verdicts[6].status == "undecided"
    assert "at random" in checked.verdicts[6].note
    assert (checked.verdicts[7].status, checked.verdicts[7].lines) == ("done", (8,))


def test_a_batch_divided_by_the_number_of_processes_needs_no_larger_rate() -> None:
    text = (CORRECT / "horovod_torch_class.py").read_text()
    changed = text.replace("config.lr * size()", "config.lr").replace(
        "DataLoader(dataset, self.config.batch_size,", "DataLoader(dataset, self.config.batch_size // size(),"
    )
    checked = check_text(changed)
    assert checked.findings == []
    assert checked.verdicts[2].status == "not needed"


def test_a_data_set_cut_to_as_many_samples_for_each_rank_needs_no_count_of_steps() -> None:
    text = (CORRECT.parents[1] / "port" / "after" / "single_tape.py").read_text()
    assert check_text(text).verdicts[7].status == "not needed"
    rounds = ".batch(world.size, drop_remainder=True)"
    assert rounds in text and check_text(text.replace(rounds, ".batch(4)")).verdicts[7].status == "undecided"


def test_data_that_another_module_loads_may_be_a_part() -> None:
    text = (CORRECT / "horovod_torch_class.py").read_text()
    changed = text.replace("import os\n", "import os\nfrom tools import load\n")
    changed = changed.replace('CIFAR10("data", transform=ToTensor())', "torch_data.TensorDataset(*load())")
    changed = changed.replace("DistributedSampler(dataset, size(), rank())", "RandomSampler(dataset)")
    verdict = check_text(changed).verdicts[6]
    assert (verdict.status, "the data come from load" in verdict.note) == ("undecided", True)


@pytest.mark.parametrize("option", ["op=hvd.Sum", "op=hvd.Adasum"])
def test_summed_gradients_need_no_larger_rate(option: str) -> None:
    text = (CORRECT / "horovod_torch_class.py").read_text()
    changed = text.replace("config.lr * size()", "config.lr").replace("(base, named", f"(base, {option}, named")
    checked = check_text(changed)
    assert checked.findings == []
    assert checked.verdicts[2].status == "not needed"


def test_a_module_of_functions_is_not_blamed_for_what_its_callers_do() -> None:
    checked = check_text(
        "import torch\n"
        "import horovod.torch as hvd\n"
        "def make(model, lr):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size())\n"
        "    return hvd.DistributedOptimizer(optimizer)\n"
        "def save(model):\n"
        "    torch.save(model.state_dict(), 'model.pt')\n"
        "def step(model, optimizer, x):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert checked.findings == []
    assert checked.verdicts[0].status == "undecided"


@pytest.mark.parametrize("data", ["data", "data.shard(hvd.size(), hvd.rank())"])
@pytest.mark.parametrize("steps", ["10", "samples // batch"])
def test_callers_may_have_divided_data_and_steps(data: str, steps: str) -> None:
    checked = check_text(
        "import keras\nimport horovod.tensorflow.keras as hvd\nhvd.init()\n"
        "def train(model, data, samples, rate, batch=128):\n"
        f"    x = {data}.repeat().batch(batch)\n"
        "    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate)))\n"
        f"    model.fit(x, steps_per_epoch={steps}, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])\n"
    )
    assert [one.rule for one in checked.findings] == ["keras-3-optimizer"]
    assert checked.verdicts[7].status == "undecided"


def test_what_is_wrong_in_itself_is_found_in_a_module_of_functions_too() -> None:
    text = "import horovod.torch as hvd\ndef log(loss):\n    if hvd.rank() == 0:\n        print(hvd.allreduce(loss))\n"
    assert [(one.line, one.rule) for one in check_text(text).findings] == [(4, "collective-on-some-ranks")]


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("import horovod.torch as hvd\nhvd.init()", "horovod"),
        ("from horovod import torch as hvd\nhvd.init()", "horovod"),
        ("import horovod.torch\nhorovod.torch.init()", "horovod"),
        ("from horovod.tensorflow import *\ninit()", "horovod"),
        ("def f():\n    import horovod.keras as h\n    h.init()\nf()", "horovod"),
        ("import importlib\nhvd = importlib.import_module('horovod.torch')\nhvd.init()", "horovod"),
        ("from hvdkit import torch as hk\nhk.init()", "hvdkit"),
        ("from hvdkit.keras import init\ninit()", "hvdkit"),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", "ddp"),
        ("from torch import nn\nnn.parallel.DistributedDataParallel(nn.Linear(1, 1))", "ddp"),
        ("import torch", "none"),
        ("from hvdkit import datasets\ndatasets.load('digits')", "none"),
        ("from accelerate import Accelerator\nAccelerator()", "none"),
        ("", "none"),
    ],
)
def test_the_library_is_known_by_its_imports(text: str, library: str) -> None:
    assert check_text(text).library == library


def test_without_a_library_the_steps_are_missing_and_nothing_is_a_finding() -> None:
    checked = check_text("import torch\ntorch.save({}, 'x.pt')")
    assert {verdict.status for verdict in checked.verdicts} == {"missing"}
    assert checked.findings == []


def test_another_library_may_do_the_steps() -> None:
    checked = check_text("from accelerate import Accelerator\nAccelerator()")
    assert checked.others == ["Accelerate"]
    assert {verdict.status for verdict in checked.verdicts} == {"undecided"}
