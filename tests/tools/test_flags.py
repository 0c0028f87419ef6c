"""The flags of the examples: all of them, only some, other defaults, and an example's own."""

import pytest

from hvdkit import flags
from hvdkit.errors import AgreementError, InvalidArgumentError

SHARED = (
    "epochs", "batch_size", "lr", "warmup_epochs", "device", "num_threads", "seed", "data", "data_dir", "download",
    "log_interval", "fp16_allreduce", "checkpoint_dir", "resume", "wait",
)  # fmt: skip


def own(add):
    add("--stages", type=flags.whole(1), default=3, help="how many")


def said(capsys, status, call):
    with pytest.raises(SystemExit) as end:
        call()
    assert end.value.code == status
    return capsys.readouterr()


def test_an_example_takes_all_shared_flags_unless_it_says_otherwise():
    assert tuple(vars(flags.parse("", []))) == SHARED
    some = flags.parse("", ["--batch-size", "3"], only=("lr", "batch_size"), add=own)
    assert vars(some) == {"lr": 0.03, "batch_size": 3, "stages": 3}


def test_both_spellings_mean_the_same():
    for spelling in ("--warmup_epochs", "--warmup-epochs"):
        assert flags.parse("", [spelling, "0.5"]).warmup_epochs == 0.5
    assert flags.parse("", ["--fp16-allreduce"]).fp16_allreduce and flags.parse("", ["--fp16_allreduce"]).fp16_allreduce


def test_defaults_of_an_example_hold_until_a_flag_is_given_and_are_shown(capsys):
    defaults = {"lr": 0.001, "stages": 5}
    assert flags.parse("", [], defaults=defaults, add=own).lr == 0.001
    given = flags.parse("", ["--lr", "2", "--stages", "7"], defaults=defaults, add=own)
    assert (given.lr, given.stages) == (2.0, 7)
    shown = said(capsys, 0, lambda: flags.parse("", ["--help"], defaults=defaults, add=own)).out
    assert "(default: 0.001)" in shown and "(default: 5)" in shown and "(default: 0.03)" not in shown


@pytest.mark.parametrize(
    "wrong", [{"only": ("lr", "speed")}, {"defaults": {"speed": 3}}, {"only": ("lr",), "defaults": {"epochs": 3}}]
)
def test_a_flag_that_there_is_not_is_a_mistake_in_the_example(wrong):
    with pytest.raises(TypeError, match=r"speed|epochs"):
        flags.parse("", [], **wrong)


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--epochs", "0"], "argument --epochs: must be at least 1, got 0"),
        (["--lr", "nan"], "must be a finite number"),
        (["--stages", "many"], "argument --stages: expected a whole number, got 'many'"),
        (["--seed", str(2**32)], "argument --seed: must be at most 4294967295, got 4294967296"),
        (["--num_threads", "1" + "0" * 14], "must be at most 10000, got 100000000000000"),
        (["--stages", "1" + "0" * 30], "argument --stages: must be at most 9223372036854775807"),
        (["--resume"], "--resume needs --checkpoint_dir"),
    ],
)
def test_a_bad_value_is_one_sentence(capsys, argv, answer):
    sentence = said(capsys, 2, lambda: flags.parse("", argv, add=own)).err
    assert answer in sentence and sentence.count("\n") == 1


def test_only_rank_0_says_it(capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert said(capsys, 2, lambda: flags.parse("", ["--epochs", "0"])).err == ""


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (None, 0, ""),
        (InvalidArgumentError("It is 0."), 2, "train.py: It is 0.\n"),
        (AgreementError("They differ."), 1, "train.py: They differ.\n"),
        (KeyboardInterrupt(), 130, "train.py: interrupted by Ctrl-C.\n"),
    ],
)
def test_run_ends_with_a_status_and_the_sentence_of_a_mistake(monkeypatch, capsys, error, status, sentence):
    monkeypatch.setattr("sys.argv", ["train.py", "--stages", "2"])
    seen = []

    def main(args):
        seen.append(args)
        if error:
            raise error

    words = said(capsys, status, lambda: flags.run(main, "", only=("seed",), defaults={"seed": 7}, add=own)).err
    assert vars(seen[0]) == {"seed": 7, "stages": 2}
    assert words == sentence
