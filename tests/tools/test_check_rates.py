"""The measurement of `hvdkit check`'s error rates: what it injects is a mistake, and what is missed is counted."""

import ast
import sys
from pathlib import Path

import pytest

from hvdkit.prepare.check.rules import RULES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "data" / "check" / "correct" / "horovod_torch_class.py"


@pytest.fixture
def check_rates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import check_rates

    yield check_rates
    for name in ("check_rates", "check_mistakes"):
        sys.modules.pop(name, None)


def test_every_mistake_in_a_plain_script_is_found(check_rates) -> None:
    false, injected, lost, blamed = check_rates.measure([str(SCRIPT)], lambda *_: None)
    assert (sum(false.values()), sum(lost.values()), blamed) == (0, 0, 0)
    assert sum(injected.values()) >= 25
    assert len(injected) >= 12


def test_a_mistake_that_is_not_seen_is_counted(check_rates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_rates, "found", lambda *_: check_rates.Counter())
    _, injected, lost, _ = check_rates.measure([str(SCRIPT)], lambda *_: None)
    assert lost == injected


def test_what_is_injected_is_python_and_differs_from_the_script(check_rates) -> None:
    tree = ast.parse(SCRIPT.read_text())
    texts = [text for _, text in check_rates.injected(tree)]
    assert all(ast.dump(ast.parse(text)) != ast.dump(tree) for text in texts)
    assert len(set(texts)) == len(texts)


def test_a_mistake_is_injected_for_every_rule(check_rates) -> None:
    assert {mistake.rule for mistake in check_rates.MISTAKES} == {rule.name for rule in RULES}


def test_the_page_shows_the_last_measurement(check_rates) -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    assert f"of {len(check_rates.correct_scripts())} scripts" in page
    assert all(f"\n| {rule.name} | " in page for rule in RULES)
