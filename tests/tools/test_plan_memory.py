"""``hvdkit plan memory``: the terms, ZeRO's stages, and estimates beside what was published and what PyTorch takes."""

import importlib
import importlib.util
import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.common.allreduce import FUSION_BYTES
from hvdkit.measure import model
from hvdkit.measure.plan import memory as terms

NETS = str(Path(__file__).parent / "memory_nets.py")
TRILLION = ["--parameters", "1e12", "--dtype", "float16", "--layers", "120", "--sequence", "2048", "--hidden", "12288"]


def live(framework):
    """A test that makes a model of this framework in a process of its own: seconds each, not for the inner loop."""
    missing = importlib.util.find_spec(framework) is None
    skipped = pytest.mark.skipif(missing, reason=f"needs {framework} (`make test` installs all)")
    return lambda test: pytest.mark.parallel(skipped(test))


needs_torch_alone = live("torch")


def needs_torch(test):
    """In a fork of a process that has PyTorch loaded already, which takes most of the time of most tests."""
    return pytest.mark.usefixtures("forked")(needs_torch_alone(test))


def answer_in_fork(process, words):
    model.reply(importlib.import_module(process).answer, words)


@pytest.fixture
def forked(monkeypatch):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])

    def run(words, **_):
        child = context.Process(target=answer_in_fork, args=(words[2], words[3:]))
        child.start()
        child.join()
        return subprocess.CompletedProcess(words, child.exitcode, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def found(capsys, *words, status=0):
    assert cli.run(["plan", "memory", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_the_tutorials_trillion_parameters_term_by_term(capsys):
    need = found(capsys, *TRILLION, "--batch", "128", "--checkpointing")["need"]
    assert (need["parameters"], need["gradients"], need["states"]) == (2 * 10**12, 2 * 10**12, 4 * 10**12)
    inputs = 128 * 120 * 2048 * 12288 * 2  # the tutorial's 0.8 TB; and one layer that is computed again
    assert need["activations"] == inputs + 34 * 128 * 2048 * 12288
    assert "773 GB" in need["how"]["activations"]


# BERT-large in float32, as Hugging Face measured it on a V100 without the 1343 MiB that CUDA's kernels take, and GPT-2
# 1558M in bfloat16 with ZeRO stage 1 on 8 ranks, as llm.c allocated it: see docs/plan.md.
BERT = ["--parameters", "335143938", "--layers", "24", "--sequence", "512", "--hidden", "1024", "--heads", "16"]
GPT2 = ["--parameters", "1557686400", "--dtype", "bfloat16", "--mixed", "--batch", "16", "--layers", "48",
        "--sequence", "1024", "--hidden", "1600", "--vocabulary", "50304", "--fusion-threshold-mb", "0"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "mebibytes"),
    [([*BERT, "--batch", "4"], 14949 - 1343), ([*BERT, "--batch", "1"], 8681 - 1343),
     ([*BERT, "--batch", "1", "--checkpointing"], 6775 - 1343), (GPT2, 40409 + 2 * 2971 + 3 * 742)],
    ids=["BERT-large, batch 4", "batch 1", "batch 1, checkpointing", "GPT-2 1558M"],
)  # fmt: skip
def test_what_was_published_is_estimated_within_the_margin(capsys, words, mebibytes):
    answer = found(capsys, *words, "-n", "8")
    estimated = answer["ranks"][0]["zero"]["1"] if words is GPT2 else answer["need"]["total"]
    assert 1 / terms.MARGIN < estimated / (mebibytes * 2**20) < terms.MARGIN
    assert estimated == pytest.approx(mebibytes * 2**20, rel=0.11)


def test_of_gpt_2_the_activations_alone_are_those_that_were_allocated(capsys):
    assert found(capsys, *GPT2)["need"]["activations"] == pytest.approx(40409 * 2**20, rel=0.1)


def test_zero_cuts_states_then_gradients_then_parameters():
    """The example of the ZeRO paper: 7.5 billion parameters, 64 ranks, mixed precision: 120, 31.4, 16.6, 1.88 GB."""
    need = terms.of_numbers(7.5e9, dtype="float16", optimizer="adam", mixed=True, fusion_bytes=0)
    row = terms.per_rank(need, 64)
    gigabytes = [row.data_parallel / 1e9, *(row.zero[stage] / 1e9 for stage in (1, 2, 3))]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)


def test_more_ranks_never_shrink_plain_data_parallelism(capsys):
    rows = found(capsys, *TRILLION, "-n", "1,2,1024")["ranks"]
    assert rows[0]["data_parallel"] + FUSION_BYTES == rows[1]["data_parallel"] == rows[2]["data_parallel"]
    assert rows[0]["zero"] == {
        "1": rows[0]["data_parallel"],
        "2": rows[0]["data_parallel"],
        "3": rows[0]["data_parallel"],
    }


@pytest.mark.parametrize(("optimizer", "kept"), [("sgd", 0), ("momentum", 1), ("rmsprop", 1), ("adamw", 2)])
def test_states_are_what_the_optimizer_keeps(capsys, optimizer, kept):
    need = found(capsys, "--parameters", "2M", "--optimizer", optimizer)["need"]
    assert need["states"] == kept * 2_000_000 * 4


def test_half_precision_gradients_are_copies_and_only_of_wider_ones(capsys):
    words = ["--parameters", "1M", "--fp16-allreduce", "--fusion-threshold-mb", "64"]
    need = found(capsys, *words)["need"]
    assert (need["compression"], need["fusion_buffer"]) == (2_000_000, 64 * 1024**2)
    assert found(capsys, *words, "--dtype", "float16")["need"]["compression"] == 0


def test_all_that_a_transformer_layer_keeps():
    """GPT-3's numbers as in Korthikanti et al. 2022: 34 + 5 a s / h = 34 + 5 x 96 x 2048 / 12288 = 114 times s b h."""
    sizes = {"batch": 1, "layers": 96, "sequence": 2048, "hidden": 12288}
    need = terms.of_numbers(175e9, dtype="float16", **sizes, heads=96)
    assert need.activations == 114 * 96 * 2048 * 12288
    fused = terms.of_numbers(175e9, dtype="float16", **sizes)
    assert fused.activations == 34 * 96 * 2048 * 12288
    logits = terms.of_numbers(175e9, dtype="float16", **sizes, vocabulary=1000).activations - fused.activations
    assert logits == 2 * 2048 * 1000 * 2


def test_a_rank_that_is_too_small_is_status_1_and_the_stage_that_fits_is_named(capsys):
    words = ["--parameters", "7.5B", "--dtype", "float16", "--mixed", "-n", "64", "--capacity-gb"]
    known = ["--layers", "32", "--sequence", "2048", "--hidden", "4096"]
    assert "ZeRO stage 1 (distribute(shard_state=True)) would do" in " ".join(
        found(capsys, *words, "50", *known, status=1)["notes"]
    )
    assert "no stage of ZeRO" in " ".join(found(capsys, *words, "1", status=1)["notes"])
    assert "On 1 rank a rank" in " ".join(found(capsys, *words[:-2], "1", "--capacity-gb", "1", status=1)["notes"])
    for near in ("125", "140"):  # an estimate of 129 GB, which may be 20 % too high or too low
        assert "too close to say" in " ".join(found(capsys, *words, near, *known, status=1)["notes"])
    assert len(found(capsys, *words, "170", *known)["notes"]) == 1


@pytest.mark.parametrize(
    ("gigabytes", "said"),
    [("1000", "a rank has 888 GB left"), ("80", "ZeRO stage 1 (distribute(shard_state=True)) leaves 41.5 GB")],
)
def test_nothing_suffices_while_the_activations_are_not_known(capsys, gigabytes, said):
    words = ["--parameters", "7B", "--dtype", "bfloat16", "--mixed", "-n", "8", "--capacity-gb", gigabytes]
    answer = found(capsys, *words, status=1)
    assert answer["need"]["activations"] is None
    assert any(f"{said} for its activations, not known; give --layers" in note for note in answer["notes"])
    assert cli.run(["plan", "memory", *words]) == 1
    shown = capsys.readouterr().out
    assert "On each rank, without its activations" in shown and " 0 B  not known" not in shown
    transformer = ["--layers", "32", "--sequence", "2048", "--hidden", "4096"]
    found(capsys, *words, *transformer, status=int(gigabytes == "80"))


@needs_torch
@pytest.mark.parametrize(
    ("net", "optimizer", "device"),
    [
        ("mlp", "sgd", "cpu"),
        ("mlp", "momentum", "cpu"),
        ("cnn", "adam", "cpu"),
        ("transformer", "adam", "cpu"),
        ("cnn", "sgd", "meta"),
        ("fused", "adam", "meta"),
        ("checkpointed", "sgd", "meta"),
        ("checkpointed_again", "sgd", "cpu"),
    ],
)
def test_the_predicted_peak_is_within_a_tenth_of_what_pytorch_allocates(capsys, net, optimizer, device):
    words = ["--model", f"{NETS}:{net}", "--batch", "48", "--optimizer", optimizer, "--device", device, "--measure"]
    answer = found(capsys, *words)
    need = answer["need"]
    assert need["peak"] == pytest.approx(answer["measured_peak"], rel=0.1)
    assert need["peak"] > need["parameters"] + need["gradients"] + need["states"]
    assert need["states"] == pytest.approx(terms.STATES[optimizer] * need["parameters"], rel=0.01)


@needs_torch_alone
def test_activations_grow_with_the_batch_and_parameters_do_not(capsys):
    few, many = (found(capsys, "--model", f"{NETS}:mlp", "--batch", batch)["need"] for batch in ("10", "40"))
    assert many["activations"] == 4 * few["activations"] > 0
    assert many["parameters"] == few["parameters"] == 242_762 * 4


@needs_torch
def test_an_input_shape_stands_in_for_inputs(capsys):
    words = ["--model", f"{NETS}:without_inputs", "--batch", "6", "--input-shape", "1,1000"]
    assert found(capsys, *words)["need"]["parameters"] == 500_500 * 4


@needs_torch_alone
@live("keras")
@pytest.mark.parametrize(("net", "said"), [("without_inputs", "--input-shape"), ("keras_net", "--parameters")])
def test_a_model_that_cannot_be_followed_is_one_sentence(capsys, monkeypatch, net, said):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "parallel" / "lean"))
    assert cli.run(["plan", "memory", "--model", f"{NETS}:{net}", "--batch", "6"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@needs_torch
def test_a_loss_that_takes_one_batch_size_only_is_one_sentence(capsys):
    assert cli.run(["plan", "memory", "--model", f"{NETS}:fixed_batch", "--batch", "64"]) == 2
    err = capsys.readouterr().err
    assert "any batch size" in err and err.count("\n") == 1


@needs_torch
def test_shared_weights_count_once_and_frozen_ones_have_no_gradients(capsys):
    need = found(capsys, "--model", f"{NETS}:tied", "--batch", "48", "--optimizer", "adam")["need"]
    shared, frozen = 500 * 32 * 4, (32 * 32 + 32) * 4
    assert (need["parameters"], need["gradients"]) == (shared + frozen, shared)
    assert need["states"] == pytest.approx(2 * shared, abs=8)  # and a number of steps


@needs_torch
def test_a_batch_that_the_model_refuses_is_one_sentence(capsys):
    for more in ([], ["--measure"]):
        assert cli.run(["plan", "memory", "--model", f"{NETS}:norm", "--batch", "1", *more]) == 2
        err = capsys.readouterr().err
        assert "a step with 1 sample on cpu failed" in err and err.count("\n") == 1
    need = found(capsys, "--model", f"{NETS}:norm", "--batch", "2")["need"]
    assert need["parameters"] == (4 * 8 + 8 + 8 + 8 + 8 + 8) * 4 + 8


@needs_torch
def test_on_meta_a_model_needs_no_memory_of_its_own(capsys):
    """Its weights would be 4 TB."""
    words = ["--model", f"{NETS}:enormous", "--batch", "4096", "--optimizer", "adam", "--device", "meta"]
    need = found(capsys, *words)["need"]
    assert need["parameters"] == need["gradients"] == 4 * (10**6 * 10**6 + 10**6)
    assert need["peak"] > 4 * need["parameters"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model or --parameters"),
        (["--parameters", "1", "--model", "a:b"], "--model or --parameters"),
        (["--parameters", "lots"], "lots"),
        (["--parameters", "nan"], "nan"),
        (["--parameters", "1e300"], "1e18"),
        (["--parameters", "1e9", "--capacity-gb", "nan"], "nan"),
        (["--parameters", "1e9", "--fusion-threshold-mb", "inf"], "inf"),
        (["--parameters", "1e9", "--layers", "3"], "--sequence, --hidden"),
        (["--parameters", "1e9", "--measure"], "--measure"),
        (["--parameters", "1e9", "--input-shape", "1,x"], "1,x"),
        (["--model", "a:b", "--dtype", "float16"], "--dtype"),
        (["--model", "no_such_module:net"], "no_such_module"),
        (["--model", "no_colon"], "no_colon"),
    ],
)
def test_mistakes_are_one_sentence_with_status_2(capsys, words, said):
    assert cli.run(["plan", "memory", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
