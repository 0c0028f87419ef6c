"""benchmarks/gpu.py: one section's failure is that section's result, with its reason, and costs no other one."""

import importlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PYTHON = [sys.executable, "-c"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


@pytest.fixture
def kit_of(gpu, monkeypatch, tmp_path):
    """Runs the kit with these sections, all of the machine's own; gives its status and what it wrote."""

    def start(*sections, device="cpu"):
        monkeypatch.setattr(
            gpu, "SECTIONS", [gpu.Section(run.__name__, "", limit, run, cards) for run, limit, cards in sections]
        )
        status = gpu.main(["-o", str(tmp_path), "--device", device])
        found = json.loads((tmp_path / "gpu.json").read_text())
        return status, {one["name"]: one for one in found["sections"]}, (tmp_path / "gpu.md").read_text()

    return start


def test_what_fails_is_recorded_with_its_last_lines_and_the_rest_goes_on(kit_of):
    def ends_badly(kit):
        kit.run(*PYTHON, "import sys; print('out of | memory'); sys.exit(3)")

    def is_wrong_itself(kit):
        return {}["peak"]

    def works(kit):
        return {"says": ["fine"], "lines_of": kit.run(*PYTHON, "print(1 + 1)")[1]}

    status, found, page = kit_of((ends_badly, 60, 0), (is_wrong_itself, 60, 0), (works, 60, 0))
    assert status == 1
    assert [one["state"] for one in found.values()] == ["failed", "failed", "passed"]
    assert found["ends_badly"]["lines"] == ["out of | memory"] and "status 3" in found["ends_badly"]["says"][0]
    assert "KeyError: 'peak'" in found["is_wrong_itself"]["says"][0]
    assert found["works"]["lines_of"] == ["2"]
    assert "out of | memory" in page and "- fine" in page


@pytest.mark.slow
def test_a_section_over_its_time_is_ended_with_all_that_it_started(kit_of, tmp_path):
    child = tmp_path / "child"

    def hangs(kit):
        kit.run("sh", "-c", f"echo $$ > {shlex.quote(str(child))}; exec sleep 600")

    def works(kit):
        return {"says": []}

    status, found, _ = kit_of((hangs, 5, 0), (works, 60, 0))
    assert status == 1 and found["works"]["state"] == "passed"
    assert found["hangs"]["state"] == "failed" and "time limit" in found["hangs"]["says"][0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), signal.SIGCONT)


def test_without_a_card_the_sections_that_need_one_say_so(kit_of):
    def machine(kit):
        kit.machine = {"cards": 0, "why": "no driver"}
        return {"says": []}

    def needs_one(kit):
        raise AssertionError("it ran")

    status, found, page = kit_of((machine, 60, 0), (needs_one, 60, 1), device="cuda")
    assert status == 0 and found["needs_one"]["state"] == "skipped"
    assert "no CUDA device (no driver)" in page


def test_wrong_results_and_other_weights_are_failures(gpu):
    right = {"steps": 12, "bit_equal": True, "difference": 0.0, "allowed": 1e-6, "step_ms": 1.0}
    answers = [{"checked": 2, "wrong": [], "fp32": right} for _ in range(2)]
    assert "bit for bit" in gpu.exchanged(answers)["says"][1]
    answers[1]["fp32"] = {**right, "bit_equal": False, "difference": 2e-6}
    with pytest.raises(gpu.SectionError, match="not those of one process"):
        gpu.exchanged(answers)
    answers[1]["wrong"] = ["rank 1: broadcast: 1, expected 2"]
    with pytest.raises(gpu.SectionError, match="1 of 2 collectives are wrong"):
        gpu.exchanged(answers)


def test_what_nccl_refuses_is_a_result_and_anything_else_a_failure(gpu, monkeypatch, tmp_path):
    kit = gpu.Kit("cuda", tmp_path / "log")
    lines = ["node:1:2 init.cc:1 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"]

    def refused(*_, **__):
        raise gpu.SectionError("ended with status 1", lines)

    monkeypatch.setattr(kit, "ranks", refused)
    found = gpu.nccl_shared(kit)
    assert found["works"] is False and "Duplicate GPU" in found["says"][0]
    lines[:] = ["Segmentation fault"]
    with pytest.raises(gpu.SectionError):
        gpu.nccl_shared(kit)
