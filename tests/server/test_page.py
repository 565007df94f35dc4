"""The page in a headless Chromium: against a scripted server, and against `ostinato serve` with a small model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("the page is tested in Chromium, which is not installed", allow_module_level=True)

from tests.server.page_mock import MockServer  # noqa: E402
from tests.server.running import LONGEST_S, Running  # noqa: E402

SRC = Path(__file__).parents[2] / "src"
WORDS = ["One", " <b>two</b>", " three", " <img src=x onerror=alert(1)>"]
WAIT_MS = 1000 * LONGEST_S
playwright.expect.set_options(timeout=WAIT_MS)
expect = playwright.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def mock() -> Iterator[MockServer]:
    scripted = MockServer(WORDS)
    scripted.start()
    yield scripted
    scripted.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Opens the page. Afterwards: it asked nobody but its server, and no script failed or broke the page's CSP."""
    wrong: list[str] = []
    contexts = []

    def open_page(url: str, *, gone: bool = False, prepare: Callable[[Any], object] = id, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1400, "height": 900}} | options))
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith(url) or wrong.append(f"asked {request.url}"))
        page.on("pageerror", lambda error: wrong.append(f"error {error}"))
        page.on("dialog", lambda dialog: wrong.append("a script of an answer ran"))
        if not gone:  # then the browser itself reports every refused connection
            page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        prepare(page)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def newest_step(page: Any) -> int:
    return int(page.locator("#strip").get_attribute("aria-valuemax"))


def test_an_answer_streams_and_the_strip_moves(mock: MockServer, opened: Opened) -> None:
    page = opened(mock.url)
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#facts")).to_contain_text("FULL_AND_PIECEWISE")
    expect(page.locator("#step-detail")).to_have_text("No step yet: send a message.")
    ask(page, "hello")
    answer = page.locator(".message.assistant .text")
    expect(page.locator("#strip")).to_have_attribute("aria-valuemax", "1")
    expect(answer).to_have_text("")
    mock.release(2)
    expect(answer).to_have_text("One <b>two</b>")
    expect(page.locator("#strip")).to_have_attribute("aria-valuemax", "3")
    expect(page.locator("#step-detail")).to_contain_text("FULL, bucket of 1 row: 1 request, 1 token")
    expect(page.locator("#pool-legend")).to_contain_text("used 3")
    expect(page.locator("#table li")).to_have_text(["0–151", "16–312", "32–473"])
    expect(page.locator("#send")).to_be_disabled()
    mock.release(2)
    expect(answer).to_have_text("".join(WORDS))
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".message.assistant .figures")).to_contain_text("4 tokens")
    expect(page.locator("#buckets tbody tr")).to_have_count(2)
    expect(page.locator("#buckets tbody tr").first).to_contain_text("FULL1 row4all")
    why = page.locator("#buckets tbody tr").nth(1).locator("td").last.locator("span")
    expect(why).to_have_attribute("title", "mixed batch: piecewise")
    expect(why).to_have_text("a prompt is in the batch, so its rows differ in length")
    expect(page.locator("#pool-legend")).to_contain_text("used 0")


def test_stop_ends_the_request_and_keeps_the_conversation(mock: MockServer, opened: Opened) -> None:
    page = opened(mock.url)
    ask(page, "first")
    mock.wait_open(1)
    mock.release(1)
    expect(page.locator(".message.assistant .text")).to_have_text("One")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
    mock.wait_open(0)
    assert mock.left == 1
    ask(page, "second")
    mock.wait_open(1)
    mock.release(4)
    expect(page.locator("#send")).to_be_enabled()
    roles = [(message["role"], message["content"]) for message in mock.bodies[1]["messages"]]
    assert roles == [("user", "first"), ("assistant", "One"), ("user", "second")]
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "third")
    mock.wait_open(1)
    mock.release(4)
    expect(page.locator("#send")).to_be_enabled()
    assert len(mock.bodies[2]["messages"]) == 1


def test_eight_at_once_leave_the_page_alive(mock: MockServer, opened: Opened) -> None:
    """All eight are open together, and what polls still gets a connection."""
    page = opened(mock.url)
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_role("button", name="Send 8 at once").click()
    expect(page.locator("#tiles")).to_contain_text("8, 0")
    assert sum(body["n"] for body in mock.bodies) == mock.open == 8
    assert len({body["max_completion_tokens"] for body in mock.bodies}) == 4
    mock.release(1)
    expect(page.locator(".eight .text")).to_have_text(["One"] * 8)
    expect(page.locator(".bucket.now")).to_have_text("8")
    assert mock.open == 8
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".eight .figures")).to_have_text([re.compile("stopped")] * 8)
    mock.wait_open(0)
    expect(page.locator("#tiles")).to_contain_text("0, 0")


def test_steps_are_told_to_the_keyboard_and_to_the_pointer(mock: MockServer, opened: Opened) -> None:
    mock.add_step("NONE", None, "padding would more than double the work", 2, 9)
    mock.add_step("PIECEWISE", [32, 8, None], "mixed batch: piecewise", 3, 20)
    mock.decode_step(3)
    mock.add_step("NONE", None, "a reason of tomorrow", 2, 9)
    page = opened(mock.url)
    strip, detail = page.locator("#strip"), page.locator("#step-detail")
    expect(strip).to_have_attribute("aria-valuemax", "4")
    expect(detail).to_contain_text("Why: a reason of tomorrow.")
    strip.focus()
    page.keyboard.press("ArrowLeft")
    expect(strip).to_have_attribute("aria-valuenow", "4")
    page.keyboard.press("ArrowLeft")
    expect(detail).to_contain_text("step 3, FULL, bucket of 4 rows: 3 requests, 3 tokens + 1 padding")
    expect(strip).to_have_attribute("aria-valuetext", re.compile("filled up to the next bucket"))
    page.keyboard.press("ArrowLeft")
    expect(detail).to_contain_text("PIECEWISE, bucket of 32 tokens: 3 requests, 20 tokens + 12 padding")
    page.keyboard.press("Home")
    expect(detail).to_contain_text("step 1, NONE: 2 requests, 9 tokens")
    expect(detail.locator("[title]").last).to_have_attribute("title", "padding would more than double the work")
    page.keyboard.press("Tab")
    width = strip.bounding_box()["width"]
    strip.hover(position={"x": width - 12, "y": 60})
    expect(detail).to_contain_text("step 2,")
    page.get_by_role("button", name="Pause").click()
    mock.decode_step(1)
    expect(page.locator("#buckets tbody tr").filter(has_text="1 row")).to_have_count(1)
    expect(strip).to_have_attribute("aria-valuemax", "4")
    page.get_by_role("button", name="Pause").click()
    expect(strip).to_have_attribute("aria-valuemax", "5")


def test_a_server_that_goes_and_comes_back(mock: MockServer, opened: Opened) -> None:
    for _ in range(5):
        mock.decode_step(1)
    page = opened(mock.url, gone=True)
    expect(page.locator("#strip")).to_have_attribute("aria-valuemax", "5")
    mock.stop()
    expect(page.locator("#status")).to_have_text("no answer")
    expect(page.locator("#banner")).to_be_visible()
    mock.steps.clear()  # another process, which counts from the start and has come further than the old one
    mock.add_step("NONE", None, "graphs are off", 2, 9)
    for _ in range(6):
        mock.decode_step(2)
    mock.start()
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#strip")).to_have_attribute("aria-valuemax", "7")
    page.locator("#strip").focus()
    page.keyboard.press("Home")
    expect(page.locator("#step-detail")).to_contain_text("step 1, NONE")
    mock.steps.clear()  # another one, between two questions
    mock.decode_step(2)
    expect(page.locator("#strip")).to_have_attribute("aria-valuemax", "1")


def test_a_key(opened: Opened) -> None:
    mock = MockServer(WORDS, key="sesame")
    mock.start()
    page = opened(mock.url, gone=True)
    expect(page.locator("#status")).to_have_text("key wanted")
    page.get_by_label("This server asks for an API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-form")).to_be_visible()
    page.get_by_label("This server asks for an API key").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#key-form")).to_be_hidden()
    mock.close()


COUNT_ASKED = (
    "const ask = fetch; window.asked = 0; window.fetch = (...all) => { window.asked += 1; return ask(...all); };"
)
SET_HIDDEN = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def still(page: Any) -> None:
    """The page's clock stands, except in `run_for`."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def test_a_hidden_page_asks_nothing(mock: MockServer, opened: Opened) -> None:
    page = opened(mock.url, prepare=lambda page: (still(page), page.add_init_script(COUNT_ASKED)))
    page.clock.run_for(10)
    expect(page.locator("#status")).to_have_text("live")
    page.evaluate(SET_HIDDEN, True)
    asked = page.evaluate("window.asked")
    assert asked >= 4
    page.clock.run_for(60_000)
    assert page.evaluate("window.asked") == asked
    page.evaluate(SET_HIDDEN, False)
    page.clock.run_for(10)
    assert page.evaluate("window.asked") == asked + 4


CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = numbers(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.matches("option, noscript *")) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color).slice(0, 3)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${node.tagName} ${node.className} ${node.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_light_and_dark(mock: MockServer, opened: Opened, scheme: str) -> None:
    mock.words = ["A" * 300, " b"]
    mock.add_step("NONE", None, "padding would more than double the work", 2, 9)
    mock.decode_step(3)
    page = opened(mock.url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    expect(page.locator("#buckets tbody tr")).to_have_count(2)
    ask(page, "B" * 300)
    mock.wait_open(1)
    mock.release(2)
    expect(page.locator("#send")).to_be_enabled()
    page.get_by_role("button", name="Send 8 at once").click()
    expect(page.locator("#table li")).to_have_count(3)
    wide = "[...document.querySelectorAll('body *')].filter((n) => n.getBoundingClientRect().right > 360.5 && "
    wide += "!n.closest('.hidden, .scroll, .skip')).map((n) => n.tagName + '.' + n.className)"
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(wide) == []
    assert page.evaluate("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
    assert page.evaluate(CONTRAST) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 64) == (scheme == "dark")
    mock.release(2)
    expect(page.locator("#send")).to_be_enabled()


def test_everything_has_a_name(mock: MockServer, opened: Opened) -> None:
    page = opened(mock.url)
    expect(page.locator("#status")).to_have_text("live")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, [tabindex=\"0\"], [role], section')]"
        ".filter((n) => !(n.labels?.length || n.ariaLabel || n.getAttribute('aria-labelledby') || n.textContent.trim()"
        " || n.hidden)).map((n) => n.outerHTML)"
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.lang") == "en"
    references = page.evaluate(
        "[...document.querySelectorAll('[aria-labelledby], label[for]')]"
        ".map((n) => n.getAttribute('aria-labelledby') ?? n.htmlFor).filter((id) => !document.getElementById(id))"
    )
    assert references == []


# -- against the server itself -----------------------------------------------------------------------------------------


def to_the_limit(route: Any) -> None:
    """Random weights may end an answer with any token."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def test_the_real_server(server: Running, no_leaks: None, opened: Opened) -> None:
    page = opened(f"{server.url}/", prepare=lambda page: page.route("**/v1/chat/completions", to_the_limit))
    expect(page.locator("#facts")).to_contain_text("FULL_AND_PIECEWISE")
    page.get_by_label("tokens").first.fill("12")
    ask(page, "hello")
    note = page.locator(".message.assistant .figures")
    expect(note.first).to_contain_text("12 tokens")
    expect(note.first).to_contain_text("cut at the limit")
    assert page.locator(".message.assistant .text").first.text_content() != ""
    expect(page.locator("#step-detail")).to_contain_text("FULL, bucket of 1 row: 1 request, 1 token")
    rows = page.locator("#buckets tbody tr")
    expect(rows.filter(has_text="FULL").filter(has_text="1 row").first).to_be_visible()
    expect(rows.filter(has_text="PIECEWISE").first).to_be_visible()
    expect(page.locator("#memory")).to_contain_text("weights")
    moved = newest_step(page)

    with server.slow_steps(0.4):
        page.get_by_label("tokens").first.fill("150")
        page.get_by_role("button", name="Send 8 at once").click()
        expect(page.locator("#tiles")).to_contain_text("8, 0")
        expect(page.locator(".bucket.now")).to_have_text("8")
        expect(page.locator(".eight .text:not(:empty)")).to_have_count(8)
        expect(page.locator("#table li").first).to_contain_text("0–15")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".eight .figures")).to_have_text([re.compile("stopped")] * 8)
    server.wait_idle()
    expect(page.locator("#tiles")).to_contain_text("0, 0")
    expect(page.locator("#pool-legend")).to_contain_text("used 0")
    assert newest_step(page) > moved
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(CONTRAST) == []
