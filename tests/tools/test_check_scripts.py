"""`hvdkit check` on whole scripts: nothing in correct ones, each planted defect at its line and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.prepare.check.report import Checked, check_script
from hvdkit.prepare.check.rules import RULES
from hvdkit.prepare.check.source import Script, read_script

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "check"
CORRECT = sorted((DATA / "correct").glob("*.py"))
DEFECTIVE = sorted((DATA / "defective").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*/cnn.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))


def check_file(path: Path) -> Checked:
    return check_script(read_script(str(path)))


def check_text(text: str) -> Checked:
    return check_script(Script("script.py", ast.parse(text)))


def places(checked: Checked) -> set[tuple[int, str]]:
    return {(finding.line, finding.rule) for finding in checked.findings}


@pytest.mark.parametrize("path", CORRECT, ids=name_of)
def test_a_correct_script_has_no_finding(path: Path) -> None:
    checked = check_file(path)
    assert places(checked) == set()
    assert checked.library == path.stem.split("_")[0].replace("elsewhere", "horovod").replace("optional", "horovod")


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_the_distributed_examples_do_all_eight_steps(path: Path) -> None:
    checked = check_file(path)
    assert places(checked) == set()
    assert checked.library == "hvdkit"
    assert [verdict.status for verdict in checked.verdicts] == ["done"] * 8


def test_there_is_a_distributed_example_to_check() -> None:
    assert EXAMPLES


def test_every_example_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in (ROOT / "examples").glob("*/*.py")]
    assert len(paths) >= 8
    assert cli.run(["check", *paths]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/single.py")), ids=name_of)
def test_the_examples_for_one_process_use_no_library(path: Path) -> None:
    checked = check_file(path)
    assert (checked.library, checked.findings) == ("none", [])


@pytest.mark.parametrize("path", DEFECTIVE, ids=name_of)
def test_each_planted_defect_is_found_at_its_line_and_nothing_else(path: Path) -> None:
    lines = path.read_text().splitlines()
    planted = {(n, rule) for n, line in enumerate(lines, 1) for rule in re.findall(r"# finds: ([\w-]+)", line)}
    assert planted, "the script has no mark"
    assert places(check_file(path)) == planted


def test_every_rule_has_a_defective_script() -> None:
    found = {rule for path in DEFECTIVE for rule in re.findall(r"# finds: ([\w-]+)", path.read_text())}
    assert found == {rule.name for rule in RULES}


EVERYWHERE = "    if True:\n        "
MUTATIONS = [
    # a correct script, what is taken out, what is put in, the rules that must find it
    (
        "horovod_torch",
        "    if hvd.rank() == 0:\n        torch.save",
        f"{EVERYWHERE}torch.save",
        ["checkpoint-on-every-rank"],
    ),
    (
        "horovod_torch",
        "    if hvd.rank() == 0:\n        torch.save",
        "    if hvd.rank == 0:\n        torch.save",
        ["rank-not-called"],
    ),
    ("horovod_torch", "    sampler.set_epoch(epoch)\n", "", ["no-set-epoch"]),
    ("horovod_torch", "    hvd.init()\n", "", ["init-missing"]),
    ("horovod_torch", "        torch.cuda.set_device(hvd.local_rank())\n", "", ["gpu-not-pinned"]),
    ("horovod_torch", "set_device(hvd.local_rank())", "set_device(hvd.rank())", ["gpu-pinned-by-global-rank"]),
    ("horovod_torch", ", sampler=train_sampler, **kwargs", ", shuffle=True, **kwargs", ["dataset-not-sharded"]),
    (
        "horovod_torch",
        '    with FileLock(os.path.expanduser("~/.mnist.lock")):\n',
        "    if True:\n",
        ["download-on-every-rank"],
    ),
    (
        "horovod_torch",
        "        accuracy = test(model",
        "        accuracy = 0 if hvd.rank() else test(model",
        ["collective-on-some-ranks"],
    ),
    ("horovod_torch", "train_set, num_replicas=hvd.size(), rank=hvd.rank())", "train_set)", ["sampler-without-ranks"]),
    (
        "horovod_torch",
        "train_set, num_replicas=hvd.size(), rank=hvd.rank())",
        "train_set, num_replicas=hvd.size(), rank=hvd.local_rank())",
        ["dataset-sharded-wrongly"],
    ),
    (
        "horovod_torch",
        '    loss = metric_average(loss / len(sampler), "loss")\n',
        "    loss = loss / len(sampler)\n",
        ["metrics-not-averaged"],
    ),
    ("horovod_torch", "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", "", ["broadcast-missing"]),
    ("horovod_torch", "    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", "", ["broadcast-missing"]),
    (
        "horovod_torch",
        "    start = 0\n",
        "    start = 0\n    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
        [],
    ),
    ("horovod_torch_class", "scaled = config.lr * size()", "scaled = config.lr", ["learning-rate-unscaled"]),
    (
        "horovod_torch_class",
        "            if not self.is_root:\n                continue\n",
        "",
        ["checkpoint-on-every-rank"],
    ),
    ("horovod_torch_class", "        hvd.barrier()\n", "", ["download-without-barrier"]),
    ("horovod_torch_class", "        if local_rank() == 0:\n", "        if True:\n", ["download-on-every-rank"]),
    ("horovod_torch_class", "self.is_root = rank() == 0", "self.is_root = rank == 0", ["rank-not-called"]),
    ("horovod_torch_class", "config.lr * size()", "config.lr * size", ["rank-not-called"]),
    ("horovod_torch_class", "sampler=self.sampler)", "shuffle=True)", ["dataset-not-sharded"]),
    (
        "horovod_torch_class",
        "    hvd.init()\n    torch.manual_seed(0)\n    trainer = Trainer(Config(), pick_device())\n",
        "    torch.manual_seed(0)\n    trainer = Trainer(Config(), pick_device())\n    hvd.init()\n",
        ["init-too-late"],
    ),
    ("horovod_tensorflow", "    tape = hvd.DistributedGradientTape(tape)\n", "", ["optimizer-not-distributed"]),
    ("horovod_tensorflow", "    tape = hvd.Dist", "    other = hvd.Dist", ["optimizer-not-distributed"]),
    (
        "horovod_tensorflow",
        "dataset = dataset.shard(num_shards=hvd.size(), index=hvd.rank())\ndataset = dataset.shuffle(10000)",
        "dataset = dataset",
        ["dataset-not-sharded"],
    ),
    ("horovod_tensorflow", " // hvd.size()\nfor", "\nfor", ["steps-not-divided"]),
    (
        "horovod_tensorflow",
        "        hvd.broadcast_variables(model.variables, root_rank=0)\n",
        "",
        ["broadcast-missing"],
    ),
    (
        "horovod_tensorflow",
        "checkpoint = tf.train",
        "hvd.broadcast_variables(optimizer.variables, root_rank=0)\ncheckpoint = tf.train",
        ["broadcast-too-early"],
    ),
    ("horovod_tensorflow", "        checkpoint.save", "    checkpoint.save", ["checkpoint-on-every-rank"]),
    ("horovod_tensorflow", "gpus[hvd.local_rank()]", "gpus[hvd.rank()]", ["gpu-pinned-by-global-rank"]),
    (
        "horovod_tensorflow",
        "    accuracy = evaluate()\n    if hvd.rank() == 0:\n",
        "    if hvd.rank() == 0:\n        accuracy = evaluate()\n",
        ["collective-on-some-ranks"],
    ),
    ("horovod_tensorflow", 'os.environ["TF_USE_LEGACY_KERAS"] = "1"\n', "", ["keras-3-variables"] * 3),
    (
        "horovod_keras",
        'os.environ["TF_USE_LEGACY_KERAS"] = "1"\n',
        "",
        ["keras-3-callback"] * 3 + ["keras-3-optimizer"],
    ),
    ("horovod_keras", "        hvd.callbacks.BroadcastGlobalVariablesCallback(0),\n", "", ["broadcast-missing"]),
    (
        "horovod_keras",
        "    if hvd.rank() == 0:\n        callbacks.append",
        f"{EVERYWHERE}callbacks.append",
        ["checkpoint-on-every-rank"],
    ),
    ("horovod_keras", "0.001 * hvd.size()", "0.001", ["learning-rate-unscaled"]),
    ("horovod_keras", " // batch_size // hvd.size()", " // batch_size", ["steps-not-divided"]),
    ("horovod_keras", " // batch_size // hvd.size()", " // batch_size // hvd.size() + hvd.rank()", ["steps-differ"]),
    ("horovod_keras", "        hvd.callbacks.MetricAverageCallback(),\n", "", ["metrics-not-averaged"]),
    ("horovod_keras", ".shard(hvd.size(), hvd.rank())", ".shard(hvd.rank(), hvd.size())", ["dataset-sharded-wrongly"]),
    (
        "horovod_keras_arrays",
        "x_train, y_train = x_train[rank::size][:n], y_train[rank::size][:n]\n",
        "",
        ["dataset-not-sharded"],
    ),
    (
        "horovod_keras_arrays",
        "if rank == 0:\n    callbacks.append",
        "if True:\n    callbacks.append",
        ["checkpoint-on-every-rank"],
    ),
    (
        "horovod_keras_arrays",
        "rank, size = hvd.rank(), hvd.size()",
        "rank, size = hvd.rank, hvd.size",
        ["rank-not-called"],
    ),
    ("horovod_keras_arrays", "optimizer=hvd.DistributedOptimizer(opt)", "optimizer=opt", ["optimizer-not-distributed"]),
    ("horovod_keras_arrays", "callbacks=callbacks, ", "", ["broadcast-missing"]),
    ("hvdkit_torch", "lr=scale_lr(lr, world)", "lr=lr", ["learning-rate-unscaled"]),
    (
        "hvdkit_torch",
        "    optimizer = distribute(optimizer, model)\n",
        "    distribute(optimizer, model)\n",
        [],
    ),
    (
        "hvdkit_torch",
        "    optimizer = distribute(optimizer, model)\n",
        "    distribute(optimizer, model, op='adasum')\n",
        ["optimizer-not-distributed"],
    ),
    (
        "hvdkit_torch_ordinary",
        "    hk.distribute(newton, model)\n",
        "",
        ["optimizer-not-distributed"],
    ),
    (
        "horovod_torch_synchronize",
        "        with optimizer.skip_synchronize():\n            optimizer.step()",
        "        optimizer.step()",
        ["distributed-twice"],
    ),
    (
        "horovod_torch_synchronize",
        "        closure()\n        optimizer.step()",
        "        optimizer.step(closure)",
        ["closure-not-averaged"],
    ),
    (
        "horovod_torch_synchronize",
        "    cosine = Cos",
        "    optimizer.load_state_dict(torch.load('optimizer.pt'))\n    cosine = Cos",
        ["schedule-of-replaced-optimizer", "broadcast-too-early"],
    ),
    (
        "horovod_torch_synchronize",
        "            continue\n        optimizer.synchronize()\n",
        "            continue\n",
        ["gradients-not-averaged-yet", "optimizer-not-distributed"],
    ),
    ("hvdkit_torch", "    broadcast_state(model, optimizer)\n", "", ["broadcast-missing"]),
    (
        "hvdkit_torch",
        "loader = shard(train_set, world, BATCH, num_workers=2)",
        "loader = torch.utils.data.DataLoader(train_set, BATCH, shuffle=True)",
        ["dataset-not-sharded"],
    ),
    (
        "hvdkit_torch",
        "        checkpoints.save(",
        "        if world.rank == 0: checkpoints.save(",
        ["collective-on-some-ranks"],
    ),
    (
        "hvdkit_torch",
        "    if world.rank == 0:\n        torch.save",
        f"{EVERYWHERE}torch.save",
        ["checkpoint-on-every-rank"],
    ),
    (
        "hvdkit_torch",
        'average_metrics({"accuracy": (correct, count)}, world)["accuracy"]',
        "correct / count",
        ["metrics-not-averaged"],
    ),
    ("hvdkit_tensorflow", "            tape = hk.distribute(tape)\n", "", ["optimizer-not-distributed"]),
    ("hvdkit_keras", "hk.distribute(optimizer)\n", "", ["optimizer-not-distributed"]),
    ("hvdkit_keras", "    hk.BroadcastState(),\n", "", ["broadcast-missing"]),
    (
        "horovod_keras",
        'ModelCheckpoint("checkpoint-{epoch}.h5")',
        'BackupAndRestore("backup")',
        ["resume-on-some-ranks"],
    ),
    (
        "horovod_keras",
        'if hvd.rank() == 0:\n        callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))',
        'if True:\n        callbacks.append(tf.keras.callbacks.BackupAndRestore(f"backup-{hvd.rank()}"))',
        [],
    ),
    (
        "ddp_torchrun",
        "    if is_main_process():\n        torch.save",
        f"{EVERYWHERE}torch.save",
        ["checkpoint-on-every-rank"],
    ),
    ("ddp_torchrun", "reduce_mean(correct / seen)", "(correct / seen)", ["metrics-not-averaged"]),
    (
        "ddp_torchrun",
        "DDP(torch.nn.Linear(32, 10).to(device), device_ids=[local_rank])",
        "torch.nn.Linear(32, 10).to(device)",
        ["optimizer-not-distributed"],
    ),
    ("ddp_torchrun", "dist.get_rank() == 0", "dist.get_rank == 0", ["rank-not-called"]),
    (
        "ddp_spawn",
        "            if self.gpu_id == 0 and epoch % 5 == 0:",
        "            if epoch % 5 == 0:",
        ["checkpoint-on-every-rank"],
    ),
    ("ddp_spawn", "        self.loader.sampler.set_epoch(epoch)\n", "", ["no-set-epoch"]),
]


@pytest.mark.parametrize(("name", "old", "new", "rules"), MUTATIONS)
def test_a_correct_script_with_one_change_breaks_exactly_its_rule(
    name: str, old: str, new: str, rules: list[str]
) -> None:
    text = (DATA / "correct" / f"{name}.py").read_text()
    assert old in text
    assert [finding.rule for finding in check_text(text.replace(old, new, 1)).findings] == rules
