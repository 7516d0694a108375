"""Formulas, typeset when the site is built: TeX between dollars becomes MathML.

Browsers set MathML by themselves, so that pages need no script for it. The font is STIX Two Math,
taken from the package ziamath and cut down to the characters that the pages use.
"""

from __future__ import annotations

import html
import re
from importlib.resources import files
from pathlib import Path

from fontTools import subset
from latex2mathml.converter import convert

MATH = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[\[(])(?P<tex>.*?)\\[\])]</(?P=tag)>',
    re.DOTALL,
)
FONT = "assets/stix-two-math.woff"
LETTERS = "".join(map(chr, range(0x20, 0x7F)))

used: set[str] = set()  # every character of a formula on some page


def on_page_content(content: str, **_: object) -> str:
    """Replace what the Markdown extension arithmatex marks as a formula."""
    return MATH.sub(_formula, content)


def on_post_build(config: dict[str, object], **_: object) -> None:
    """Write the font beside the style sheet that names it."""
    options = subset.Options(flavor="woff", layout_features=["*"], notdef_outline=True)
    source = files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"
    font = subset.load_font(str(source), options)
    italics = {_italic(letter) for letter in used}
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=sorted(map(ord, used | italics | set(LETTERS))))
    subsetter.subset(font)
    subset.save_font(font, str(Path(str(config["site_dir"])) / FONT), options)


def _formula(match: re.Match[str]) -> str:
    tex = html.unescape(match["tex"]).strip()
    if match["open"] == "(":
        return _noted(mathml(tex, "inline"))
    # parts with wide space between them go to lines of their own where a page is narrow
    parts = [tex] if "\\begin" in tex else re.split(r"\s*\\q?quad\s*", tex)
    return f'<div class="formula">{"".join(_noted(mathml(part, "block")) for part in parts)}</div>'


def _noted(text: str) -> str:
    """The same; its characters will be in the font."""
    used.update(html.unescape(re.sub(r"<[^>]*>", "", text)))
    return text


def mathml(tex: str, display: str) -> str:
    """The formula as MathML Core, which is what browsers know."""
    text = convert(tex, display=display)
    text = text.replace("<mo>&#x0221E;</mo>", "<mi>&#x0221E;</mi>")  # ∞ is no operator
    # ⟨, ⟩, ‖ and | are as high as a line and close to what they hold; \left makes them grow
    text = re.sub(
        r'<(mi|mo)(?: fence="false")?(?: stretchy="false")?>'
        r"(&#x027E[89];|&#x02016;|&#x0007C;)</\1>",
        r'<mo stretchy="false" lspace="0" rspace="0">\2</mo>',
        text,
    )
    # a function such as sign has its argument right behind it
    text = re.sub(r"<mo>(?!min|max)([a-z]+)</mo>", r'<mo lspace="0.17em" rspace="0">\1</mo>', text)
    text = text.replace('<mi mathvariant="double-struck">R</mi>', "<mi>ℝ</mi>")
    # the alignment of columns is a matter of style in MathML Core
    return re.sub(r'columnalign="(left|right|center)"', r'style="text-align: \1"', text)


def _italic(letter: str) -> str:
    """The mathematical italic that a browser shows for a variable of one letter."""
    for first, last, start in (("A", "Z", 0x1D434), ("a", "z", 0x1D44E), ("α", "ω", 0x1D6FC)):
        if first <= letter <= last:
            return "\u210e" if letter == "h" else chr(start + ord(letter) - ord(first))
    return {"∇": "\U0001d6fb"}.get(letter, letter)
