import base64
import configparser
import hashlib
import json
import re
from collections import Counter
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest
from timeline_files import ATPESC

from hvdkit.cli import run
from hvdkit.read.timeline import report, summarize
from hvdkit.read.timeline.report import render_report

ROOT = Path(__file__).parents[2]
FIRST = 3_836_863
"""Microseconds at which its first event is."""
BEGINS = summarize(ATPESC).steps.begins
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><!--<script>",
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "größe/勾配/🎉",
    "a\u202eb\u0000c\u2028d",
    "layer." * 2000,
]
KNOWN_TAGS = re.compile(
    "html|head|meta|title|style|body|header|main|section|h1|h2|p|dl|div|dt|dd|small|ol|ul|li|span|strong|figure|figcaption"
    "|svg|desc|rect|line|text|path|table|caption|thead|tbody|tr|th|td|button|output|canvas|noscript|footer|script"
)
KNOWN_ATTRIBUTES = re.compile(
    "lang|charset|http-equiv|content|name|class|id|aria-labelledby|aria-label|aria-live|role|viewbox|x|y|x1|x2|y1|y2"
    "|width|height|d|transform|scope|type|data-action|tabindex|title"
)


def timeline(path, names, steps=6, length=10_000, batch=True):
    """A recording in which each step reduces all tensors at once, fused where ``batch`` says so."""
    started = {"start_time_since_epoch_in_micros": 1_700_000_000_000_000}
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": started}]
    for pid, name in enumerate(names, 1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
    pids = range(1, len(names) + 1)
    for step in range(steps):
        at = 1000 + step * length
        phases = [
            ("MEMCPY_IN_FUSION_BUFFER", 1100, 1200),
            ("MPI_ALLREDUCE", 1210, 4210),
            ("MEMCPY_OUT_FUSION_BUFFER", 4300, 4400),
        ]
        for name, when in (("NEGOTIATE_ALLREDUCE", 0), ("", 1000), ("ALLREDUCE", 1010)):
            for pid in pids:
                events.append({"ph": "B" if name else "E", "name": name, "ts": at + when, "pid": pid})
        for name, start, end in phases if batch else phases[1:2]:
            events += [{"ph": "B", "name": name, "ts": at + start, "pid": pid} for pid in pids]
            events += [{"ph": "E", "name": "", "ts": at + end, "pid": pid} for pid in pids]
        args = {"dtype": "float32", "shape": "[1000]"}
        events += [{"ph": "E", "name": "", "ts": at + 4500, "pid": pid, "args": args} for pid in pids]
    path.write_text(json.dumps(events))
    return path


class Page(HTMLParser):
    """What a browser would make of a page, as far as the tests ask."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self.scripts = []
        self.style = ""
        self.stack = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.stack.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append([dict(attributes), ""])

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        inside = self.stack[-1][0] if self.stack else ""
        if inside == "script":
            self.scripts[-1][1] += data
        elif inside == "style":
            self.style += data
        else:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def lanes(self):
        return self.data["lanes"]

    @property
    def data(self):
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "page-data"))

    @property
    def policy(self):
        return next(e["content"] for tag, e in self.elements if e.get("http-equiv") == "Content-Security-Policy")


def assert_inert(page):
    """Nothing but the elements of the template, one script, and nothing that loads or runs."""
    assert [tag for tag, _ in page.elements if not KNOWN_TAGS.fullmatch(tag)] == []
    names = {name for _, attributes in page.elements for name in attributes}
    assert [name for name in names if not KNOWN_ATTRIBUTES.fullmatch(name)] == []
    assert [attributes for attributes, _ in page.scripts] == [{"type": "application/json", "id": "page-data"}, {}]
    assert "url(" not in page.style
    assert "@import" not in page.style


def hash_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_hostile_names_are_text(tmp_path):
    """Of tensors, of the file, of operations and their phases."""
    path = timeline(tmp_path / "<img src=x onerror=alert(1)>.json", HOSTILE)
    renamed = {"ALLREDUCE": "</script><b>", "NEGOTIATE_ALLREDUCE": "NEGOTIATE_</script><b>", "MPI_ALLREDUCE": "MPI_<i>"}
    events = [{**one, "name": renamed.get(one["name"], one["name"])} for one in json.loads(path.read_text())]
    path.write_text(json.dumps(events))
    page = Page(render_report(path))
    assert_inert(page)
    assert "Timeline of <img src=x onerror=alert(1)>.json" in page.text
    assert {"</script><b>", "MPI_<i>"} <= set(page.lanes["words"])
    for name in HOSTILE[:6]:
        assert name in page.texts
        assert name in page.lanes["lanes"]
    assert r"a\u202eb\x00c\u2028d" in page.lanes["lanes"]
    assert all(len(name) <= 1000 for name in page.lanes["lanes"])


def test_the_policy_allows_the_one_script_and_the_one_style_sheet_only():
    page = Page(render_report(ATPESC))
    policy = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'{hash_of(page.scripts[1][1])}'",
        "style-src": f"'{hash_of(page.style)}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_the_public_run_is_shown_with_its_numbers():
    page = Page(render_report(ATPESC))
    for expected in ("8 ranks", "Steps 154 of 8 tensors 4.80 MB each", "98% of the bytes are"):
        assert expected in page.text
    assert [e["id"] for tag, e in page.elements if tag == "figure"] == ["step-times", "tensor-phases"]
    steps = page.data["steps"]
    assert (steps["count"], len(steps["points"]), steps["longest"][0]) == (153, 153, 13)
    assert steps["points"][0] == pytest.approx([0, 436e3, 436e3, 436e3], rel=0.01)
    assert steps["usual"] == pytest.approx(175e3, rel=0.01) and steps["top"] < 765e3 == round(steps["longest"][1], -3)
    sums = [sum(times) for _, times in page.data["tensors"]]
    assert sums == sorted(sums, reverse=True) and sums[0] == pytest.approx(5.96e6, rel=0.01)


def raw_operations(path, since, until):
    """Operations that touch a part of the file, counted from its events without the code under test."""
    begins, found = {}, Counter()
    for event in json.loads(path.read_text()):
        name = event.get("name", "")
        if event["ph"] == "B" and name.startswith("NEGOTIATE_"):
            begins[event["pid"]] = event["ts"]
        if event["ph"] == "E" and "args" in event and begins[event["pid"]] < until and event["ts"] >= since:
            found[event["pid"]] += 1
    return found.total()


def test_the_window_holds_the_operations_that_touch_it():
    page, (begin, end) = Page(render_report(ATPESC, 20)), BEGINS[20:22]
    assert len(page.lanes["operations"]) == raw_operations(ATPESC, begin, end) >= 8
    assert page.lanes["origin"] == pytest.approx(begin - FIRST), "times count from the first event"
    assert page.lanes["length"] == pytest.approx(end - begin)
    assert "Left out" not in page.text


def test_a_step_is_the_window_and_the_numbers_stay_those_of_the_whole():
    page = Page(render_report(ATPESC, 20))
    assert page.lanes["steps"][0] == [20, 0.0]
    assert len({operation[0] for operation in page.lanes["operations"]}) >= 8
    assert "Step 20:" in page.text
    assert "Steps 154 of" in page.text


def test_without_a_choice_some_usual_steps_are_shown(tmp_path):
    page = Page(render_report(timeline(tmp_path / "t.json", ["a", "b"], steps=50)))
    assert "Steps 1 to 3, of usual length" in page.text
    assert len({operation[2] for operation in page.lanes["operations"]}) == 3


def test_too_many_operations_are_left_out_and_the_page_says_so(monkeypatch):
    whole = Page(render_report(ATPESC)).lanes["operations"]
    monkeypatch.setattr(report, "OPERATIONS", 20)
    page = Page(render_report(ATPESC))
    assert len(page.lanes["operations"]) == 20
    assert f"this part has {len(whole)} operations, of which the page holds the first 20" in page.text
    begins = [operation[2] for operation in page.lanes["operations"]]
    assert sorted(begins) == [operation[2] for operation in whole][:20]
    assert page.lanes["length"] == whole[20][2]


def test_the_page_does_not_grow_with_the_recording(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "OPERATIONS", 200)
    short = render_report(timeline(tmp_path / "short.json", ["a", "b", "c"], steps=500))
    long = render_report(timeline(tmp_path / "long.json", ["a", "b", "c"], steps=5000))
    assert len(long) < 1.2 * len(short)
    assert "the shortest and the longest of 13 steps in a row" in Page(long).text


def test_a_recording_without_steps_has_a_page(tmp_path):
    page = Page(render_report(timeline(tmp_path / "t.json", ["a"], steps=1)))
    assert "No steps were found" in page.text and "not known: record with" in page.text
    assert len(page.lanes["operations"]) == 1


def test_a_recording_that_was_cut_off_has_a_page_that_says_so(tmp_path):
    (tmp_path / "cut.json").write_bytes(ATPESC.read_bytes()[:200_003])
    page = Page(render_report(tmp_path / "cut.json"))
    assert "cut off at the end" in page.text
    assert_inert(page)


def test_the_command_writes_the_page(tmp_path, capsys):
    page = tmp_path / "report.html"
    page.write_text("an older one")
    assert run(["timeline", "report", str(ATPESC), "-o", str(page), "--step", "3"]) == 0
    assert "report.html" in capsys.readouterr().out
    assert "tensor (20 of 58)" in Page(page.read_text(encoding="utf-8")).text
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["{real}", "-o", "{tmp}/r.html", "--step", "999"], 2, "steps 0 to 153"),
        (["{real}", "-o", "{tmp}"], 2, "directory"),
        (["{tmp}/empty.json", "-o", "{tmp}/empty.json"], 2, "is the input"),
        (["{real}", "-o", "{tmp}/none/r.html"], 1, "cannot write"),
        (["{tmp}/empty.json", "-o", "{tmp}/r.html"], 1, "no operation of Horovod"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(tmp_path, capsys, arguments, status, says):
    (tmp_path / "empty.json").write_text("[]")
    assert run(["timeline", "report", *(text.format(real=ATPESC, tmp=tmp_path) for text in arguments)]) == status
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["empty.json"]


def test_the_templates_are_part_of_the_package():
    settings_ = configparser.ConfigParser()
    settings_.read(ROOT / "setup.cfg")
    patterns = settings_["options.package_data"]["hvdkit.read.timeline"].split(",")
    files = [
        path for path in (ROOT / "hvdkit" / "read" / "timeline").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    data = [str(path.relative_to(ROOT / "hvdkit" / "read" / "timeline")) for path in files if path.suffix != ".py"]
    assert len(data) == 3
    assert all(any(fnmatch(name, pattern.strip()) for pattern in patterns) for name in data)
