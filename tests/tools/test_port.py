"""`hvdkit port`: what it writes into scripts, what it leaves, and that all else stays byte for byte."""

import ast
import difflib
import os
import re
import stat
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.check.rules import check_script
from hvdkit.prepare.check.source import Script
from hvdkit.prepare.port import edits
from hvdkit.prepare.port.cli import Ported, port_script

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "port"
BEFORE = sorted((DATA / "before").glob("*.py"))
CORPUS = sorted([*BEFORE, *(ROOT / "tests" / "data" / "check").glob("*/*.py"), *(ROOT / "examples").glob("*/*.py")])
HEAD = "import torch\nfrom torch.utils.data import DataLoader\n"
WRITES = """\
import csv, json, logging, mlflow, os, wandb
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

def evaluate(model):
    model.eval()
    return model

"""
LOOP = """\
data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=2)
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""


def ported(content: str | bytes, path: str = "train.py") -> Ported:
    made = content.encode() if isinstance(content, str) else content
    return port_script(edits.ScriptText(path, made, ast.parse(made)))


def after(content: str) -> str:
    return ported(content).after.decode()


def one_reason(content: str, changed: bool = True) -> str:
    found = ported(content)
    assert (found.after != content.encode()) == changed
    assert found.left
    return found.left[0].why


@pytest.mark.parametrize("path", BEFORE, ids=lambda path: path.stem)
def test_a_script_is_ported_whole(path: Path) -> None:
    found = port_script(edits.read(str(path)))
    wanted = DATA / "after" / path.name
    if os.environ.get("HVDKIT_GOLDEN"):
        wanted.write_bytes(found.after)
    assert found.after.decode() == wanted.read_text()
    assert found.left == ()


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_script_is_python_again_with_no_finding_that_is_not_listed_and_stays_the_second_time(path: Path) -> None:
    found = port_script(edits.read(str(path)))
    tree = ast.parse(found.after)
    listed = {(one.line, one.why) for one in found.left}
    assert {(one.line, one.what) for one in check_script(Script("", tree)).findings} <= listed
    assert port_script(edits.ScriptText("train.py", found.after, tree)).after == found.after
    if found.library == "hvdkit":
        assert found.after == path.read_bytes()


def test_latin_1_is_kept() -> None:
    content = ("# -*- coding: latin-1 -*-\n" + HEAD + LOOP + "print('ä')\n").encode("latin-1")
    found = ported(content)
    assert b"hk.shard" in found.after and found.after.endswith("print('ä')\n".encode("latin-1"))


# One process ----------------------------------------------------------------------------------------------------------


def test_the_loader_keeps_its_options() -> None:
    made = after(HEAD + LOOP.replace("batch_size=2", "2, True, num_workers=1, drop_last=True"))
    assert "loader = hk.shard(data, world, 2, shuffle=True, num_workers=1)" in made
    assert "hk.shard(data, world, batch_size=2, shuffle=False)" in after(HEAD + LOOP)


def test_a_rate_that_is_not_given_is_the_optimizers_own() -> None:
    made = after(HEAD + LOOP.replace("SGD(model.parameters(), lr=0.1)", "Adam(model.parameters())"))
    assert "Adam(model.parameters(), lr=hk.scale_lr(0.001, world))" in made
    groups = "[{'params': model.parameters(), 'lr': 0.2}]"
    made = after(HEAD + LOOP.replace("model.parameters()", groups))
    assert "'lr': hk.scale_lr(0.2, world)}], lr=hk.scale_lr(0.1, world))" in made


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("target = copy.deepcopy(model).eval()", ["target"]),
        ("average = torch.optim.swa_utils.AveragedModel(model, 'cpu')", ["average"]),
        ("target = torch.nn.Linear(2, 1)\ntarget.load_state_dict(model.state_dict())", ["target"]),
        ("other = copy.deepcopy(data)\nthird = torch.nn.Linear(2, 1)", []),
    ],
)
@pytest.mark.parametrize("place", ["optimizer", "loader"])
def test_copies_of_the_model_are_broadcast_too(line: str, sent: list[str], place: str) -> None:
    """They hold a rank's own first weights."""
    made = after(HEAD + "import copy\n" + LOOP.replace(f"{place} = ", f"{line}\n{place} = "))
    wanted = ["model, optimizer", *sent]
    assert re.findall(r"^hk\.broadcast_state\((.*)\)$", made, re.MULTILINE) == wanted
    assert made.index("hk.broadcast_state") > made.index(line)


def test_files_are_written_by_the_root_and_data_fetched_once() -> None:
    made = after(
        HEAD + "import torchvision\n" + LOOP.replace(
            "torch.utils.data.TensorDataset(torch.zeros(8, 2))", "torchvision.datasets.MNIST('d', download=True)"
        ) + "torch.save(model, 'm.pt')\n"
    )  # fmt: skip
    assert "if world.local_rank == 0:\n    torchvision.datasets.MNIST('d', download=True)\nhvd.barrier()\n" in made
    assert "data = torchvision.datasets.MNIST('d', download=False)" in made
    assert "if world.is_root:\n    torch.save(model, 'm.pt')\n" in made
    keras = TWO_FITS.replace("data = ", "_, (x, y) = keras.datasets.mnist.load_data()\ndata = ", 1)
    assert (
        "if world.local_rank == 0:\n    keras.datasets.mnist.load_data()\n"
        "hvd.allgather_object(None)  # the others wait\n_, (x, y) = keras.datasets.mnist.load_data()\n"
    ) in after(keras)


def test_a_head_that_is_trained_first_is_sent_with_its_body() -> None:
    """The bodies of the ranks began with other weights."""
    model = "body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)\nmodel = torch.nn.Sequential(body, head)"
    made = after(HEAD + LOOP.replace("model = torch.nn.Linear(2, 1)", model).replace("model.par", "head.par"))
    assert "hk.distribute(optimizer, model)" in made and "hk.broadcast_state(model, optimizer)" in made


def test_advice_is_in_the_scripts_own_framework() -> None:
    fits = TWO_FITS.replace("model.fit(train, epochs=2", "for _ in range(2):\n    model.fit(train, epochs=2")
    for content, missing in [
        (fits, "torch"),
        (HEAD + LOOP.replace("in loader:", "in DataLoader(data, 2):"), "Broadcast"),
    ]:
        found = ported(content)
        assert len(found.left) >= 2
        assert all("hvd." not in one.write and missing not in one.write for one in found.left)


@pytest.mark.parametrize(
    "lines",
    [
        ["writer = SummaryWriter()", "writer.add_scalar('loss', 1.0, 0)", "if writer:\n    writer.close()"],
        ["wandb.init()", "wandb.log({'loss': 1.0})"],
        ["run = mlflow.start_run()", "mlflow.log_metric('loss', 1.0)"],
        ["logging.basicConfig(filename='log')"],
        ["handler = logging.FileHandler('log')", "logging.getLogger().addHandler(handler)"],
        ["file = open('log.csv', 'w')", "rows = csv.writer(file)", "rows.writerow([1])", "file.close()"],
        ["with open('log', 'w') as file:\n    json.dump({}, file)"],
        ["os.makedirs('out', exist_ok=True)"],
        ["if epoch % 2: print(epoch)"],
    ],
)
def test_what_writes_or_prints_does_so_on_the_root(lines: list[str]) -> None:
    """And so does all that uses it: on the other ranks there is none."""
    found = ported(HEAD + WRITES + LOOP + "\n".join(lines) + "\n")
    made = found.after.decode()
    assert found.left == () and made.count("if world.is_root:\n") == len(lines)
    for line in lines:
        inside = line.replace("\n", "\n    ")
        assert f"if world.is_root:\n    {inside}\n" in made


def test_a_text_over_lines_stays_under_a_guard_and_the_last_line_may_have_no_end() -> None:
    made = after(HEAD + LOOP + "if epoch:  # the last\n  print('''a\n  b''')")
    assert made.endswith("if epoch:  # the last\n  if world.is_root:\n      print('''a\n  b''')")
    made = after("import horovod.torch as hvd\nhvd.init()")
    assert made == "import hvdkit.torch as hk\nworld = hk.init()"


def test_seeds_make_the_data_the_same_and_each_ranks_numbers_its_own() -> None:
    split = "data, _ = torch.utils.data.random_split(data, [6, 2])\nmodel = "
    made = after(HEAD + LOOP.replace("model = ", split))
    order = [
        "hk.pin_device(world)\ntorch.manual_seed(0)\n",
        "random_split",
        "hk.seed_everything(0, world)\nhk.broadcast",
    ]
    assert sorted(order, key=made.index) == order
    made = after(HEAD + LOOP.replace("model = ", "torch.manual_seed(3)\nmodel = "))
    assert "hk.seed_everything(3, world)\nhk.broadcast_state(model, optimizer)\n" in made
    given = LOOP.replace("model = ", "torch.manual_seed(args.seed)\nmodel = ")
    assert "hk.seed_everything(args.seed, world)\nhk.broadcast" in after(HEAD + "args = parse()\n" + given)
    assert "same numbers from this seed" in one_reason(
        HEAD + "args = parse()\nif args.seed:\n    torch.manual_seed(args.seed)\n" + LOOP
    )
    assert "seed" not in after(HEAD + LOOP)
    noise = TWO_FITS.replace("(x, y))", "(x + tf.random.normal([2]), y))")
    assert "seed" not in after(noise)  # which each rank is to draw by itself
    dropout = TWO_FITS.replace("[keras.Input", "[keras.layers.Dropout(0.5), keras.Input")
    assert ported(dropout).left == ()
    seeded = dropout.replace("data = ", "keras.utils.set_random_seed(1)\ndata = ", 1)
    assert "same numbers from this seed" in one_reason(seeded)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("for epoch", "device = 'cuda:0'\nfor epoch", "the same GPU on every rank"),
        ("optimizer.step()\n", "optimizer.step()\n        if loss < 0.1:\n            break\n", "may end the training"),
        ("for epoch", "s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nfor epoch", "one rank's own"),
        ("for epoch", "s = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0)\nfor epoch", "rates of its own"),
        ("model = ", "model = torch.nn.DataParallel(m) if 0 else ", "devices by their numbers"),
        ("batch_size=2", "batch_sampler=mine", "its sampler"),
        ("in loader:", "in DataLoader(data, 2):", "made anew in a loop"),
        ("DataLoader(data", "DataLoader(*data", "the text does not show"),
        ("model.parameters()", "[p for m in (a, b) for p in both(m)]", "0 models"),
        ("loss.backward()", "total = loss / len(loader.dataset)\n        loss.backward()", "counts all samples"),
        ("loss.backward()", "total = loss / len(data)\n        loss.backward()", "counts all samples"),
        ("optimizer.step()\n", "optimizer.step()\nlogs = [open('l', 'w')]\n", "`open` runs on every rank"),
        ("for epoch", "with mlflow.start_run():\n  for epoch", "in a statement that trains, too"),
        ("for epoch", "writer = SummaryWriter()\nruns = [writer]\nfor epoch", "as part of a larger statement"),
        ("optimizer.step()\n", "optimizer.step()\nprint(evaluate(model))\n", "calls `model.eval`"),
        (
            "optimizer.step()\n",
            "optimizer.step()\nfor (x,) in loader:\n    model(x)\n",
            "same loader trains and evaluates",
        ),
        ("for epoch", "lr = wandb.config.lr\nfor epoch", "is read on every rank"),
        ("model = ", "from numpy.random import rand\nmodel = rand() and ", "without a seed every rank draws"),
        ("optimizer.step()\n", "optimizer.step()\ntorch.save(model, 'm')\ntorch.load('m')\n", "may read it"),
        ("optimizer.step()\n", "optimizer.step()\ntorch.save(model, f'{d}/m')\ntorch.load(f'{d}/m')\n", "may read it"),
        ("optimizer.step()\n", "optimizer.step()\ntorch.save(model, d + '/m')\ntorch.load(d + '/m')\n", "may read it"),
        ("optimizer.step()\n", "optimizer.step()\n        tracker.save(loss)\n", "what `tracker.save` does"),
        ("from torch.utils", "import os; from torch.utils", "shares its line"),
        ("torch.nn.Linear(2, 1)", "torch.hub.load('a', 'b')", "may hold BatchNorm"),
    ],
)
def test_what_is_not_certain_is_listed(old: str, new: str, why: str) -> None:
    assert old in HEAD + LOOP
    loop = LOOP.replace(old, new, 1)
    if new.startswith("with "):
        loop = loop.replace("\n    ", "\n      ")
    found = ported(HEAD.replace(old, new, 1) + ("" if "import os;" in new else WRITES) + loop)
    assert any(why in one.why for one in found.left), found.left
    assert all(one.write and 1 <= one.line <= len(found.after.splitlines()) for one in found.left)


def test_a_listed_line_is_that_of_the_ported_script() -> None:
    found = ported(HEAD + LOOP.replace("for epoch", "device = 'cuda:0'\nfor epoch"))
    assert found.after.decode().splitlines()[found.left[0].line - 1] == "device = 'cuda:0'"


TWO_FITS = """\
import keras
import numpy as np
import tensorflow as tf
data = {"train": tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1))))}
train = data["train"].batch(2).repeat()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), loss="mse")
model.fit(train, epochs=2, steps_per_epoch=4)
model.compile(keras.optimizers.SGD(0.01), loss="mse")
model.fit(train.map(lambda x, y: (x, y)), steps_per_epoch=len(x) // 2)
"""
ONE_TAPE = """\
import keras
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices(tf.ones((8, 2))).batch(2)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

for x in data:
    step(x)
for x in data:
    step(x)
"""


def test_every_edit_is_made_once_a_node() -> None:
    """Two calls of fit share a pipeline, two loops a tape."""
    made = after(TWO_FITS)
    assert made.count(".shard(") == 1 and made.count("hk.BroadcastState()") == 2
    assert "steps_per_epoch=max(1, 4 // world.size)" in made
    assert "steps_per_epoch=max(1, int(len(x) // 2) // world.size)" in made
    made = after(ONE_TAPE)
    assert made.count(".shard(") == made.count("hk.distribute(tf.GradientTape())") == 1
    assert made.count("hk.distribute") == made.count("hk.broadcast_state") == 1


def test_an_optimizer_on_either_branch_is_distributed_there() -> None:
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    either = f"if data:\n    {made}else:\n    {made.replace('SGD', 'Adam')}"
    found = after(HEAD + LOOP.replace(made, either))
    assert found.count("    optimizer = hk.distribute(optimizer, model)\n") == 2


@pytest.mark.parametrize("use", ["validation_data=train", "epochs=1)\nmodel.evaluate(train"])
def test_data_that_fit_trains_and_evaluates_on_stay(use: str) -> None:
    content = TWO_FITS.replace("epochs=2, steps_per_epoch=4", use)
    assert any("trained and evaluated on" in one.why for one in ported(content).left)
    assert ".shard(" not in after(content)


# Horovod and DDP ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("import horovod.torch as hvd\nif input():\n    hvd.init()\nprint(hvd.rank())\n", "on a condition"),
        ("import horovod.torch as hvd\nhvd.init()\nhvd.init()\n", "several places"),
        ("import horovod.torch as hvd\nimport horovod.tensorflow as h\nhvd.init()\nh.init()\n", "several of Horovod"),
        ("import horovod.spark as hvd\nhvd.run(print)\n", "Horovod on Spark or Ray distributes"),
        ("import accelerate\nimport torch\n", "Accelerate distributes it"),
        (
            "import horovod.tensorflow as hvd\nimport tensorflow as tf\nhvd.init()\ne = tf.estimator.Estimator(f)\n"
            "e.train(f, hooks=[hvd.BroadcastGlobalVariablesHook(0)])\n",
            "is TensorFlow 1's",
        ),
        ("import tensorflow as tf\ntf.train.AdamOptimizer().minimize(loss)\n", "is TensorFlow 1's"),
        (
            "import tensorflow.compat.v1 as tf\ntf.disable_eager_execution()\nwith tf.Session() as s:\n    s.run(x)\n",
            "is TensorFlow 1's",
        ),
        ("print(1)\n", "nothing that trains"),
        (HEAD + LOOP.replace("data = ", "seed = 1; data = "), "shares its line"),
        (HEAD + LOOP + "\fprint(1)\n", "form feeds in front of code"),
        ((HEAD + LOOP).replace("\n", "\r"), "end in CR alone"),
        ("import torch.distributed as dist\ndist.init_process_group()\ndist.scatter(1)\n", "torch.distributed.scatter"),
    ],
)
def test_a_script_of_which_nothing_is_certain_stays_as_it_is(content: str, why: str) -> None:
    assert why in one_reason(content, changed=False)


def test_collectives_stay_horovods_own() -> None:
    made = after(
        "import horovod.torch as hvd\nhvd.init()  # first\nif hvd.rank() != 0:\n"
        "    print(hvd.allreduce(hvd.rank()), hvd.size())\n"
    )
    assert made == (
        "import horovod.torch as hvd\nimport hvdkit.torch as hk\n"
        "world = hk.init()  # first\nif not world.is_root:\n    print(hvd.allreduce(world.rank), world.size)\n"
    )


def test_the_topology_is_global_where_other_functions_use_it_and_names_that_are_taken_are_left_alone() -> None:
    made = after(
        "import horovod.torch as hvd\n\ndef say(world):\n    print(hvd.rank())\n\n"
        "def main():\n    hvd.init()\n    say(1)\n\nmain()\n"
    )  # fmt: skip
    assert "print(topology.rank)" in made and "    global topology\n    topology = hk.init()\n" in made


def test_the_topology_is_global_before_it_is_bound() -> None:
    content = after(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
        "def keep(model):\n    torch.save(model.state_dict(), 'model.pt')\n\n\n"
        "def main():\n    model = nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)\n"
        "    for (x,) in loader:\n        optimizer.zero_grad()\n        model(x).sum().backward()\n"
        "        optimizer.step()\n    keep(model)\n\n\nmain()\n"
    )
    assert content.index("    global world\n") < content.index("    world = hk.init()\n")
    compile(content, "train.py", "exec")


def test_an_import_stays_while_one_of_its_names_is_used() -> None:
    made = after("from horovod.torch import allreduce, init, rank\ninit()\nprint(allreduce(rank()))\n")
    assert made.startswith("from horovod.torch import allreduce, init, rank\n")
    assert made.endswith("world = hk.init()\nprint(allreduce(world.rank))\n")


def test_arguments_of_horovods_optimizer_get_hvdkits_names_and_words() -> None:
    made = after(
        "import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer = hvd.DistributedOptimizer(\n"
        "    optimizer, named_parameters=model.named_parameters(), num_groups=2, op=hvd.Average)\n"
    )
    assert '    optimizer, model, groups=2, op="average")\n' in made
    lists = HOROVOD.replace("parameters())\nhvd", "parameters(), groups=[[model.weight]])\nhvd")
    assert "knows no groups=" in one_reason(lists)


def test_what_keras_3_does_not_take_is_listed_or_taken_from_tensorflow() -> None:
    content = "import horovod.keras as hvd\nimport keras\n{}\nhvd.init()\nkeras.optimizers.SGD({})\n"
    left = ported(content.format("", "decay=0.1")).left
    assert any("`decay" in one.why and "was removed" in one.why for one in left)
    images = "from keras.preprocessing.image import ImageDataGenerator as Images\nImages()"
    made = ported(content.format(images, "0.1"))
    assert b"\nfrom tensorflow.keras.preprocessing.image import ImageDataGenerator as Images\n" in made.after
    assert not any("ImageData" in one.why for one in made.left)


# Odd scripts ----------------------------------------------------------------------------------------------------------

FIT = """\
import keras
import numpy as np
x, y = np.zeros((64, 4)), np.zeros((64, 1))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y)
"""
HOROVOD = """\
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(10):
    optimizer.zero_grad()
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
"""
DDP = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.rand(8, 4)).sum()
    loss.backward()
    optimizer.step()
"""
LAST = "        optimizer.step()\n"
TWO = "    optimizer.step()\n"
ODD = [
    # a script, what is replaced in it, what changes besides what changes in the script itself, what is listed
    ("parentheses", LOOP, "(data, batch_size=2)", "((data), (2), (True), sampler=(None))", """\
-loader = DataLoader((data), (2), (True), sampler=(None))
+loader = hk.shard((data), world, (2), shuffle=(True))""", ""),
    ("parentheses over lines", LOOP, "(data, batch_size=2)", "(( # (\n  (data) # )\n ), 2)", """\
-loader = DataLoader(( # (
+loader = hk.shard(( # (
- ), 2)
+ ), world, 2, shuffle=False)""", ""),
    ("bar in parentheses", LOOP, "in loader", "in tqdm((loader))", """\
-    for (x,) in tqdm((loader)):
+    for (x,) in tqdm((loader), disable=not world.is_root):""", ""),
    ("comments between arguments", LOOP, "(data, batch_size=2)",
     "(\n    data,  # all\n    batch_size=2,  # small\n)", """\
-loader = DataLoader(
-    data,  # all
+loader = hk.shard(
+    data, world,  # all
+    shuffle=False,""", ""),
    ("comments of arguments that go", LOOP, "(data, batch_size=2)",
     "(data,  # all\n  sampler=None,  # none\n  batch_size=2,  # small\n  drop_last=True)  # end", """\
-loader = DataLoader(data,  # all
-  sampler=None,  # none
-  drop_last=True)  # end
+loader = hk.shard(data, world,  # all
+  shuffle=False,
+  )  # end""", ""),
    ("stars", LOOP, "(data, batch_size=2)", "(data, **(small if big else {}))", """\
-loader = DataLoader(data, **(small if big else {}))
+loader = hk.shard(data, world, **({"shuffle": False, **(small if big else {})}))""", ""),
    ("no argument is left", FIT, '"mse")', '"mse")\nmodel.compile(experimental_run_tf_function=False,)', """\
-model.compile(experimental_run_tf_function=False,)
+model.compile()""", ""),
    ("the last line of arguments goes", FIT, '"mse")',
     '"mse")\nmodel.compile(\n    loss="mse",  # l\n    metrics=[],\n    experimental_run_tf_function=False,  # no\n)',
     "-    experimental_run_tf_function=False,  # no", ""),
    ("arrays in parentheses", FIT, "fit(x, y)", "fit((x),  # in\n    (y),  # out\n    (16), (2))", """\
-model.fit((x),  # in
-    (y),  # out
-    (16), (2))
+model.fit(hk.shard((x, y), world, 16),  # in
+    epochs=(2), callbacks=[hk.BroadcastState()])""", ""),
    ("no callbacks", FIT, "fit(x, y)", "fit(x, y, callbacks=(None))", """\
-model.fit(x, y, callbacks=(None))
+model.fit(hk.shard((x, y), world, 32), callbacks=([hk.BroadcastState()]))""", ""),
    ("perhaps callbacks", FIT, "model.fit(x, y)", "given = None\nmodel.fit(x, y, callbacks=given)", """\
-model.fit(x, y, callbacks=given)
+model.fit(hk.shard((x, y), world, 32), callbacks=[hk.BroadcastState(), *(given or [])])""", ""),
    ("one of two lists", FIT, "fit(x, y)", "fit(x, y, callbacks=[a] if b else [])", """\
-model.fit(x, y, callbacks=[a] if b else [])
+model.fit(hk.shard((x, y), world, 32), callbacks=[hk.BroadcastState(), *([a] if b else [])])""", ""),
    ("a callback without a list", FIT, "fit(x, y)", "fit(x, y, callbacks=keras.callbacks.EarlyStopping())", """\
-model.fit(x, y, callbacks=keras.callbacks.EarlyStopping())
+model.fit(hk.shard((x, y), world, 32), callbacks=[hk.BroadcastState(), keras.callbacks.EarlyStopping()])""", ""),
    ("edits in a list with a comment", FIT, "fit(x, y)",
     "fit(x, y, callbacks=[\n    # the best\n    keras.callbacks.ModelCheckpoint('a.h5'),\n])", """\
-model.fit(x, y, callbacks=[
+model.fit(hk.shard((x, y), world, 32), callbacks=[hk.BroadcastState(),
-    keras.callbacks.ModelCheckpoint('a.h5'),
+    keras.callbacks.ModelCheckpoint('a.keras'),""", ""),
    ("a backslash and blanks", LOOP, "DataLoader(data, batch_size=2)",
     "\\\n  DataLoader( data , batch_size = 2 )  # a ;", """\
-  DataLoader( data , batch_size = 2 )  # a ;
+  hk.shard( data, world , batch_size = 2, shuffle=False )  # a ;""", ""),
    ("tabs", LOOP, LAST, f"{LAST}if x:\n\tif y:\n\t\tprint(1,\n2)\n", """\
-		print(1,
+		if world.is_root:
+		    print(1,""", ""),
    ("elif on one line", LOOP, LAST, f"{LAST}if x > 2: print(1)\nelif x: print(2)\n", "", "shares its line"),
    ("a block behind a backslash", LOOP, LAST, f"{LAST}if x > 2: \\\n    print(1)\n", """\
-if x > 2: \\
+if world.is_root:
+    if x > 2: \\""", ""),
    ("no import above the data", LOOP, "data = ", '__version__ = "1"\nSIZE: int = 8\nimport os\ndata = ', "", ""),
    ("the rate changes on one line", LOOP, LAST, f"{LAST}if x: print(1); scheduler.step()\n", "", "`scheduler.step`"),
    ("the mode changes", LOOP, LAST, f"{LAST}with open('a', 'w') as f:\n    model.eval()\n", "", "calls `model.eval`"),
    ("a batch is taken", LOOP, LAST, f"{LAST}print(next(iter(loader)))\n", "", "calls `next`"),
    ("a walrus that is used", LOOP, LAST, f"{LAST}print(n := 3)\nn += 1\nm = n\n", "", "makes `n`"),
    ("match", LOOP, LAST, f"{LAST}match x:\n  case 1: print(1)\n  case _:\n    # c\n    print(('''a\n b'''))\n", """\
-    print(('''a
+    if world.is_root:
+        print(('''a""", "shares its line"),
    ("skip_synchronize", HOROVOD, TWO, """\
    with (  # (
          (optimizer).skip_synchronize()):  # now
            # first

            optimizer.step(); print(f'''{hvd.rank()}
  a''')
# flush left
            print(
text)
""", """\
-    with (  # (
-          (optimizer).skip_synchronize()):  # now
-            # first
-            optimizer.step(); print(f'''{hvd.rank()}
-            print(
+    # first
+    optimizer.step(); print(f'''{world.rank}
+    print(""", ""),
    ("skip_synchronize on one line", HOROVOD, TWO, f"    with optimizer.skip_synchronize(): {TWO.lstrip()}", """\
-    with optimizer.skip_synchronize(): optimizer.step()
+    optimizer.step()""", ""),
    ("parentheses around all", HOROVOD, "(optimizer, named_parameters=model.named_parameters())",
     "((optimizer), # o\n  (model.named_parameters()), compression=(hvd.Compression.fp16),\n"
     " num_groups = (hvd.size()), )", """\
-optimizer = hvd.DistributedOptimizer((optimizer), # o
-  (model.named_parameters()), compression=(hvd.Compression.fp16),
- num_groups = (hvd.size()), )
+optimizer = hk.distribute((optimizer), # o
+  model, compression=("fp16"),
+ groups = (world.size), )""", ""),
    ("a root that is asked for", HOROVOD, "root_rank=0", "root_rank=(hvd.size() -\n  1)", """\
-hvd.broadcast_parameters(model.state_dict(), root_rank=(hvd.size() -
+hk.broadcast_state(model, root=(world.size -""", ""),
    ("f-strings", HOROVOD, TWO,
     TWO + "    print(f'é {hvd.rank()!r:>{hvd.size()}} {{hvd}}' "
     "f'''{\nhvd.rank()} {hvd.rank() == 0}''')\n",
     """\
-    print(f'é {hvd.rank()!r:>{hvd.size()}} {{hvd}}' f'''{
-hvd.rank()} {hvd.rank() == 0}''')
+    print(f'é {world.rank!r:>{world.size}} {{hvd}}' f'''{
+world.rank} {world.is_root}''')""", ""),
    ("messages", DDP, TWO, TWO + "    dist.all_reduce(loss[: dist.get_world_size()])\n"
     "    dist.broadcast(loss, src=dist.get_world_size() - 1)  # c\n    dist.barrier(); dist.barrier()\n", """\
+import horovod.torch as hvd
-    dist.all_reduce(loss[: dist.get_world_size()])
-    dist.broadcast(loss, src=dist.get_world_size() - 1)  # c
-    dist.barrier(); dist.barrier()
+    hvd.allreduce_(loss[: world.size], op=hvd.Sum)
+    hvd.broadcast_(loss, root_rank=world.size - 1)  # c
+    hvd.barrier(); hvd.barrier()""", ""),
    ("a model that asks for its GPU", DDP, "torch.nn.Linear(4, 1)",
     '\n\tnet  # n\n\t.to(int(os.environ["LOCAL_RANK"])),\n\tdevice_ids=[dist.get_rank()],  # gone\n', """\
-model = DDP(
-	net  # n
-	.to(int(os.environ["LOCAL_RANK"])),
-	device_ids=[dist.get_rank()],  # gone
-)
+model = (net  # n
+	.to(world.local_rank))""", ""),
    ("no_sync on one line", DDP, "    loss.backward()\n", "    with model.no_sync(): loss.backward()\n", """\
-    with model.no_sync(): loss.backward()
+    with hk.no_sync(model): loss.backward()""", ""),
]  # fmt: skip


def changes(before: str, made: str) -> Counter[str]:
    lines = difflib.unified_diff(*(re.split(r"\r\n|\r|\n", one) for one in (before, made)), n=0, lineterm="")
    return Counter(one for one in lines if not re.match(r"---|\+\+\+|@", one))


@cache
def usual_changes(content: str) -> Counter[str]:
    return changes(content, after(content))


@pytest.mark.parametrize(("base", "old", "new", "wanted", "why"), [pytest.param(*row, id=name) for name, *row in ODD])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_an_odd_script_changes_where_it_must_and_nowhere_else(
    base: str, old: str, new: str, wanted: str, why: str, end: str
) -> None:
    head = "\ufeff\f\n'''Größe'''\n" + HEAD * (base is LOOP) + "from tqdm import tqdm, trange\n"
    assert old in base
    content = (head + base.replace(old, new, 1)).replace("\n", end)
    found, usual = ported(content), usual_changes(head + base)
    compile(found.after, "train.py", "exec")
    made = found.after.decode()
    assert sorted((changes(content, made) - usual).elements()) == sorted(filter(None, wanted.split("\n")))
    for call in ("hk.init(", "hk.pin_device(", "hk.distribute(", "hk.broadcast_state(", ".BroadcastState(", "seed("):
        assert made.count(call) == sum(line.count(call) for line in usual if line[0] == "+"), call
    assert set(re.findall(r"\r\n|\r|\n", made)) == {end}
    assert any(why in one.why for one in found.left) if why else not found.left, found.left


def test_the_library_starts_below_the_docstring_and_seeds_what_is_imported() -> None:
    head = '"""Doc."""\n__version__ = "1"\nSIZE = 8\n' + HEAD
    start = "import hvdkit.torch as hk\n\nworld = hk.init()\nhk.pin_device(world)\n"
    drawn = LOOP.replace("zeros", "rand")
    assert after(head + drawn).startswith(f"{head}{start}torch.manual_seed(0)\n")
    late = "import sys\nsys.path.append('..')\n" + HEAD + drawn
    assert after(late).startswith(f"import sys\n{start}sys.path")
    assert "without a seed every rank draws" in one_reason(late)


def test_one_change_that_does_not_fit_is_listed_and_all_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits.ScriptText, "stands_alone", lambda self, statement: True)
    found = ported(HEAD + LOOP + "if data: pass\nelse: print(2)\nprint(3)\n")
    assert [(one.line, "does not fit the text" in one.why) for one in found.left] == [(20, True)]
    made = found.after.decode()
    assert made.endswith("if data: pass\nelse: print(2)\nif world.is_root:\n    print(3)\n")
    assert "hk.shard(data" in made


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(HEAD + LOOP)
    path.chmod(0o750)
    return path


def test_the_input_is_written_over_only_when_asked(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["port", str(script)]) == 0
    output = capfd.readouterr()
    assert "hk.shard" in output.out and "Nothing is left" in output.err and "Nothing is left" not in output.out
    assert cli.run(["port", str(script), "--diff"]) == 0
    output = capfd.readouterr().out
    assert output.startswith(f"--- {script}") and "+loader = hk.shard" in output
    script.write_text("\ufeff" + HEAD + LOOP + "\f\nprint('\u2028')", encoding="utf-8")
    assert cli.run(["port", str(script), "--diff"]) == 0
    lines = capfd.readouterr().out.split("\n")[:-1]
    assert all(line[0] in "-+ @\\" for line in lines) and "+    print('\u2028')" in lines
    script.write_text(HEAD + LOOP)
    link = script.with_name("link.py")
    link.symlink_to(script)
    for target in (script, link):
        assert cli.run(["port", str(script), "-o", str(target)]) == 2
        assert "is the input" in capfd.readouterr().err
    assert script.read_text() == HEAD + LOOP
    made = script.with_name("made.py")
    assert cli.run(["port", str(script), "-o", str(made)]) == 0
    assert cli.run(["port", str(script), "--in-place"]) == 0
    assert script.read_bytes() == made.read_bytes() != (HEAD + LOOP).encode()
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert cli.run(["port", str(script), "--in-place"]) == 0
    assert script.read_bytes() == made.read_bytes()


LOADED = LOOP.replace("in loader", "in mylib.load(2)").replace("loader = DataLoader(data, batch_size=2)\n", "")
OF_DDP = "model = torch.nn.parallel.DistributedDataParallel(model)\n"
OF_HVDKIT = "optimizer = hk.distribute(optimizer, model)\nhk.broadcast_state(model, optimizer)\n"
OF_HOROVOD = """\
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""


@pytest.mark.parametrize(
    ("library", "start", "rate", "made"),
    [
        ("horovod", "import horovod.torch as hvd\nhvd.init()\n", "0.1 * hvd.size()", OF_HOROVOD),
        ("ddp", "import torch.distributed as dist\ndist.init_process_group('gloo')\n", "0.1", OF_DDP),
        ("hvdkit", "import hvdkit.torch as hk\nworld = hk.init()\n", "hk.scale_lr(0.1, world)", OF_HVDKIT),
    ],
)
def test_a_step_that_the_text_leaves_open_is_said_and_not_called_done(
    library: str, start: str, rate: str, made: str
) -> None:
    """Whether the ranks' data differ is ``mylib``'s to know."""
    loop = LOADED.replace("lr=0.1", f"lr={rate}").replace("for epoch", made + "for epoch")
    found = ported("import mylib\n" + HEAD + start + loop)
    assert found.library == library
    assert not found.left and not found.sure, found.left
    said = " ".join(found.as_text().split())
    assert "note: step 7 is not certain: where the training data come from the text does not show" in said
    assert "Nothing is left" not in said and "is not certain: see the notes." in said


@pytest.mark.parametrize(
    ("seed", "order", "expected"),
    [
        ("args.seed", "shuffle=True", "seed=args.seed"),
        ("args.seed", "shuffle=False", ""),
        ("1", "shuffle=True", ""),
    ],
)
def test_the_seed_that_a_user_sets_orders_the_samples(seed: str, order: str, expected: str) -> None:
    start = f"import argparse\nargs = argparse.ArgumentParser().parse_args()\ntorch.manual_seed({seed})\n"
    loop = LOOP.replace("batch_size=2", f"batch_size=2, {order}")
    made = "hk.shard(data, world, batch_size=2, " + ", ".join(filter(None, [order, expected])) + ")\n"
    assert made in after(HEAD + start + loop)
    above = loop.replace("for epoch", f"torch.manual_seed({seed})\nfor epoch")
    assert ", seed=" not in after(HEAD + start.replace(f"torch.manual_seed({seed})\n", "") + above)


@pytest.mark.parametrize(
    ("call", "expected"), [("set_seed(SEED)", "SEED"), ("set_seed()", "7"), ("set_seed(seed=SEED + 1)", "SEED + 1")]
)
def test_a_seed_that_a_function_of_the_script_sets_is_known(call: str, expected: str) -> None:
    helper = "import random\nSEED = 3\ndef set_seed(seed=7):\n    random.seed(seed)\n    torch.manual_seed(seed)\n"
    made = after(HEAD + helper + call + "\n" + LOOP)
    assert f"hk.seed_everything({expected}, world)\nhk.broadcast_state(" in made
    unknown = helper.replace("    random", "    seed += len(locals())\n    random")
    found = ported(HEAD + unknown + call + "\n" + LOOP)
    assert b"seed_everything" not in found.after and "seed_everything(seed, world)" in found.left[0].write


def test_no_advice_puts_what_trains_under_is_root() -> None:
    step = "def step(x, writer):\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n    return x\n"
    loop = LOOP.split("for epoch")[0] + step
    each = "for epoch in range(2):\n    for (x,) in loader:\n        "
    (left,) = ported(HEAD + WRITES + loop + "writer = SummaryWriter()\n" + each + "step(x, writer)\n").left
    assert left.write.startswith(
        "SummaryWriter(...) if world.is_root else None, and a test for None around what uses it"
    )
    (left,) = ported(HEAD + loop + each + "print(step(x, None))\n").left
    assert left.write == "if world.is_root: around `print` alone, and not around the rest of the statement"


def test_what_is_another_training_or_done_by_every_rank_is_said() -> None:
    loop = HEAD + LOOP
    validated = loop + "for (x,) in DataLoader(data, batch_size=2):\n    print(model(x))\n"
    batch, part = ported(loop).notes
    assert part.startswith("a last partial batch") and batch.startswith("each rank takes batches of the script's size")
    assert "every rank evaluates on all validation data" in ported(validated).notes[2]
    for held in ("validation_split=0.5", "validation_data=(x, y)"):
        assert "every rank evaluates" in ported(FIT.replace("fit(x, y)", f"fit(x, y, {held})")).notes[-1]
    assert "every rank evaluates" not in " ".join(ported(FIT).notes)
    assert len(ported(loop.replace("batch_size=2", "batch_size=2, drop_last=True")).notes) == 1
    again = ported(ported(loop).after)
    assert "an earlier port" in again.notes[0] and not again.sure and not again.left


def test_exit_status_and_misuse(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(HEAD + LOOP.replace("for epoch", "device = 'cuda:0'\nfor epoch"))
    assert cli.run(["port", str(script), "--diff"]) == 1
    assert "line 12: 'cuda:0' is the same GPU on every rank." in capfd.readouterr().err
    assert cli.run(["port", str(script), "--diff", "--in-place"]) == 2
    script.write_text("def (:\n")
    capfd.readouterr()
    assert cli.run(["port", str(script)]) == 2
    error = capfd.readouterr().err
    assert "line 1, is not Python" in error and error.count("\n") == 1
    for terms in (260, 500, 700, 990, 4000):
        script.write_text(HEAD + LOOP + f"x = {'+'.join('1' * terms)}\n")
        with pytest.raises(InvalidArgumentError):  # before anything walks through it and comes to the recursion limit
            edits.read(str(script))
        assert cli.run(["port", str(script)]) == 2
        assert "nests expressions too deeply" in capfd.readouterr().err
    script.write_text(HEAD + LOOP + f"torch.save({'+'.join('1' * 240)}, 'm')\n")
    assert cli.run(["port", str(script), "--in-place"]) == 0
    choices = "".join(f"elif data == {one}:\n    pass\n" for one in range(240))
    script.write_text(f"{HEAD}{LOOP}if not data:\n    pass\n{choices}x = [{'1, ' * 1000}]\n")
    assert cli.run(["port", str(script), "--in-place"]) == 0
    assert cli.run(["port", str(script.with_name("absent.py"))]) == 2
