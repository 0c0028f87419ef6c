"""`hvdkit port --try`: the verdicts, of recordings that are made up; and how a script is run."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdkit import cli
from hvdkit.observe import trial as trials
from hvdkit.observe.trial import Trial, TrialRecording, WantedTrial
from hvdkit.prepare.port import trial

SCRIPT = """\
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in torch.utils.data.DataLoader(data, batch_size=2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
RUNS = ("ours-1", "theirs-1", "ours-2", "theirs-2", "theirs-3")


@pytest.fixture
def ported(tmp_path):
    return trial.Scripts(str(tmp_path / "train.py"), SCRIPT.encode(), SCRIPT.encode() + b"# ported")


def recording(
    rank=0, size=1, *, steps=3, scale=1.0, start=0.0, gradient=(1.0, 2.0), draws=False, samples=None, own=None
):
    """Gradient descent on numbers, of which an epoch has 6 samples; ``scale`` is what is wrong with the gradient."""
    seen = Trial(WantedTrial("", 99), rank)
    weights = np.full(2, start)
    loader = iter([np.array([one]) for one in (range(rank, 6, size) if samples is None else samples)])
    for step in range(steps):
        seen.batch(loader.__next__, loader)
        if draws:
            np.random.rand(700)
        seen.begin("sgd", [weights], [np.array(gradient)])
        weights = weights - 0.1 * scale * np.array(gradient)
        seen.end("sgd", [weights], 0.1 * size, own and own[step])
    seen._read_first_epochs()
    return seen.made


def apart_in_the_end(rank=0, size=1, by=0.01):
    """Whose last step ends a little off."""
    seen = recording(rank, size)
    seen.arrays["w2"] = seen.arrays["w2"] + by
    seen.steps[2]["digest"] = "another"
    return seen


def tried(monkeypatch, ported, **runs):
    """What is said where the runs recorded this; each is as it must be unless it is given."""
    usual = {"ours-1": [recording()], "theirs-1": [replace(recording(), same=True)],
             "ours-2": [recording(rank, 2) for rank in (0, 1)], "theirs-2": [recording()],
             "theirs-3": [recording()]}  # fmt: skip
    asked = []

    def recorded(self, what, name, ranks, *, batches="", dropout=True):
        asked.append((name, ranks, batches, dropout))
        return {**usual, **runs}[name]

    monkeypatch.setattr(trial._Runs, "run", recorded)
    found = trial.attempt(ported, (), 3, 10.0)
    assert [one for one, *_ in asked] == list(RUNS[: len(asked)])
    if "Equal:" in found.verdict:
        usual = [("theirs-1", 0, "ours-1", True), ("ours-2", 2, "", False), ("theirs-2", 0, "union", False)]
        assert asked[1:] in (usual, [*usual, ("theirs-3", 0, "exchanged", False)])
    return found


def test_equal_weights_are_equal(monkeypatch, ported):
    found = tried(monkeypatch, ported)
    assert found.ok and found.as_text().startswith(
        "Equal: 1 rank takes the script's own steps, and 2 ranks those of one"
    )
    assert "3 steps at a learning rate of 0.1, equal bit for bit" in found.lines[0]
    assert found.lines[1] == "2 ranks: an epoch is the script's own 6 samples, each once."
    assert found.lines[2] == "2 ranks with each other: equal bit for bit." and "0.2" in found.lines[3]


def test_rounding_is_told_by_the_same_batches_with_halves_that_change_places(monkeypatch, ported):
    given = {}

    def recorded(self, what, name, ranks, *, batches="", dropout=True):
        if batches in ("union", "exchanged"):
            made = trials.read(self.directory / batches, 0)
            given[batches] = [made.arrays[event["batch"]["arrays"][0]].tolist() for event in made.events]
        return [apart_in_the_end(rank, 2) for rank in (0, 1)] if ranks == 2 else [recording()]

    monkeypatch.setattr(trial._Runs, "run", recorded)
    trial.attempt(ported, (), 3, 10.0)
    assert given == {"union": [[0, 1], [2, 3], [4, 5]], "exchanged": [[1, 0], [3, 2], [5, 4]]}


@pytest.mark.parametrize(
    ("runs", "ok", "verdict", "line"),
    [
        ({"ours-1": [recording(scale=1.01)]}, False, "Differs: on 1 rank", "1.0e-02 of the way moved apart"),
        ({"ours-1": [recording(start=1.0)]}, False, "begins with other weights", "from step 1 on"),
        ({"theirs-1": [recording(own=[0.2] * 3, samples=range(7))]}, False, "Differs: on 1 rank the learning rate",
         "another from step 1 on."),
        ({"theirs-1": [recording(own=[0.1, 0.09, 0.08])]}, False, "Differs: on 1 rank the learning rate",
         "another from step 2 on."),
        ({"theirs-1": [recording(own=[0.1, 0.09, 0.08], samples=range(7))]}, True,
         "Equal but for the learning rate: 1 rank",
         "1 rank: an epoch leaves out 1 of the script's samples, which fill no step. "
         "without the port's rates the script has a learning rate of 0.08 to 0.1, another from step 2 on."),
        ({"ours-1": [TrialRecording()]}, False, "no step of an optimizer", ""),
        ({"ours-1": [recording()], "theirs-1": [TrialRecording()]}, False, "Differs: on 1 rank", "3 and 0 steps"),
        ({"ours-2": [recording(0, 2), recording(1, 2, scale=2)]}, False, "hold different weights in step 1", ""),
        ({"ours-2": [recording(0, 2), recording(1, 2, steps=2)]}, False, "ranks take 3 and 2 steps", ""),
        ({"ours-2": [recording(0, 2, scale=np.nan)] * 2}, False, "not finite", ""),
        ({"ours-2": [recording(rank, 2, scale=2) for rank in (0, 1)], "theirs-2": [recording(scale=2)]}, True,
         "Equal:", ""),
        ({"ours-2": [recording(rank, 2, scale=2) for rank in (0, 1)]}, False, "Differs: 2 ranks do not", "1.0e+00"),
        ({"ours-2": [apart_in_the_end(rank, 2) for rank in (0, 1)]}, False, "Differs: 2 ranks", "more than 0.001"),
        ({"ours-2": [apart_in_the_end(rank, 2) for rank in (0, 1)], "theirs-3": [apart_in_the_end(by=0.003)]}, True,
         "Equal:", "6.3e-03 apart from itself"),
        ({"ours-2": [apart_in_the_end(rank, 2) for rank in (0, 1)], "theirs-3": [recording(scale=2)]}, False,
         "Differs: 2 ranks", "1.0e+00 apart from itself"),
        ({"theirs-2": [recording(scale=1.0001)]}, True, "Equal:", "1.0e-04 of the way"),
        ({"ours-2": [recording(rank, 2, draws=True) for rank in (0, 1)]}, True, "where that is defined", "random"),
        ({"ours-2": [replace(recording(rank, 2), notes=["BatchNorm"]) for rank in (0, 1)]}, True,
         "where that is defined", "sync_batch_norm"),
        ({"ours-2": [replace(recording(rank, 2), events=[]) for rank in (0, 1)]}, True, "where that is defined",
         "no loader"),
        ({"theirs-1": [replace(recording(), notes=["sparse"])]}, True, "Equal:", "Keras' own steps of emb"),
        ({"ours-2": [replace(recording(rank, 2), notes=["dropout"]) for rank in (0, 1)]}, True, "Equal:", "Dropout "),
    ],
)  # fmt: skip
def test_each_difference_has_its_verdict(monkeypatch, ported, runs, ok, verdict, line):
    found = tried(monkeypatch, ported, **runs)
    assert verdict in found.verdict and found.ok is ok
    assert line in " ".join(found.lines)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (([0, 2, 4], [1, 3, 5]), "Equal: "),
        (([0, 4, 2], [5, 3, 1]), "Equal: "),
        (([0, 2, 4], [1, 3, 0]), "train on 1 of the script's 6 samples more often"),
        (([0, 1, 2], [0.5, 1.5, 2.5]), "3 of the ranks' 6 are none of the script's"),
        (([0, 2, 4, 1, 3, 5], [1, 3, 5, 0, 2, 4]), "train on 12 samples, and the script itself on 6"),
    ],
)
def test_an_epoch_of_the_ranks_is_that_of_the_script(monkeypatch, ported, samples, said):
    """Whatever their weights are: a port that drops half of the data has weights that look right."""
    ours = [recording(rank, 2, samples=part) for rank, part in enumerate(samples)]
    found = tried(monkeypatch, ported, **{"ours-2": ours})
    assert said in found.as_text()
    assert found.verdict.startswith("Equal: ") == ("Equal: " in said)
    assert found.ok == ("none of" in said or "Equal" in said)


def test_half_of_the_data_is_missed_and_what_a_run_draws_at_random_is_not_told_apart(monkeypatch, ported):
    whole = {name: [recording(steps=2, samples=range(12))] for name in ("ours-1", "theirs-1", "theirs-2")}
    half = [recording(rank, 2, steps=2, samples=range(rank, 6, 2)) for rank in (0, 1)]
    found = tried(monkeypatch, ported, **whole, **{"ours-2": half})
    assert found.verdict == "Differs: in an epoch 2 ranks train on 6 samples, and the script itself on 12."
    drawn = [recording(samples=np.arange(6) + number / 8) for number in range(3)]
    found = tried(monkeypatch, ported, **{"ours-1": drawn[:1], "theirs-1": [replace(drawn[1], same=True)]})
    assert found.ok and found.verdict.startswith("Equal where that is defined")
    assert "alters them at random" in " ".join(found.lines)


def test_what_is_looked_at_or_evaluated_before_the_first_step_is_no_epoch():
    seen, weights = Trial(WantedTrial("", 99), 0), np.zeros(2)
    loaders = [iter([np.array([one]) for one in range(length)]) for length in (3, 2, 4)]
    look, evaluation, training = loaders
    seen.batch(look.__next__, look)
    while True:
        try:
            seen.batch(evaluation.__next__, evaluation)
        except StopIteration:
            break
    for _ in range(2):
        seen.batch(training.__next__, training)
        seen.begin("sgd", [weights], [np.ones(2)])
        seen.end("sgd", [weights + 1], 0.1)
    seen._read_first_epochs()
    assert [(one["rows"], one["why"]) for one in seen.made.epochs] == [(4, "")]


def test_what_is_evaluated_between_a_batch_and_its_step_is_no_epoch():
    """A pass that ended before the first step trained nothing, whichever began first."""
    seen, weights = Trial(WantedTrial("", 99), 0), np.zeros(2)
    training, evaluation = (iter([np.array([one]) for one in range(length)]) for length in (3, 2))
    for step in range(3):
        seen.batch(training.__next__, training)
        if step == 0:
            for _ in range(2):
                seen.batch(evaluation.__next__, evaluation)
            with pytest.raises(StopIteration):
                seen.batch(evaluation.__next__, evaluation)
        seen.begin("sgd", [weights], [np.ones(2)])
        seen.end("sgd", [weights + 1], 0.1)
    with pytest.raises(StopIteration):
        seen.batch(training.__next__, training)
    seen._read_first_epochs()
    assert [one["rows"] for one in seen.made.epochs] == [3]


def test_ranks_on_the_same_batches_are_no_training_on_shards(monkeypatch, ported):
    seen = Trial(WantedTrial("", 9), 0)
    seen.batch(iter([np.arange(4)]).__next__)
    same = [replace(recording(rank, 2), events=seen.made.events, arrays={**recording().arrays, **seen.made.arrays})
            for rank in (0, 1)]  # fmt: skip
    found = tried(monkeypatch, ported, **{"ours-2": same})
    assert found.verdict == "Differs: both of 2 ranks train on the same batches." and not found.ok


def test_a_gradient_of_rounding_alone_counts_for_nothing(monkeypatch, ported):
    theirs = recording(gradient=(1.0, 1e-9))
    ours = [recording(rank, 2, gradient=(1.0, 1e-9)) for rank in (0, 1)]
    for one in ours:
        for step in range(3):
            one.arrays[f"w{step}"] = one.arrays[f"w{step}"] + [0.0, 0.1]  # Adam's whole step, which rounding decides
            one.steps[step]["digest"] = 7 + step
    assert tried(monkeypatch, ported, **{"ours-2": ours, "theirs-2": [theirs]}).ok
    for one in ours:
        one.arrays["w2"] = one.arrays["w2"] + [0.1, 0.0]
    assert not tried(monkeypatch, ported, **{"ours-2": ours, "theirs-2": [theirs]}).ok


def runs_of(tmp_path, content, *arguments, timeout_s=100.0):
    scripts = trial.Scripts(str(tmp_path / "train.py"), content.encode(), b"")
    return trial._Runs(scripts, list(arguments), 2, timeout_s, tmp_path)


def test_a_script_is_run_under_its_own_name_and_nothing_of_the_current_directory_instead(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "numpy.py").write_text("raise ImportError('the one of this directory')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "beside.py").write_text("number = 7\n")
    said = "import sys, random, beside, pathlib\n__name__ == '__main__' or 1 / 0\n" \
           "pathlib.Path(sys.argv[1]).write_text(f'{__file__} {beside.number} {random.random()}')\n" \
           "from hvdkit.observe import trial\ntrial.current().note('as marks do')\n"  # fmt: skip
    seen = []
    for name in ("a", "b"):
        (made,) = runs_of(tmp_path, said, str(tmp_path / name)).run("it", "it", 0)
        assert made.steps == [] and made.notes == ["as marks do"]
        seen.append((tmp_path / name).read_text())
    assert seen[0].startswith(f"{tmp_path / 'train.py'} 7 ") and seen[0] == seen[1]


def test_a_run_that_fails_is_the_verdict(tmp_path):
    with pytest.raises(trial._Ended) as failed:
        runs_of(tmp_path, "raise FileNotFoundError('no data here')\n").run("the script itself", "it", 0)
    first, *last = str(failed.value).splitlines()
    assert first == "Failed: the script itself ended with exit status 1." and "no data here" in last[-1]
    with pytest.raises(trial._Ended, match=re.escape("did not take 2 steps within 0.5 s")):
        runs_of(tmp_path, "while True:\n    pass\n", timeout_s=0.5).run("the script itself", "it", 0)


def test_the_command_says_the_verdict_and_ends_by_it(tmp_path, monkeypatch, capfd):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    for ok in (True, False):
        monkeypatch.setattr(
            trial, "attempt", lambda ported, *given, ok=ok: trial.ComparedTrial(ok, f"asked {given}", ["numbers"])
        )
        assert cli.run(["port", str(path), "-o", str(tmp_path / "o.py"), "--try", "--", "--epochs", "1"]) == (not ok)
        assert "asked (('--epochs', '1'), 5, 600.0)\n  numbers" in capfd.readouterr().out
    assert cli.run(["port", str(path), "--epochs"]) == cli.run(["port", str(path), "x"]) == 2
    assert "runs only with --try" in capfd.readouterr().err
    monkeypatch.undo()
    path.write_text("print(1)\n")
    assert cli.run(["port", str(path), "--diff", "--try"]) == 1
    assert "Nothing was tried" in capfd.readouterr().err


def test_what_is_tried_is_hooked_where_the_stacks_are(tmp_path):
    """Every row of the trial names a function that is there."""
    from hvdkit.observe import trial_marks
    from hvdkit.observe.startup import sitecustomize

    rows = [row for row in sitecustomize._ASKED if row[0] == trials.VARIABLE]
    assert len(rows) > 10 and all(callable(getattr(trial_marks, function)) for _, _, function, _ in rows)
    assert (trial._STACKS / "sitecustomize.py").is_file()
    assert Path(sitecustomize.__file__).parent == trial._STACKS
