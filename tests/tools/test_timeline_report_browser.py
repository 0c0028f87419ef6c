"""The report in a real browser, opened from disk: nothing is loaded, nothing in the recording runs, the lanes zoom."""

import io
import re
import shutil
from pathlib import Path

import pytest

from hvdkit.cli import run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
image = pytest.importorskip("PIL.Image", reason="pillow is not installed (pip install pillow)")

pytestmark = pytest.mark.slow

ATPESC = Path(__file__).parents[1] / "data" / "timelines" / "atpesc-2023-cpu-8ranks.json"
SCRIPT = "<script>alert(1)</script>"
HOSTILE = [SCRIPT, '"><img src=x onerror=alert(1)>', "</script><svg onload=alert(1)>", "größe/勾配", "long." * 3000]
NEGOTIATE, COLLECTIVE = (0xE6, 0x9F, 0x00), (0x00, 0x72, 0xB2)


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program)
        yield started
        started.close()


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    text = ATPESC.read_text()
    names = list(dict.fromkeys(re.findall(r'"name": "(PartitionedCall[^"]*)"', text)))[: len(HOSTILE)]
    assert len(names) == len(HOSTILE)
    for old, new in zip(names, HOSTILE, strict=True):
        text = text.replace(f'"{old}"', '"' + new.replace("\\", "\\\\").replace('"', '\\"') + '"')
    (folder / "timeline.json").write_text(text)
    assert run(["timeline", "report", str(folder / "timeline.json"), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


class Watched:
    """A page on which everything is recorded that must not happen."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True, **options)
        self.page = self.context.new_page()
        self.requests, self.messages, self.dialogs = [], [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.address = path.as_uri()

    def assert_quiet(self):
        assert self.requests == [self.address]
        assert self.messages == []
        assert self.dialogs == []

    @property
    def window(self):
        """Start and end of what the lanes show, in seconds."""
        found = re.match(r"([\d.]+) s to ([\d.]+) s", self.page.locator("#shown").text_content())
        return float(found[1]), float(found[2])

    @property
    def length(self):
        return self.window[1] - self.window[0]

    def button(self, name):
        self.page.get_by_role("button", name=name).click()

    def over_an_operation(self, lane=0):
        """Moves the pointer along a lane until something is under it; returns where that is."""
        canvas = self.page.locator("#canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        for right in range(240, int(box["width"]), 6):
            self.page.mouse.move(box["x"] + right, box["y"] + 41 + 22 * lane)
            if self.page.locator("#tip").is_visible():
                return box["x"] + right, box["y"] + 41 + 22 * lane
        raise AssertionError(f"no operation in lane {lane}")


def colours_of(png):
    picture = image.open(io.BytesIO(png)).convert("RGB")
    return {colour: count for count, colour in picture.getcolors(1 << 24)}


@pytest.fixture
def watched(browser, hostile_page):
    found = Watched(browser, hostile_page)
    yield found
    found.context.close()


def test_it_opens_from_disk_and_nothing_in_the_recording_runs(watched, tmp_path):
    assert watched.page.get_by_text(SCRIPT, exact=True).count() >= 2
    assert watched.page.locator("img, iframe, object, link, [onerror], [onload], [src]").count() == 0
    watched.over_an_operation()
    watched.page.mouse.down()
    watched.page.mouse.up()
    watched.page.screenshot(path=tmp_path / "report.png", full_page=True)
    seen = colours_of((tmp_path / "report.png").read_bytes())
    assert len(seen) > 50
    assert seen[NEGOTIATE] > 1000
    assert seen[COLLECTIVE] > 1000
    watched.assert_quiet()


def test_a_script_that_got_into_the_page_would_not_run(browser, hostile_page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        hostile_page.read_text().replace("<footer>", "<script>alert(1)</script><img src=x onerror=alert(2)>")
    )
    found = Watched(browser, broken)
    assert found.dialogs == []
    assert any("Content Security Policy" in message for message in found.messages)
    found.context.close()


def test_buttons_wheel_and_keys_zoom_and_move(watched):
    whole = watched.window
    watched.button("Zoom in")
    assert watched.length == pytest.approx((whole[1] - whole[0]) / 2, rel=1e-3)
    near = watched.window
    watched.button("Later")
    assert watched.window[0] > near[0]
    watched.button("Earlier")
    watched.button("Zoom out")
    assert watched.window == whole
    watched.over_an_operation()
    shown = watched.page.locator("#shown").text_content()
    watched.page.mouse.wheel(0, -500)
    watched.page.wait_for_function("text => document.getElementById('shown').textContent !== text", arg=shown)
    assert watched.length < (whole[1] - whole[0]) * 0.7
    watched.page.locator("#canvas").focus()
    for key, smaller in (("+", True), ("-", False)):
        before = watched.length
        watched.page.keyboard.press(key)
        assert (watched.length < before) is smaller
    before = watched.window
    watched.page.keyboard.press("ArrowRight")
    assert watched.window[0] > before[0]
    watched.page.keyboard.press("Home")
    assert watched.window == whole
    watched.assert_quiet()


def test_an_operation_says_what_it_is_and_a_click_lists_its_phases(watched):
    x, y = watched.over_an_operation()
    assert "ALLREDUCE" in watched.page.locator("#tip").text_content()
    watched.page.mouse.click(x, y)
    rows = watched.page.locator("#details table tbody tr")
    assert rows.count() >= 2
    assert rows.first.text_content().startswith("NEGOTIATE_ALLREDUCE")
    assert "ALLREDUCE of" in watched.page.locator("#details caption").text_content()
    watched.page.locator("#canvas").focus()
    watched.page.keyboard.press("Escape")
    assert watched.page.locator("#details table").count() == 0


def test_names_are_text_under_the_pointer_and_after_a_click(watched):
    tips, captions = [], []
    for lane in range(8):
        x, y = watched.over_an_operation(lane)
        tips.append(watched.page.locator("#tip").text_content().split("\n")[0])
        watched.page.mouse.click(x, y)
        captions.append(watched.page.locator("#details caption").text_content())
    assert set(HOSTILE[:4]) <= set(tips)
    assert all(any(f"of {name}," in caption for caption in captions) for name in HOSTILE[:4])
    assert watched.page.locator("#tip *, #details img, #details script").count() == 0
    watched.assert_quiet()


def test_the_page_fits_a_telephone_and_follows_the_reader(browser, hostile_page, tmp_path):
    found = Watched(browser, hostile_page)
    for scheme, paper in (("light", (255, 255, 255)), ("dark", (0x15, 0x18, 0x1B))):
        found.page.emulate_media(color_scheme=scheme)
        for width in (400, 1280):
            found.page.set_viewport_size({"width": width, "height": 800})
            assert found.page.evaluate("document.documentElement.scrollWidth") <= width
            seen = found.page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
            counted = colours_of(seen)
            assert max(counted, key=counted.get) == paper
    order = """() => ["#h-verdict", "svg.figure, img", "dl.facts"].map(
        (name) => document.querySelector(name).getBoundingClientRect().top)"""
    tops = found.page.evaluate(order)
    assert tops == sorted(tops)
    found.assert_quiet()
    found.context.close()


def test_the_figures_are_drawn_and_their_names_are_text(watched):
    drawn = watched.page.locator("figure svg.figure")
    assert drawn.count() == 2
    assert drawn.nth(0).locator("rect.point").count() == watched.page.evaluate("page.steps.points.length") - 1
    assert drawn.nth(1).locator("rect.g0").count() > 5
    assert SCRIPT in drawn.nth(1).locator("text.end").all_text_contents()
    assert watched.page.locator("svg script, svg img").count() == 0


def test_without_scripts_the_tables_are_there_and_say_what_is_missing(browser, hostile_page):
    found = Watched(browser, hostile_page, java_script_enabled=False)
    assert found.page.locator("section[aria-labelledby=h-tensors] table").is_visible()
    assert not found.page.locator("#scroller").is_visible()
    assert "drawn by the browser" in found.page.locator("noscript").text_content()
    found.context.close()
