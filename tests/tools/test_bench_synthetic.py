"""``hvdkit bench synthetic`` without a framework: its flags, what it starts, its shapes, its timing and its lines."""

import json
import math
import os
import re
import sys
import types

import pytest

from hvdkit import cli
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.topology import Topology
from hvdkit.synthetic import __main__, benchmark
from hvdkit.synthetic.benchmark import MODELS, BenchmarkSettings, Stopwatch


@pytest.fixture
def started(monkeypatch):
    """The command lines that would take the place of this process."""
    found = []

    def execv(path, argv):
        assert path == argv[0] == sys.executable
        found.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "HOROVOD_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return found


def start(*words):
    with pytest.raises(SystemExit):
        cli.run(["bench", "synthetic", *words])


def settings_of(argv):
    return BenchmarkSettings(**json.loads(argv[-1]))


def test_horovods_flags_mean_what_they_mean_there(started):
    start("--model", "mlp", "--batch-size", "8", "--num-warmup-batches", "3", "--num-batches-per-iter", "4",
          "--num-iters", "5", "--fp16-allreduce", "--no-cuda")  # fmt: skip
    (argv,) = started
    assert argv[1:5] == ["-P", "-m", "hvdkit.synthetic", "torch"]
    settings = settings_of(argv)
    assert settings == BenchmarkSettings("mlp", 8, 3, 4, 5, fp16_allreduce=True, cuda=False)
    assert settings.compression == "fp16"


def test_horovods_defaults(started):
    start()
    settings = settings_of(started[0])
    assert (settings.batch_size, settings.warmup_batches, settings.batches_per_iter, settings.iters) == (32, 10, 10, 10)
    assert (settings.compression, settings.cuda) == ("none", True)


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras"])
def test_each_framework_has_its_program(started, framework):
    start("--framework", framework)
    assert started[0][3:5] == ["hvdkit.synthetic", framework]


def test_n_launches_that_many_ranks(started):
    start("-n", "3", "--model", "wide")
    (argv,) = started
    assert argv[1:9] == ["-P", "-m", "hvdkit.cli", "launch", "-n", "3", "--no-tag", "--"]
    assert argv[9:14] == [sys.executable, "-P", "-m", "hvdkit.synthetic", "torch"]
    assert settings_of(argv).model == "wide"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "resnet101"], "resnet50-shape"),
        (["--image-size", "128"], "fixed one"),
        (["--model", "resnet50-shape", "--image-size", "32"], "64"),
        (["--batch-size", "0"], "batch-size"),
        (["--num-iters", "0"], "num-iters"),
        (["train.py"], "train.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_sentence_and_start_nothing(started, capsys, words, said):
    assert cli.run(["bench", "synthetic", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    assert started == []


def test_a_rank_of_a_job_starts_no_job(started, capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert cli.run(["bench", "synthetic", "-n", "2"]) == 2
    assert "leave -n out" in capsys.readouterr().err
    start()
    assert started[0][3:5] == ["hvdkit.synthetic", "torch"]


# Shapes


def resnet50_shapes():
    """Output by input channels and kernel of every convolution, from the blocks."""
    shapes = [(64, 3, 7, 7)]
    for channels, inner, stride in benchmark.bottlenecks():
        outer = benchmark.EXPANSION * inner
        shapes += [(inner, channels, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)]
        if benchmark.projected(channels, inner, stride):
            shapes.append((outer, channels, 1, 1))
    return shapes


def test_resnet50_has_its_161_tensors_and_25_6_million_parameters():
    convolutions = resnet50_shapes()
    tensors = len(convolutions) + 2 * len(convolutions) + 2
    parameters = sum(o * i * h * w + 2 * o for o, i, h, w in convolutions) + 2048 * 1000 + 1000
    assert (len(convolutions), tensors, parameters) == (53, 161, 25_557_032)


@pytest.mark.slow
def test_pytorchs_resnet50_has_these_shapes():
    torch = pytest.importorskip("torch")
    from hvdkit.synthetic.torch import make_model

    model = make_model(BenchmarkSettings("resnet50-shape", image_size=64)).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    found = [tuple(parameter.shape) for parameter in model.parameters()]
    assert sorted(shape for shape in found if len(shape) == 4) == sorted(resnet50_shapes())
    assert (len(found), sum(map(math.prod, found))) == (161, 25_557_032)


def test_resnet50_halves_its_images_three_times_after_the_stem():
    strides = [stride for _, _, stride in benchmark.bottlenecks()]
    assert strides == [1] * 3 + [2] + [1] * 3 + [2] + [1] * 5 + [2] + [1] * 2


def test_data_are_each_ranks_own_and_the_same_in_every_run():
    for model in MODELS:
        settings = BenchmarkSettings(model, batch_size=3, image_size=64 if model == "resnet50-shape" else None)
        x, y = settings.data(1)
        assert x.shape == (3, *settings.shape) and y.shape == (3,)
        assert y.min() >= 0 and y.max() < settings.classes
        assert (settings.data(1)[0] == x).all() and not (settings.data(0)[0] == x).all()


@pytest.mark.parametrize("wrong", [{"model": "vgg"}, {"iters": 0}, {"warmup_batches": -1}, {"image_size": 64}], ids=str)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InvalidArgumentError):
        BenchmarkSettings(**wrong)


# Timing


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(benchmark.time, "perf_counter", clock)
    return clock


def train(clock, seconds, rank=0, size=2, complete=0.0, **settings):
    """A training whose batches take these seconds."""
    watch = Stopwatch(BenchmarkSettings(**settings), Topology(rank, size, rank, size), "CPU", 8, 1000)
    watch.begin()
    for second in seconds:
        clock.now += second
        watch.batch_ended(lambda: setattr(clock, "now", clock.now + complete))
    watch.end()
    return watch


def test_the_lines_are_those_of_horovods_benchmarks(clock, capsys):
    seconds = [9.0] * 2 + [0.5, 0.5] + [1.0, 1.0]
    train(clock, seconds, batch_size=10, warmup_batches=2, batches_per_iter=2, iters=2, model="mlp")
    assert capsys.readouterr().out.splitlines() == [
        "Model: mlp", "Batch size: 10", "Number of CPUs: 2", "Running warmup...", "Running benchmark...",
        "Iter #0: 20.0 img/sec per CPU", "Iter #1: 10.0 img/sec per CPU",
        "Img/sec per CPU: 15.0 +-9.8", "Total img/sec on 2 CPU(s): 30.0 +-19.6",
    ]  # fmt: skip


def test_without_warm_up_every_batch_counts(clock, capsys):
    watch = train(clock, [0.5] * 2, batch_size=1, warmup_batches=0, batches_per_iter=1, iters=2)
    assert watch.speeds == [2.0, 2.0]
    assert "Running benchmark..." in capsys.readouterr().out


def test_what_a_gpu_still_computes_counts(clock):
    watch = train(clock, [0.25], batch_size=1, warmup_batches=0, batches_per_iter=1, iters=1, complete=0.75)
    assert watch.speeds == [1.0]


def test_only_rank_0_prints(clock, capsys):
    train(clock, [1.0], rank=1, warmup_batches=0, batches_per_iter=1, iters=1)
    train(clock, [1.0], rank=1, warmup_batches=0, batches_per_iter=1, iters=1, as_json=True)
    assert capsys.readouterr().out == ""


def test_json_is_one_object_and_nothing_else(clock, capsys):
    train(clock, [0.5, 1.0], batch_size=10, warmup_batches=0, batches_per_iter=1, iters=2, as_json=True, model="wide")
    found = json.loads(capsys.readouterr().out)
    assert found["img_per_second"] == 15.0 and found["total_img_per_second"] == 30.0
    assert found["iterations"] == [20.0, 10.0]
    assert (found["model"], found["ranks"], found["tensors"], found["parameters"]) == ("wide", 2, 8, 1000)


# The program


@pytest.mark.parametrize(
    "words", [[], ["torch"], ["torch", '{"model": "cnn", "colour": 1}'], ["torch", "[]"], ["torch", '{"model": "vgg"}']]
)
def test_a_program_that_is_started_by_hand_says_how_it_is_meant(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        benchmark.started_by("hvdkit bench synthetic", __main__.run, 2)
    assert ended.value.code == 2
    assert re.fullmatch(r"hvdkit: .*\n", capsys.readouterr().err)


def test_the_settings_travel_as_one_word(monkeypatch):
    settings, seen = BenchmarkSettings("deep", 7, 1, 2, 3, fp16_allreduce=True, cuda=False), []
    monkeypatch.setitem(sys.modules, "hvdkit.torch", types.ModuleType("hvdkit.torch"))
    monkeypatch.setitem(sys.modules, "hvdkit.synthetic.torch", types.SimpleNamespace(run=seen.append))
    __main__.run("torch", settings.word())
    assert seen == [settings]
