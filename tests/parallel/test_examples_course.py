"""resnet9.py and the course: on two ranks they compute what one process computes on the two-fold batch."""

import contextlib
import copy
import importlib.util
import io
import re
import sys
from unittest import mock

import numpy as np
import pytest
from example_runs import EXAMPLES, example, one_process_group

MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]


def numbers(pattern: str, lines: list[str]) -> list[float]:
    """What the groups of a pattern match in the lines that it matches, one after the other."""
    matches = [match for line in lines if (match := re.fullmatch(pattern, line))]
    return [float(group) for match in matches for group in match.groups()]


RESNET = ["--num_threads", "1", "--log_interval", "1"]
FEW = ["--dim_in", "64", "--train_size", "400", "--batch_size", "16"]
# Ten steps: Adam divides by the size of a gradient, so that differences in the last digit grow with every step.
SYNCED = [*RESNET, "--data", "synthetic", "--samples", "160", "--sync_batch_norm"]
SMALL = [*RESNET, "--data", "synthetic", "--samples", "64", "--batch_size", "8"]
CHECKED = ["--check", "--batch_size", "32", "--niters", "41", "--log_interval", "40"]
ON_TWO = {  # resnet9.py last: it seeds the process, which a script that seeds PyTorch itself would then be told of
    "horovod": ("mlp.py", ["--backend", "horovod", *CHECKED]),
    "ddp": ("mlp.py", ["--backend", "ddp", *CHECKED]),
    "diverged": ("mlp.py", ["--backend", "ddp", "--check", "--learning_rate", "1e30", "--niters", "3", *FEW]),
    "collectives": ("collectives.py", ["--m", "255", "--k", "257", "--n", "254", "--repeats", "3"]),
    "long sums": ("collectives.py", ["--m", "100", "--k", "20000", "--n", "7", "--repeats", "1"]),
    "own, diverged": ("own_ddp.py", ["--learning_rate", "1e9", "--niters", "9", *FEW]),
    "fp16": ("mixed_precision.py", ["--epochs", "2", "--precision", "fp16", "--clip", "0.5"]),
    "bf16": ("mixed_precision.py", ["--epochs", "2"]),
    "resnet": ("resnet9.py", [*SYNCED, "--batch_size", "8", "--lr", "0.0005"]),  # two ranks make that rate 0.001
    "digits": ("resnet9.py", ["--data", "digits", "--epochs", "2", "--batch_size", "48"]),
    "whole": ("resnet9.py", [*SMALL, "--epochs", "2"]),
    "first": ("resnet9.py", [*SMALL, "--epochs", "1", "--checkpoint_dir", "saved"]),
    "again": ("resnet9.py", [*SMALL, "--epochs", "2", "--checkpoint_dir", "saved", "--resume"]),
}
OWN = ["--niters", "13"]
ON_ONE = {
    "mlp": ("mlp.py", ["--niters", "201", "--log_interval", "40"]),
    "resnet": ("resnet9.py", [*SYNCED, "--batch_size", "16"]),
    "files": ("resnet9.py", ["--data", "cifar10", "--data_dir", "files", *RESNET]),
}


def examples(runs):
    """Several, by a name for each, one after the other in one process: to import PyTorch takes longest."""
    return {name: example(script, flags) for name, (script, flags) in runs.items()}


def course(runs, own):
    """Examples, and mlp.py's agreement check and own_ddp.py's classes in cases that no flag brings about."""
    with one_process_group():
        return {"own": own_ddp(own), "check": agreement_check(), **examples(runs)}


def module_of(name):
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def message_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def agreement_check():
    """What mlp.py's check says of ranks that are alike, and of ranks that differ in one weight."""
    import torch
    import torch.distributed as dist
    from torch import nn

    check = module_of("mlp").check_parameter_closeness
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    alike = message_of(check, model)
    with torch.no_grad():
        model[1].weight[1, 2] += 1e-7 * dist.get_rank()
    return {"alike": alike, "unlike": message_of(check, model)}


def own_ddp(flags):
    """own_ddp.py; then what its classes do with gradients in unusual cases, and its verdict on wrong weights."""
    import torch
    import torch.distributed as dist
    from torch import nn

    class Branches(nn.Module):
        """Four layers, of which one takes part only when asked to."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 40)
            self.sometimes, self.last = nn.Linear(40, 40), nn.Linear(40, 3)

        def forward(self, x, all_of_it=True):
            x = self.second(self.first(x).relu()).relu()
            return self.last(self.sometimes(x) if all_of_it else x)

    result = example("own_ddp.py", flags)
    own = module_of("own_ddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Branches()
    wrapped = own.MyDP(model, bucket_mb=0.002)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = None
    result["buckets"] = [[parameter.numel() for parameter in bucket.parameters] for bucket in wrapped.buckets]
    result["first weights"] = [round(value, 5) for value in model.first.bias.tolist()]

    def difference():
        """The largest between MyDP's gradients and the mean of the ranks' own."""
        worst = 0.0
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mean = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
            dist.all_reduce(mean)
            worst = max(worst, (mine.grad - mean / size).abs().max().item())
        return worst

    x = torch.randn(5, 6)  # of this rank
    result["differences"] = differences = {}
    for case in ("plain", "again, accumulated", "zero_grad after the forward pass", "gradients set to zero"):
        if case == "gradients set to zero":
            model.zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
        output = wrapped(x)
        if case == "zero_grad after the forward pass":
            model.zero_grad()
            plain.zero_grad()
        output.square().sum().backward()
        plain(x).square().sum().backward()
        differences[case] = difference()
    model.zero_grad()
    plain.zero_grad()
    for each in (wrapped, plain):
        each(x, False).square().sum().backward()
    differences["a parameter takes no part"] = difference()
    result["in the buffer"] = all(
        parameter.grad is view
        for bucket in wrapped.buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )

    with mock.patch.object(torch.cuda, "synchronize") as wait:
        own.wait_for(torch.device("cuda"))
        own.wait_for(torch.device("cpu"))
    result["waits"] = [call.args[0].type for call in wait.call_args_list]
    with mock.patch.object(own, "wait_for") as wait:
        own.step(model, torch.optim.SGD(model.parameters(), lr=0.0), x, torch.zeros(5, dtype=torch.long))
    result["waits"] += [call.args[0].type for call in wait.call_args_list]
    frozen = nn.Linear(6, 3)
    frozen.bias.requires_grad_(False)
    own.NaiveDP(frozen)(x).sum().backward()  # a frozen parameter has no gradient to hook

    right, wrong = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        wrong.last.bias[0] += 2e-5 * rank
    for name, other in (("right", right), ("wrong", wrong)):
        trained = {"buckets": (None, other, None), "DDP": (None, right, None), "Horovod": (None, right, None)}
        with contextlib.redirect_stdout(io.StringIO()):
            times = {key: [0.1] for key in trained}
            result[name] = message_of(own.report, mock.Mock(is_root=rank == 0), trained, times)
    return result


@pytest.fixture(scope="module")
def kept():
    """What the ranks printed, so that the tests share two jobs."""
    return {}


@pytest.fixture
def alone(run_ranks, kept, tmp_path):
    if "alone" not in kept:
        write_cifar(tmp_path / "files" / "cifar-10-batches-bin")
        ON_ONE["files"][1][3] = str(tmp_path / "files")
        runs = ON_ONE | {str(place): mistake[:2] for place, mistake in enumerate(MISTAKES)}
        (kept["alone"],) = run_ranks(examples, 1, runs=runs)
    return kept["alone"]


def write_cifar(directory):
    """CIFAR-10's six binary batches, of 40 images: a byte of the label, and a plane of 32 x 32 for each colour."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(256, size=(40, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] %= 10
        (directory / f"{name}.bin").write_bytes(records.tobytes())


@pytest.fixture
def both(run_ranks, kept):
    if "both" not in kept:
        kept["both"] = run_ranks(course, 2, runs=ON_TWO, own=OWN)
    return kept["both"]


# ResNet9 -------------------------------------------------------------------------------------------------------------

SHOWN = r"correct: ([\d.]+)  loss: ([\d.]+)"


def test_resnet9_on_two_ranks_is_resnet9_on_one_with_the_double_batch(alone, both):
    one, (root, other) = alone["resnet"], [rank["resnet"] for rank in both]
    assert one["status"] == root["status"] == other["status"] == 0, (one, root, other)
    for pattern in (rf"0  all \d ranks  {SHOWN}", rf"test  all \d ranks  {SHOWN}"):
        expected, found = numbers(pattern, one["lines"]), numbers(pattern, root["lines"])
        assert len(expected) == len(found) == 2
        assert found == pytest.approx(expected, abs=0.002)
    assert len(numbers(r"epoch 1/1 step (\d+)/10 loss [\d.]+", root["lines"])) == 10


def test_resnet9_trains_on_files_of_the_user(alone):
    one = alone["files"]
    assert one["status"] == 0, one
    assert "partitioned dataset length: 128" in one["lines"]  # of 200, in batches of 128
    assert len(numbers(rf"test  all \d ranks  {SHOWN}", one["lines"])) == 2


def test_each_rank_of_resnet9_shows_its_own_part(both):
    both = [rank["digits"] for rank in both]
    root, other = both
    for one in both:
        assert one["status"] == 0, one
        assert "Use cpu" in one["lines"] and f"partitioned dataset length: {14 * 48}" in one["lines"]
        assert len(numbers(r"Time: ([\d.]+)", one["lines"])) == 1
    for epoch in ("0", "1", "test"):  # of equal parts: 14 * 48 samples, and 180 of the 360 held out
        ranks = [numbers(rf"{epoch}  {SHOWN}", one["lines"]) for one in both]
        assert ranks[0] != ranks[1]
        mean = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
        whole = rf"{epoch}  all 2 ranks  {SHOWN}"
        assert numbers(whole, root["lines"]) == pytest.approx(mean, abs=2e-4)
        assert numbers(whole, other["lines"]) == []
    assert mean[0] > 0.85  # digits: it learns
    assert re.fullmatch(r"Hvd Procs 2 Total time: [\d.]+ second", root["lines"][-1])


def test_resnet9_goes_on_where_it_was(both):
    """With the running statistics of all ranks, not those of rank 0's part alone."""
    for rank in both:
        runs = {name: rank[name] for name in ("whole", "first", "again")}
        assert [run["status"] for run in runs.values()] == [0, 0, 0], runs
        for pattern in (rf"1  {SHOWN}", rf"test  {SHOWN}"):
            expected, found = numbers(pattern, runs["whole"]["lines"]), numbers(pattern, runs["again"]["lines"])
            assert len(expected) == 2 and found == pytest.approx(expected, abs=2e-4)
        assert numbers(rf"0  {SHOWN}", runs["again"]["lines"]) == []


# The course ----------------------------------------------------------------------------------------------------------

STEP = r"step (\d+) \| train_loss ([\d.]+) \| test_loss ([\d.]+) \| step time [\d.]+ms"


def test_mlp_trains_alike_alone_with_horovod_and_with_ddp(alone, both):
    """Two ranks with batches of 32 are one with batches of 64."""
    one = alone["mlp"]
    expected = numbers(STEP, one["lines"])
    assert expected[::3] == [0, 40, 80, 120, 160, 200]
    assert expected[1] == pytest.approx(3.466, abs=0.1) and expected[-2] < 1.5  # the log of 32 classes; it learns
    assert one["lines"][0].startswith("{'n_layers': 4, 'dim_in': 1024, 'n_classes': 32, 'dim_hidden': 256, ")
    for root, other in ([rank[backend] for rank in both] for backend in ("horovod", "ddp")):
        assert root["status"] == other["status"] == 0, (root, other)
        assert numbers(STEP, root["lines"]) == pytest.approx(expected[:6], abs=0.0002)
        assert "All 2 ranks held identical weights after each of 41 steps." in root["lines"]
        assert other["lines"] == []
    for rank in both:
        assert rank["check"]["alike"] == ""
        assert rank["check"]["unlike"].startswith("AgreementError: the ranks hold different values of 1.weight")
        assert rank["diverged"]["status"] == 0, rank["diverged"]  # weights that are no numbers, but alike
    assert "All 2 ranks held identical weights after each of 3 steps." in both[0]["diverged"]["lines"]


def test_the_collective_operations_and_the_two_products(both):
    root, other = [rank["collectives"] for rank in both]
    assert root["status"] == other["status"] == 0, (root, other)
    assert other["lines"] == ["My rank is 1, same as 1"]
    held = {line.split()[0]: re.findall(r"rank \d: ([-\d ]+?)(?:   |$)", line) for line in root["lines"][1:10]}
    assert held == {
        "before": ["0 1", "10 11"],
        "broadcast": ["0 1", "0 1"],
        "scatter": ["0", "1"],
        "gather": ["0 1 10 11", "-"],
        "all_gather": ["0 1 10 11", "0 1 10 11"],
        "reduce": ["10 12", "-"],
        "all_reduce": ["10 12", "10 12"],
        "reduce_scatter": ["10", "12"],
        "all_to_all": ["0 10", "1 11"],
    }
    moved = {
        match[1].strip(): int(match[2]) for line in root["lines"] if (match := re.match(r"  (.{26}).{10} +(\d+)", line))
    }
    assert moved == {
        "scatter the rows of A": 128 * 257 * 4,  # the other rank's half of 256 rows
        "broadcast B": 257 * 254 * 4,
        "multiply": 0,
        "gather the rows of C": 128 * 254 * 4,
        "scatter the columns of A": 255 * 129 * 4,
        "scatter the rows of B": 129 * 254 * 4,
        "sum the terms of C": 255 * 254 * 4,
        "all": (255 * 129 + 129 * 254 + 255 * 254) * 4,
    }
    assert sum("largest difference from the whole product" in line for line in root["lines"]) == 2


def test_long_sums_may_be_rounded_more_than_short_ones(both):
    for rank in both:
        assert rank["long sums"]["status"] == 0, rank["long sums"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_training_in_mixed_precision_learns_and_its_ranks_agree(both, precision):
    root, other = (rank[precision] for rank in both)
    assert root["status"] == other["status"] == 0, (root, other)
    assert "All 2 ranks hold identical weights and optimizer state." in root["lines"]
    (scale,) = set(numbers(r"epoch \d/2 loss [\d.]+ scale (\d+)", root["lines"]))
    assert scale == (65536 if precision == "fp16" else 1)
    (accuracy,) = numbers(rf"Test accuracy in {precision}: ([\d.]+) %", root["lines"])
    assert accuracy > 60


def test_own_ddp_says_that_a_training_diverged(both):
    for rank in both:
        assert rank["own, diverged"]["status"] == 2
        assert "--learning_rate 1e+09 is too large" in rank["own, diverged"]["said"]


def test_own_data_parallelism_is_ddp_and_horovod(both):
    ranks = [rank["own"] for rank in both]
    for one in ranks:
        assert one["status"] == 0, one
        assert max(one["differences"].values()) < 1e-5, one["differences"]
        assert one["in the buffer"]
        # 40 x 3 and 40 x 40 and their biases: 0.002 MB are 524 numbers; the last layer's come first
        assert one["buckets"] == [[3, 120, 40, 1600], [40, 1600], [40, 240]]
        assert one["right"] == "" and one["wrong"].startswith("AgreementError: the weights of 'buckets' differ by 2")
    root, other = ranks
    assert root["first weights"] == other["first weights"]
    assert root["lines"][-1] == "All four hold the same weights, within 1e-05."
    assert root["lines"][1] == "2 buckets of about 0.5 MB"
    assert [one["waits"] for one in ranks] == [["cuda", "cpu"]] * 2  # for a GPU, before the clock is read
    table = [
        line for line in root["lines"] if re.match(r"(naive|buckets|DDP|Horovod).* [\d.]+ +[\d.]+ +[\d.]+   ", line)
    ]
    assert len(table) == 4 and other["lines"] == []


MISTAKES = [
    ("resnet9.py", ["--data", "digits", "--batch_size", "1"], 2, "BatchNorm needs at least 2 samples per step"),
    ("resnet9.py", ["--data", "digits", "--samples", "50"], 2, "--samples 50 is for --data synthetic"),
    ("resnet9.py", ["--data_dir", "nowhere"], 2, "cifar10"),
    ("resnet9.py", ["--data", "synthetic", "--samples", "9" * 15], 2, "do not fit into memory"),
    ("own_ddp.py", ["--bucket_mb", "1e300"], 2, "--bucket_mb must be at most 1000000, got 1e+300"),
    ("own_ddp.py", ["--niters", "3"], 2, "--niters is 3: the first 3 steps are not timed."),
    ("mlp.py", ["--train_size", "60"], 2, "60 samples are fewer than one global batch of 64 x 1 ranks"),
    ("mlp.py", ["--epochs", "3"], 2, "unrecognized arguments: --epochs 3"),
    ("collectives.py", ["--m", "0"], 2, "argument --m: must be at least 1, got 0"),
]


@pytest.mark.parametrize("place", range(len(MISTAKES)))
def test_mistakes_are_single_sentences(alone, place):
    (script, flags, status, answer), one = MISTAKES[place], alone[str(place)]
    (sentence,) = [line for line in one["said"].splitlines() if line.startswith(f"{script}: ")]
    assert (one["status"], answer in sentence) == (status, True), (script, flags, one)
    assert "Traceback" not in one["said"]
