"""Every page of the built site, looked at in a real browser, wide and narrow."""

import functools
import http.server
import importlib
import inspect
import io
import json
import os
import re
import threading
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path

import pytest
import torch

from dfwlayer import LpBall, Quadratic, solve

SITE = os.environ.get("DFW_SITE")
pytestmark = pytest.mark.skipif(SITE is None, reason="runs with make test-site, on the built site")

WIDE, NARROW = 1400, 390
CUT = ".md-content pre > code, .md-content .formula, .md-content .md-typeset__scrollwrap"
# what is wider than the window, unless something inside of it scrolls; and what is cut
PROBE = f"""() => {{
  const held = e => {{
    for (let a = e.parentElement; a; a = a.parentElement)
      if (getComputedStyle(a).overflowX !== "visible"
          && a.getBoundingClientRect().right <= innerWidth + 1) return true;
    return false;
  }};
  const told = e => `${{e.tagName}}.${{e.className}}: ${{e.textContent.trim().slice(0, 60)}}`;
  return {{
    over: document.documentElement.scrollWidth - innerWidth,
    out: [...document.querySelectorAll(".md-content *")].filter(e => {{
      const box = e.getBoundingClientRect();
      return box.width > 0 && box.right > innerWidth + 1 && !held(e);
    }}).map(told),
    cut: [...document.querySelectorAll("{CUT}")].filter(e =>
      e.scrollWidth > e.clientWidth + 1 && (innerWidth > 1000 || !e.closest(".diagram"))).map(told),
    lost: [...document.querySelectorAll("{CUT}")].filter(e => e.scrollWidth > e.clientWidth + 1
      && !/auto|scroll/.test(getComputedStyle(e).overflowX)).map(told),
    raw: [...document.querySelectorAll(".arithmatex, math")].filter(e =>
      e.tagName !== "math" || e.textContent.includes(String.fromCharCode(92))).map(told),
    images: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  }};
}}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser, address):
    """A page that fails the test if it asks somebody else for something or a script fails."""
    page = browser.new_page()
    trouble = []
    page.on("request", lambda r: r.url.startswith((address, "data:")) or trouble.append(r.url))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    yield page
    page.close()
    assert not trouble


def pages():
    return sorted(path.name for path in Path(SITE or ".").glob("*.html"))


@pytest.mark.parametrize("name", pages())
def test_nothing_is_cut_or_wider_than_the_window(page, address, name):
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(f"{address}/{name}")
    page.evaluate("document.fonts.ready")
    wide = page.evaluate(PROBE)
    assert {key: wide[key] for key in ("out", "cut", "raw", "images")} == {
        "out": [],
        "cut": [],
        "raw": [],
        "images": [],
    }
    assert wide["over"] <= 0
    page.set_viewport_size({"width": NARROW, "height": 800})
    narrow = page.evaluate(PROBE)
    assert narrow["over"] <= 0
    assert narrow["out"] == []
    assert narrow["lost"] == []  # tables and diagrams that do not fit scroll
    assert [told for told in narrow["cut"] if "scrollwrap" not in told] == []


def test_code_is_copied_from_a_phone_as_it_was_written(browser, address):
    """Its lines are wrapped there, which must not show in what is copied."""
    allowed = ["clipboard-read", "clipboard-write"]
    context = browser.new_context(viewport={"width": NARROW, "height": 800}, permissions=allowed)
    page = context.new_page()
    page.goto(f"{address}/index.html")
    page.locator(".highlight button, .highlight .md-clipboard").first.click()
    page.wait_for_timeout(200)
    copied = page.evaluate("navigator.clipboard.readText()")
    context.close()
    (code, *_) = re.findall(r"```python\n(.*?)```", text_of_index(), re.DOTALL)
    assert copied.strip() == code.strip()


def text_of_index():
    return (Path(__file__).parents[2] / "docs/index.md").read_text(encoding="utf-8")


def test_the_site_has_its_groups_and_doors(page, address):
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(f"{address}/index.html")
    tabs = [text.strip() for text in page.locator(".md-tabs__link").all_inner_texts()]
    assert tabs == ["Start", "Learn", "Guides", "Sets", "Evidence", "Reference"]
    doors = page.locator(".doors a")
    assert doors.count() == 4
    for k in range(4):
        target = doors.nth(k).get_attribute("href")
        assert (Path(SITE) / target).exists()


def constructed(path):
    """Whether users make it: no error, enumeration or named tuple, and nothing abstract."""
    where, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(where), name, None)
    except ImportError:
        return False
    if not inspect.isclass(found) or issubclass(found, (Exception, Enum, tuple)):
        return False
    return not getattr(found, "_is_protocol", False) and not inspect.isabstract(found)


def test_classes_in_the_reference_show_their_constructors():
    text, _ = (Path(SITE) / "reference.html").read_text().split('id="protocols"')
    _, *parts = re.split(r'<h\d id="([^"]+)" class="doc doc-heading">', text)
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    made = [path for path in shown if constructed(path)]
    assert {"dfwlayer.DFWLayer", "dfwlayer.QPLayer", "dfwlayer.Intersection"} <= set(made)
    for path in made:
        plain = re.sub(r"<[^>]*>", "", shown[path])
        assert re.search(rf"^{path.rpartition('.')[2]}\(", plain, re.MULTILINE), path


def current(page):
    return json.loads(page.locator("#playground").get_attribute("data-solution"))


def drag(page, selector, x, y):
    """To a point of the plane that is shown, which reaches from −2.4 to 2.4."""
    handle = page.locator(f"#playground {selector}").bounding_box()
    plane = page.locator("#playground svg").bounding_box()
    unit = plane["width"] / 4.8
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(plane["x"] + (2.4 + x) * unit, plane["y"] + (2.4 - y) * unit, steps=3)
    page.mouse.up()


def test_the_figure_is_dragged_and_changed(page, address):
    page.set_viewport_size({"width": WIDE, "height": 1000})
    page.goto(f"{address}/playground.html")
    assert current(page)["face"] == "corner"
    drag(page, ".target", 0.2, -0.1)
    now = current(page)
    assert now["face"] == "inside"
    assert now["x"] == pytest.approx([0.2, -0.1], abs=0.02)
    drag(page, ".target", -1.2, 1.4)
    for name, value in {"bend": "0.5", "t": "0.8", "w0": "1.5", "w1": "0.7"}.items():
        page.locator(f'#playground input[name="{name}"]').fill(value)
    now = current(page)
    assert (now["p"], now["t"], now["w"], now["face"]) == (2, 0.8, [1.5, 0.7], "curve")
    drag(page, ".guess", 0.3, -0.5)
    told = page.locator('[data-of="guess"]').inner_text().replace("−", "-")
    excess, gap = map(float, re.findall(r"= (-?\d+\.\d+)", told))
    assert 0 < excess <= gap
    page.locator("#playground select").select_option("identity")
    page.locator("#playground .target").press("ArrowRight")
    now = current(page)
    P, q, w = (torch.tensor(now[key], dtype=torch.float64) for key in "Pqw")
    sol = solve(Quadratic(P, q), LpBall(now["p"], now["t"], w), tol=1e-12)
    assert torch.allclose(sol.x, torch.tensor(now["x"], dtype=torch.float64), atol=1e-9)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(page.locator("#playground .same code").inner_text(), {})
    shown = [float(number) for number in re.findall(r"-?\d\.\d+", printed.getvalue())[:2]]
    assert shown == pytest.approx(now["x"], abs=1e-3)


def test_the_figure_can_be_dragged_on_a_phone(page, address):
    page.set_viewport_size({"width": NARROW, "height": 900})
    page.goto(f"{address}/playground.html")
    page.locator("#playground svg").scroll_into_view_if_needed()
    drag(page, ".target", -1.0, -1.0)
    assert current(page)["x"][0] <= 0
