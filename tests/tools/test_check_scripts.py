"""`hvdkit check` on scripts: nothing in correct ones, each injected mistake at its line and nothing else.

The scripts and what is found in them are data, in tests/data/check.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from hvdkit import cli
from hvdkit.prepare.check.rules import RULES, Checked, check_script
from hvdkit.prepare.check.source import Script, read_script
from hvdkit.prepare.check.steps import JudgedCase

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "check"
DEFECTIVE = sorted((DATA / "defective").glob("*.py"))
TRAINING = """
import os
import sys
import torch
import torch.distributed as dist
import horovod.torch as hvd
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
{imports}

def main(args=None):
    hvd.init()
    data = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    best = 1e9
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
{body}

if __name__ == "__main__":
    main()
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))


def check_file(path: Path) -> Checked:
    return check_script(read_script(str(path)))


def rules_of(text: str) -> list[str]:
    return [finding.rule for finding in check_script(Script("script.py", ast.parse(text))).findings]


def training(body: str, imports: str = "") -> str:
    """A training with ``body`` at the end of each epoch and ``imports`` on module level."""
    return TRAINING.format(imports=imports, body=indent(body, " " * 8))


def blocks(name: str) -> Iterator[tuple[str, list[str], str]]:
    """The titled blocks of a file: the title, the rules that are found, and the text."""
    for block in re.split(r"^== ", (DATA / name).read_text(), flags=re.MULTILINE)[1:]:
        title, text = block.split("\n", 1)
        yield title.split(":")[0], title.split(":")[1].split(), text.removesuffix("\n")


def changes() -> Iterator[object]:
    """Correct scripts with one change."""
    for name, rules, text in blocks("changes.txt"):
        old, _, new = text.partition("\n=>")
        script = (DATA / "correct" / f"{name}.py").read_text()
        assert old in script, old
        yield pytest.param(script.replace(old, new.removeprefix("\n"), 1), rules, id=f"{name}-{new.strip()[:30]}")


def forms() -> Iterator[object]:
    """The many ways in which scripts say one thing."""
    for title, rules, text in blocks("forms.txt"):
        for form in text.replace("SAVE", "torch.save(model.state_dict(), 'model.pt')").split("\n--\n"):
            imports, bar, body = form.partition("\n|\n")
            yield pytest.param(
                training(body if bar else form, imports if bar else ""), rules, id=f"{title}-{form[:30]}"
            )


@pytest.mark.parametrize(("text", "rules"), [*changes(), *forms(), pytest.param(training("pass"), [], id="training")])
def test_the_rules_of_a_table_are_found_and_no_others(text: str, rules: list[str]) -> None:
    assert rules_of(text) == rules


@pytest.mark.parametrize("path", sorted((DATA / "correct").glob("*.py")), ids=name_of)
def test_a_correct_script_has_no_finding(path: Path) -> None:
    checked = check_file(path)
    assert checked.findings == []
    assert checked.library == path.stem.split("_")[0].replace("elsewhere", "horovod").replace("optional", "horovod")


def test_the_examples_are_clean_and_do_all_eight_steps(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((ROOT / "examples").glob("*/*.py"))
    distributed = [check_file(path) for path in paths if path.name == "cnn.py"]
    alone = [check_file(path) for path in paths if path.name == "single.py"]
    assert distributed and alone and len(paths) >= 8
    assert cli.run(["check", *map(str, paths)]) == 0, capsys.readouterr().out
    assert {one.library for one in distributed} == {"hvdkit"}
    assert {verdict.status for one in distributed for verdict in one.verdicts} == {"done"}
    assert {one.library for one in alone} == {"none"}


@pytest.mark.parametrize("path", DEFECTIVE, ids=name_of)
def test_each_injected_mistake_is_found_at_its_line_and_nothing_else(path: Path) -> None:
    lines = path.read_text().splitlines()
    injected = {(n, rule) for n, line in enumerate(lines, 1) for rule in re.findall(r"# finds: ([\w-]+)", line)}
    assert injected, "the script has no mark"
    assert {(finding.line, finding.rule) for finding in check_file(path).findings} == injected


def test_every_rule_has_a_defective_script() -> None:
    found = {rule for path in DEFECTIVE for rule in re.findall(r"# finds: ([\w-]+)", path.read_text())}
    assert found == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("again", "expected"),
    [("optimizer_state(optimizer", ["broadcast-too-early"]), ("parameters(model.state_dict()", [])],
)
def test_what_is_loaded_after_a_broadcast_must_be_sent_again(again: str, expected: list[str]) -> None:
    once = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
    loaded = "    if hvd.rank() == 0:\n        model.load_state_dict(torch.load('m.pt'))\n"
    sent = f"{once}{loaded}    hvd.broadcast_{again}, root_rank=0)\n"
    assert rules_of(training("pass").replace(once, sent)) == expected


def test_a_process_set_may_go_backward_on_its_own_ranks() -> None:
    text = (DATA / "correct" / "hvdkit_torch.py").read_text()
    text = text.replace("        loss.backward()", "        if init().is_root:\n            loss.backward()")
    assert rules_of(text) == ["collective-on-some-ranks"]
    assert (
        rules_of(text.replace("distribute(optimizer, model)", "distribute(optimizer, model, process_set=ours)")) == []
    )


def test_what_a_value_comes_from_is_met_in_one_order() -> None:
    """What a message names must not depend on where in memory a script's nodes are."""
    names = [f"value_{number}" for number in range(20)]
    case = JudgedCase(ast.parse("\n".join(f"{one} = {other}" for one, other in zip(names[1:], names, strict=False))))
    last = next(node for node in case.nodes if isinstance(node, ast.Assign) and node.lineno == len(names) - 1)
    assert [node.id for node in case.reach(last.value) if isinstance(node, ast.Name)] == names[-2::-1]
