"""``hvdkit emulate sizes``: sizes from lists, recordings and models, their order, and the trials."""

import json
import sys
from pathlib import Path

import pytest
from lean_imports import lean_imports
from timeline_files import ATPESC, allreduce, metadata
from timeline_files import write as write_timeline

from hvdkit import cli
from hvdkit.common import json_files
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure import model
from hvdkit.measure.emulate.plan import Collective, ReplayPlan

TUTORIAL = [803840, 131584, 33024, 2600]
CLASSIFIER = """
import torch
from torch import nn
import torch.nn.functional as F

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 64)
        self.fc4 = nn.Linear(64, 10)

    def forward(self, x):
        x = x.view(x.shape[0], -1)
        for layer in (self.fc1, self.fc2, self.fc3):
            x = F.relu(layer(x))
        return F.log_softmax(self.fc4(x), dim=1)

print("a print of the user's module")

def with_inputs():
    return Classifier(), torch.zeros(2, 1, 28, 28)

class Swapped(nn.Module):
    '''Registers its layers in another order than it runs them.'''

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.first = nn.Linear(5, 3)
        self.unused = nn.Linear(7, 7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return {"scores": [self.last(self.first(x))], "n": 3}

def swapped():
    return Swapped(), {"x": torch.ones(1, 5)}, lambda output: output["scores"][0].sum()

def tied():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    return model, torch.zeros(1, 3, dtype=torch.long)

def half():
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].bias.data = model[0].bias.data.double()
    return model

def broken():
    raise RuntimeError("no such data set")

def lazy():
    return nn.Sequential(nn.LazyLinear(3))

def in_bfloat16():
    return nn.Linear(4, 3, dtype=torch.bfloat16)

def frozen():
    return nn.Linear(2, 2).requires_grad_(False)

class Constant(nn.Linear):
    def forward(self, x):
        return x.detach()

def constant():
    return Constant(2, 2), torch.zeros(1, 2)

seven = 7
"""
MISTAKES = """
def dies():
    raise SystemExit(3)

def broken():
    raise RuntimeError("no such data set")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def nets(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    write_module("nets", CLASSIFIER, monkeypatch)


def importorskip_lean(name):
    with lean_imports():
        pytest.importorskip(name)


def write_module(name, text, monkeypatch):
    """A module that can be imported here and by a process that starts here."""
    Path(f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, name, raising=False)


def sizes(capsys, *words, status=0):
    """The plan that the command prints, or what it says on standard error."""
    assert cli.run(["emulate", "sizes", *words, *(["--json"] if status == 0 else [])]) == status
    captured = capsys.readouterr()
    return json_files.decode(captured.out, ReplayPlan, "the output") if status == 0 else captured.err


def gradients(factory, **wanted):
    """What the process of a model answers, without a process."""
    module, _, name = factory.partition(":")
    return model.answer({"module": module, "factory": name, "per": "parameter", "input_shape": None, **wanted})


def names(answer):
    return [one["name"] for one in answer["gradients"]]


def elements(answer):
    return [one["elements"] for one in answer["gradients"]]


def listed(plan):
    return [one.nbytes for one in plan.collectives]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-b 8 -e 128M -f 2", [8 << power for power in range(25)]),
        ("--begin 1K --end 5k", [1024, 2048, 4096]),
        ("--minbytes 4 --maxbytes 100 --stepfactor 5", [4, 20, 100]),
        ("-b 1G -e 1G", [1 << 30]),
        ("-b 2 -e 4 --dtype float16", [2, 4]),
    ],
)
def test_a_sweep_as_of_nccl_tests(capsys, words, expected):
    assert listed(sizes(capsys, *words.split())) == expected


# Lists, trials


def test_a_list_of_layers_is_replayed_from_the_last_to_the_first(capsys):
    plan = sizes(capsys, "--sizes", "803840,131584,33024,2600")
    assert listed(plan) == TUTORIAL[::-1]
    assert [one.elements for one in plan.collectives] == [650, 8256, 32896, 200960]
    assert "replayed from the last to the first" in plan.source


@pytest.mark.parametrize(
    ("words", "batches", "trials"),
    [
        (["--samples", "60000", "--batch-size", "8192"], 8, 8),
        (["--samples", "60000", "--batch-size", "8192", "--epochs", "3"], 8, 24),
        (["--samples", "8192", "--batch-size", "8192"], 1, 1),
        (["--samples", "8193", "--batch-size", "8192"], 2, 2),
        (["--trials", "7"], None, 7),
        ([], None, 20),
    ],
    ids=str,
)
def test_trials_are_batches_times_epochs(capsys, words, batches, trials):
    plan = sizes(capsys, "--sizes", "4", *words)
    assert plan.trials == trials and (f"batch_count {batches} " in plan.source) == (batches is not None)


def test_a_reader_sees_sizes_order_and_trials(capsys):
    words = ["--sizes", "803840,131584,33024,2600", "--trials", "8", "--gap-ms", "2.5"]
    assert cli.run(["emulate", "sizes", *words]) == 0
    out = capsys.readouterr().out
    assert "[803840, 131584, 33024, 2600]" in out and "971048 bytes per step; 8 trials." in out
    assert out.index(" 2600 ") < out.index(" 803840 ") and "gap ms" in out and " 2.5\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "none is given"),
        (["--sizes", "4", "--timeline", "a.json"], "--sizes and --timeline are given"),
        (["--sizes", "4,5"], "multiple above 0 of the 4 bytes of a float32"),
        (["--sizes", "4,0"], "whole numbers above 0"),
        (["--sizes", "4,,8"], "whole numbers above 0"),
        (["--sizes", "4", "--per", "layer"], "--per is for --model"),
        (["--sizes", "4", "--trials", "3", "--epochs", "2"], "give one or the other"),
        (["--sizes", "4", "--samples", "3"], "--samples and --batch-size"),
        (["--sizes", "4", "--gap-ms", "-1"], "at least 0"),
        (["--sizes", "4", "--gap-ms", "nan"], "at least 0"),
        (["--model", "nets"], "MODULE:FACTORY"),
        (["--begin", "8"], "--begin is given without --end"),
        (["--end", "8"], "--end is given without --begin"),
        (["--factor", "2", "--sizes", "8"], "--factor is for --begin"),
        (["-b", "16", "-e", "8"], "--begin is 16 bytes and --end 8"),
        (["-b", "8", "-e", "8X"], "expected bytes such as 8, 32K"),
        (["-b", "0", "-e", "8"], "expected bytes such as 8, 32K"),
        (["-b", "8", "-e", "8", "-f", "1"], "1 is not in the range"),
        (["-b", "8", "-e", "16", "--sizes", "8"], "--sizes and --begin are given"),
        (["-b", "2", "-e", "8"], "4 bytes"),
    ],
    ids=str,
)
def test_bad_usage_is_one_sentence(capsys, words, said):
    err = sizes(capsys, *words, status=2)
    assert said in err and err.count("\n") == 1


def test_a_missing_file_is_said(capsys):
    assert "No file at 'b.json'" in sizes(capsys, "--plan", "b.json", status=2)


# Plans


def test_a_plan_is_saved_and_comes_back(capsys):
    plan = sizes(capsys, "--sizes", "40,80", "--trials", "4", "--gap-ms", "3", "-o", "plan.json")
    assert json_files.read(Path("plan.json"), ReplayPlan) == plan
    again = sizes(capsys, "--plan", "plan.json")
    assert again == plan and again.trials == 4 and again.collectives[0].gap_s == 0.003
    other = sizes(capsys, "--plan", "plan.json", "--trials", "9", "--gap-ms", "0")
    assert (other.trials, other.collectives[0].gap_s) == (9, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"collectives": []}, "length >= 1"),
        ({"collectives": [{"name": "a", "elements": 2, "dtype": "float32", "bytes": 9}]}, "are 8 bytes, not 9"),
        ({"collectives": [{"name": "a", "elements": 2, "dtype": "float31"}]}, "float31"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_right_is_refused(capsys, change, said):
    plan = ReplayPlan((Collective("a", 2),), 4)
    json_files.write(Path("plan.json"), plan)
    value = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**value, **change}))
    with pytest.raises(DataError, match="not a file of 'hvdkit emulate sizes'"):
        json_files.read(Path("plan.json"), ReplayPlan)
    err = sizes(capsys, "--plan", "plan.json", status=1)
    assert said in err and "plan.json" in err


# Recordings


def test_a_recording_gives_sizes_order_and_gaps(capsys):
    events = metadata(["fc2.weight", "fc1.weight"])
    for step in range(4):
        start = 100_000 * step
        events += allreduce(1, start + 500, shape="[10, 64]")
        events += allreduce(2, start + 3500, shape="[256, 784]", collective=2000)
    write_timeline(Path("timeline.json"), events)
    plan = sizes(capsys, "--timeline", "timeline.json")
    assert [(one.name, one.nbytes) for one in plan.collectives] == [("fc2.weight", 2560), ("fc1.weight", 802816)]
    # Between the announcements; and from the end of a step (3500 + 10 + 1 + 2000 us) to the next one's first.
    assert [one.gap_s for one in plan.collectives] == [pytest.approx(0.094989), pytest.approx(0.003)]
    assert "of 4 recorded steps" in plan.source
    assert {one.gap_s for one in sizes(capsys, "--timeline", "timeline.json", "--gap-ms", "0").collectives} == {0}


def test_a_real_recording_gives_the_tensors_of_a_step(capsys):
    plan = sizes(capsys, "--timeline", str(ATPESC))
    assert len(plan.collectives) > 2 and all(one.dtype == "float32" for one in plan.collectives)
    assert len({one.name for one in plan.collectives}) == len(plan.collectives)
    assert any(one.gap_s > 0 for one in plan.collectives)


def test_a_recording_without_steps_gives_each_tensor_once(capsys):
    events = metadata(["a", "b"]) + allreduce(1, 500, shape="[4]") + allreduce(2, 900, shape="[]")
    write_timeline(Path("timeline.json"), events)
    plan = sizes(capsys, "--timeline", "timeline.json")
    assert listed(plan) == [16, 4] and "without steps" in plan.source
    assert {one.gap_s for one in plan.collectives} == {0}


def test_a_recording_without_reductions_is_refused(capsys):
    write_timeline(Path("timeline.json"), metadata(["a"]))
    assert "no reduction" in sizes(capsys, "--timeline", "timeline.json", status=1)
    write_timeline(Path("timeline.json"), metadata(["a"]) + allreduce(1, 500, shape="?"))
    assert "no size" in sizes(capsys, "--timeline", "timeline.json", status=1)


# Models


def test_the_tutorials_classifier_gives_the_tutorials_sizes(capsys, nets):
    loaded = "tensorflow" in sys.modules
    plan = sizes(capsys, "--model", "nets:with_inputs", "--per", "layer")
    assert listed(plan)[::-1] == TUTORIAL
    assert [one.name for one in plan.collectives] == ["fc4", "fc3", "fc2", "fc1"]
    assert "in the order in which a backward produced them" in plan.source
    assert "nets" not in sys.modules and ("tensorflow" in sys.modules) == loaded


def test_a_file_and_the_shape_of_an_input_give_the_same(nets):
    found = gradients("nets.py:Classifier", input_shape=[2, 784], per="layer")
    assert [4 * one for one in elements(found)] == TUTORIAL[::-1]
    assert "in the order in which a backward produced them" in found["order"]


def test_a_file_elsewhere_imports_what_lies_beside_it(nets, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    Path("elsewhere").mkdir()
    Path("elsewhere/beside.py").write_text("WIDTH = 3\n")
    Path("elsewhere/own-net.py").write_text(
        "from beside import WIDTH\nfrom torch import nn\nnet = nn.Linear(WIDTH, 1)\n"
    )
    assert elements(gradients("elsewhere/own-net.py:net")) == [1, 3]


def test_gradients_have_the_type_of_the_model(nets):
    found = gradients("nets:in_bfloat16", input_shape=[2, 4])["gradients"]
    assert sorted((one["elements"], one["dtype"]) for one in found) == [(3, "bfloat16"), (12, "bfloat16")]


def test_a_process_that_dies_is_said(capsys, monkeypatch):
    write_module("mistakes", MISTAKES, monkeypatch)
    err = sizes(capsys, "--model", "mistakes:dies", status=1)
    assert "ended with status 3" in err and err.count("\n") == 1


def test_gradients_come_per_parameter_too(nets):
    found = gradients("nets:with_inputs")
    assert sum(elements(found)) * 4 == sum(TUTORIAL) and len(found["gradients"]) == 8
    assert set(names(found)[:2]) == {"fc4.weight", "fc4.bias"}
    assert (found["framework"], found["gradients"][0]["dtype"]) == ("torch", "float32")


def test_without_inputs_the_order_is_said_to_be_a_guess(nets):
    found = gradients("nets:Classifier", per="layer")
    assert [4 * one for one in elements(found)] == TUTORIAL[::-1]
    assert "no input is known" in found["order"] and "a backward produced" not in found["order"]


def test_the_order_is_that_of_a_real_backward_not_of_the_list_of_layers(nets):
    found = gradients("nets:swapped", per="layer")
    assert names(found) == ["last", "first", "unused"]
    assert "2 without a gradient in it come last" in found["order"]


def test_a_tied_parameter_is_one_gradient(nets):
    assert elements(gradients("nets:tied")) == [40]


def test_a_layer_of_two_types_is_two_collectives(nets):
    found = gradients("nets:half", per="layer")["gradients"]
    assert {(one["name"], one["elements"]) for one in found} == {("0 (float32)", 8), ("0 (float64)", 2)}


def test_a_layer_is_ready_with_the_last_of_its_gradients():
    ready = [model.ModelGradient(f"{layer}.{n}", layer, 1, "float32") for n, layer in enumerate("abab")][:3]
    assert [(one.name, one.elements) for one in model.by_layer(ready)] == [("b", 1), ("a", 2)]


def test_a_model_that_learns_its_shapes_from_an_input_can_be_given_one(nets):
    assert elements(gradients("nets:lazy", input_shape=[1, 5])) in ([15, 3], [3, 15])


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nonets:Classifier", "No module named 'nonets'"),
        ("none.py:Classifier", "no file 'none.py'"),
        ("nets:Klassifier", "has no 'Klassifier'"),
        ("nets:broken", "RuntimeError: no such data set"),
        ("nets:seven", "names a int"),
        ("nets:lazy", "before the model has seen an input"),
        ("nets:F.relu", "calling it failed"),
        ("nets:torch.Generator", "expected a model of PyTorch or Keras"),
        ("nets:frozen", "no parameter that is trained"),
        ("nets:constant", "without a tensor that depends on parameters"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_made_is_one_sentence(nets, factory, said):
    with pytest.raises(InvalidArgumentError) as caught:
        gradients(factory)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_input_of_a_shape_that_does_not_fit_is_one_sentence(nets):
    with pytest.raises(InvalidArgumentError, match="forward failed"):
        gradients("nets:Classifier", input_shape=[2, 783])
    with pytest.raises(InvalidArgumentError, match="give one of the two"):
        gradients("nets:with_inputs", input_shape=[2, 784])


def test_a_mistake_in_a_model_is_bad_usage(capsys, monkeypatch):
    write_module("mistakes", MISTAKES, monkeypatch)
    err = sizes(capsys, "--model", "mistakes:broken", status=2)
    assert (
        "--model mistakes:broken" in err
        and "no such data set" in err
        and "Traceback" not in err
        and err.count("\n") == 1
    )


KERAS = """
import keras

def net():
    return keras.Sequential([keras.Input((784,)), keras.layers.Dense(256, name="fc1"),
        keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(10, name="fc2")])

def unbuilt():
    return keras.Sequential([keras.layers.Dense(3)])
"""


@pytest.mark.slow
def test_a_keras_model_gives_its_layers_last_first(monkeypatch):
    importorskip_lean("keras")
    write_module("knet", KERAS, monkeypatch)
    found = gradients("knet:net", per="layer")
    assert [name.rpartition("/")[2] for name in names(found)] == ["fc2", "bn", "fc1"]
    assert elements(found) == [256 * 10 + 10, 512, 200960] and found["framework"] == "keras"
    assert "Keras hands over all gradients of a step together" in found["order"]
    with pytest.raises(InvalidArgumentError, match="is not built"):
        gradients("knet:unbuilt")
    assert sum(elements(gradients("knet:unbuilt", input_shape=[1, 5]))) == 18
