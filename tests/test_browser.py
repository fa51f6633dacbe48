"""The report in a real browser with the network off, on a desk and on a telephone, by day and by night."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import SmallReport

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH to look at the pages with")

PAGES = ["index", "01_capture_attention", "02_score_tokens", "03_evict_h2o", "04_compare_policies"]
WIDTHS = {"desk": 1200, "telephone": 390}

# Text with less contrast to what is behind it than WCAG 2 asks for (AA: 4.5, or 3 for large text). Code is left out:
# its colours are those of the highlighting style.
LOW_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return rgba('white');
  };
  const low = [];
  for (const element of document.querySelectorAll('body, body *')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest('pre, script, style')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(style.color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const what = `${element.tagName} "${element.textContent.trim().slice(0, 30)}"`;
    if (ratio < (large ? 3 : 4.5)) low.push(`${what}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@dataclass
class Visit:
    """One page as a browser showed it, and everything that happened meanwhile."""

    page: Any
    requests: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser(small_report: SmallReport) -> Iterator[Any]:
    """A headless Chromium for this module only: it can't be open while notebooks run in the same process."""
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def visits(browser: Any, small_report: SmallReport) -> Iterator[dict[tuple[str, str], Visit]]:
    """Every page at every width, opened once, offline."""
    opened, contexts = {}, []
    for where, width in WIDTHS.items():
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, color_scheme="light")
        contexts.append(context)
        for name in PAGES:
            visit = Visit(context.new_page())
            visit.page.on("request", lambda request, visit=visit: visit.requests.append(request.url))
            visit.page.on("requestfailed", lambda request, visit=visit: visit.troubles.append(f"failed {request.url}"))
            visit.page.on("pageerror", lambda error, visit=visit: visit.troubles.append(str(error)))
            visit.page.on("dialog", lambda dialog, visit=visit: visit.troubles.append(f"dialog {dialog.message}"))
            visit.page.on(
                "console",
                lambda said, visit=visit: (
                    visit.troubles.append(said.text) if said.type in ("error", "warning") else None
                ),
            )
            visit.page.goto((small_report.folder / f"{name}.html").as_uri(), wait_until="load")
            opened[name, where] = visit
    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(params=[(name, where) for name in PAGES for where in WIDTHS], ids="-".join)
def visit(request: pytest.FixtureRequest, visits: dict[tuple[str, str], Visit]) -> Visit:
    return visits[request.param]


def test_a_page_asks_for_nothing_but_itself_and_nothing_goes_wrong(visit: Visit) -> None:
    assert visit.troubles == []
    assert len([url for url in visit.requests if url.startswith("file:")]) == 1
    assert [url for url in visit.requests if not url.startswith(("file:", "data:"))] == []


def test_every_picture_of_a_page_is_drawn(visit: Visit) -> None:
    widths = visit.page.evaluate("() => [...document.images].map(image => image.complete ? image.naturalWidth : 0)")
    assert widths
    assert all(width > 300 for width in widths)


def test_no_page_is_wider_than_its_window(visit: Visit) -> None:
    wide, inner = visit.page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= inner


def test_what_is_too_wide_for_a_telephone_can_be_scrolled_to(visits: dict[tuple[str, str], Visit]) -> None:
    """A table may be wider than the screen, but then its own box scrolls; nothing is cut off."""
    cut = """() => [...document.querySelectorAll('main *')].filter(element => element.closest('details') === null)
      .filter(element => element.getBoundingClientRect().right > window.innerWidth + 1)
      .filter(element => {
        for (let at = element; at; at = at.parentElement)
          if (['auto', 'scroll'].includes(getComputedStyle(at).overflowX)) return false;
        return true;
      }).map(element => element.tagName + ' ' + element.textContent.slice(0, 40))"""
    for name in PAGES:
        assert visits[name, "telephone"].page.evaluate(cut) == [], name


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_by_day_and_by_night(name: str, visits: dict[tuple[str, str], Visit]) -> None:
    page = visits[name, "desk"].page
    backgrounds = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backgrounds[scheme] = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert page.evaluate(LOW_CONTRAST) == [], scheme
    page.emulate_media(color_scheme="light")
    assert backgrounds["light"] != backgrounds["dark"]


def test_folded_code_opens_and_closes_by_keyboard(visits: dict[tuple[str, str], Visit]) -> None:
    page = visits["02_score_tokens", "desk"].page
    page.evaluate("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.closest('details.code') !== null"):
            break
    is_open = "() => document.activeElement.parentElement.open"
    code = page.locator("details.code pre").first
    assert not code.is_visible()
    page.keyboard.press("Enter")
    assert page.evaluate(is_open) is True
    assert code.is_visible()
    assert "from helpers" in code.inner_text()
    page.keyboard.press("Space")
    assert page.evaluate(is_open) is False


def test_what_has_the_keyboard_s_focus_is_marked(visits: dict[tuple[str, str], Visit]) -> None:
    page = visits["index", "desk"].page
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.tagName") == "A"
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_a_reader_can_walk_from_page_to_page_and_back(browser: Any, small_report: SmallReport) -> None:
    page = browser.new_page()
    page.goto((small_report.folder / "index.html").as_uri())
    for name in PAGES[1:]:
        page.click(f"nav a[href='{name}.html']")
        assert page.url.endswith(f"/{name}.html")
        assert page.locator("nav [aria-current=page]").inner_text() == name.replace("_", " ")
    page.click("nav a[href='index.html']")
    assert page.locator("h1").inner_text() == "H2O on layer 1 of small-kimi"
    page.close()


def test_a_printed_page_has_no_code_and_no_navigation(visits: dict[tuple[str, str], Visit]) -> None:
    page = visits["03_evict_h2o", "desk"].page
    page.emulate_media(media="print")
    shown = page.evaluate(
        "() => [...document.querySelectorAll('nav, details.code')].filter(e => e.offsetHeight).length"
    )
    page.emulate_media(media="screen")
    assert shown == 0


def test_the_script_in_a_token_is_text_on_the_page(visits: dict[tuple[str, str], Visit]) -> None:
    page = visits["02_score_tokens", "desk"].page
    assert page.evaluate("() => document.scripts.length") == 0
    assert page.get_by_text("<script>alert(1)</script>").count() >= 1
