"""`hvdkit check` as a user sees it: text, JSON, exit status, one sentence for bad usage."""

import json
import re
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.prepare.check.rules import RULES
from hvdkit.prepare.check.steps import STEPS

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "check"
GOOD = str(DATA / "correct" / "hvdkit_torch.py")
BAD = str(DATA / "defective" / "collective_hvdkit.py")


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "check", ("hvdkit.prepare.check.cli:check", "Check a script."))


def as_json(capsys: pytest.CaptureFixture[str]) -> dict:
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def test_a_correct_script_exits_0_and_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", GOOD]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{GOOD}: hvdkit (hvdkit.torch)")
    assert re.search(r"1 initialise +done +line 43\b", output)
    assert "No findings." in output


def test_findings_exit_1_and_say_where_what_why_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", BAD]) == 1
    output = capsys.readouterr().out
    assert f"{BAD}:25 [collective-on-some-ranks]" in output
    assert output.index(f"{BAD}:25") < output.index(f"{BAD}:26")
    assert all(f"  {label}: " in output for label in ("what", "why", "fix"))
    assert "`checkpoints.save` is a call that all ranks make together" in output
    assert output.rstrip().endswith("2 findings.")


def test_json_has_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "--json", GOOD]) == 0
    assert as_json(capsys)["ok"] is True
    assert cli.run(["check", "--json", GOOD, BAD]) == 1
    report = as_json(capsys)
    assert report["ok"] is False
    good, bad = report["scripts"]
    assert (good["path"], good["library"], good["findings"]) == (GOOD, "hvdkit", [])
    assert [(step["number"], step["name"]) for step in good["steps"]] == [(one.number, one.name) for one in STEPS]
    assert good["steps"][0] == {"number": 1, "name": "initialise", "status": "done", "lines": [43], "note": ""}
    assert [(finding["line"], finding["rule"]) for finding in bad["findings"]] == [
        (25, "collective-on-some-ranks"),
        (26, "collective-on-some-ranks"),
    ]
    assert all(finding[key] for finding in bad["findings"] for key in ("what", "why", "fix"))


def test_a_script_without_a_library_is_reported_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(ROOT / "examples" / "pytorch" / "single.py")]) == 0
    output = capsys.readouterr().out
    assert "none found" in output
    assert "one process" in output


def test_the_script_is_not_run_and_its_modules_are_not_imported(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace"
    script.write_text(f"import no_such_module\nopen({str(trace)!r}, 'w').close()\nraise SystemExit(5)\n")
    assert cli.run(["check", str(script)]) == 0
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.py", None, "No such file"),
        ("folder.py", "folder", "Is a directory"),
        ("latin.py", "x = 'é'".encode("latin-1"), "is not UTF-8"),
        ("wrong.py", b"# coding: ascii\nx = '\xe9'\n", "is not UTF-8 (byte 21)"),
        ("unknown.py", b"# coding: no-such\nx = '\xe9'\n", "is not UTF-8"),
        ("broken.py", b"import horovod.torch as hvd\n\ndef f(:\n", "line 3"),
        ("old.py", b"print 'rank'\n", "line 1"),
        ("data.py", b"x = 1\0\n", "is not Python"),
        ("lesson.ipynb", b'{"cells": []}', "is a notebook"),
        ("deep.py", b"x = " + b"1 + " * 20_000 + b"1\n", "too deeply"),
        ("brackets.py", b"(" * 500 + b")" * 500, "not Python"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(
    name: str, content: bytes | str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert cli.run(["check", GOOD, str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"hvdkit: {path}")
    assert expected in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfimport torch\n", b'pattern = "\\d"\n'])
def test_neither_a_byte_order_mark_nor_an_invalid_escape_is_our_concern(
    content: bytes, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    assert cli.run(["check", str(script)]) == 0
    assert not recwarn.list


def test_a_long_script_is_checked_too(tmp_path: Path) -> None:
    """1,800 lines of functions that call each other; the time limit of the suite is what would fail."""
    helpers = "".join(
        f"\n\ndef helper_{number}(value):\n    total = value\n    for step in range(10):\n"
        f"        total = helper_{number - 1}(total) + helper_{number // 2}(step)\n    return total"
        for number in range(1, 300)
    )
    script = tmp_path / "train.py"
    text = (DATA / "correct" / "horovod_torch.py").read_text()
    script.write_text(f"def helper_0(value):\n    return value\n{helpers}\n\nhelper_299(1)\n{text}")
    assert cli.run(["check", str(script)]) == 0


def test_the_rules_are_told_apart_and_explained() -> None:
    assert len({(rule.name, str(rule.fix)) for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
        fixes = [rule.fix] if isinstance(rule.fix, str) else rule.fix.values()
        for text in (rule.what, rule.why, *fixes):
            assert text
            assert not text.endswith(".")


def test_the_page_lists_every_rule_and_no_other() -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert listed == list(dict.fromkeys(rule.name for rule in RULES))
