"""Opens a page in a headless browser: what it wrote to the console, how much ink it shows, and what
does not fit or is hard to read."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")


@dataclass(frozen=True)
class Opened:
    console: list[str]
    """Lines that the page's scripts or the browser wrote to the console."""
    svgs: int
    """Figures in the document after it was parsed."""
    ink: float
    """Share of the screenshot's pixels that are not the white background."""
    colours: int
    """Distinct saturated colours that cover more than a few pixels: lines and areas of plots."""


@dataclass(frozen=True)
class Measured:
    overflowing: list[str]
    """Elements that reach beyond the page's right edge, outside of what scrolls by itself."""
    least_contrast: float
    """Of texts with their background, as WCAG computes it: 4.5 is enough for small letters."""
    smallest_px: float
    """Height of the letters of figures, as they are scaled."""
    background: str


_MEASURE = """<script>
const light = (text) => {
  const parts = text.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255);
  const [r, g, b] = parts.map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
  return "rgb(255, 255, 255)";
};
const wide = document.documentElement.clientWidth, found = {overflowing: [], least_contrast: 21};
found.background = behind(document.body);
found.smallest_px = Infinity;
for (const e of document.querySelectorAll("body *:not(script)")) {
  if (e.closest("svg")) continue;
  if (e.getBoundingClientRect().right > wide + 1 && !e.parentElement.closest(".scroll, figure"))
    found.overflowing.push(e.outerHTML.slice(0, 80));
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
  const pair = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
  found.least_contrast = Math.min(found.least_contrast, (pair[0] + 0.05) / (pair[1] + 0.05));
}
for (const svg of document.querySelectorAll("svg")) {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  for (const text of svg.querySelectorAll("text")) {
    const px = parseFloat(getComputedStyle(text).fontSize) * scale;
    found.smallest_px = Math.min(found.smallest_px, px);
  }
}
document.body.innerHTML = "<pre id=found></pre>";
document.getElementById("found").textContent = JSON.stringify(found);
</script>"""


def measure_page(path: Path, folder: Path, *, width: int = 1000, dark: bool = False) -> Measured:
    """Lays the page out for a window of this width, with a script of ours at its end."""
    copy = folder / "measured.html"
    copy.write_text(path.read_text().replace("</body>", _MEASURE + "</body>"))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    shown = _browse(copy, folder, "--dump-dom", f"--window-size={width},2000", *scheme).stdout
    found = re.search(r'<pre id="found">(.*)</pre>', shown)
    assert found, shown[-500:]
    return Measured(**json.loads(html.unescape(found[1])))


def open_page(path: Path, folder: Path, height: int = 3000) -> Opened:
    shot = folder / "page.png"
    done = _browse(path, folder, f"--screenshot={shot}", f"--window-size=1000,{height}")
    dom = _browse(path, folder, "--dump-dom").stdout
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    ink, colours = _look(shot)
    return Opened(console, dom.count("<svg"), ink, colours)


def _browse(path: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Skips the test where no browser is installed (.ci/run installs one)."""
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no headless browser: apt-get install chromium-headless-shell")
    base = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    base += ["--hide-scrollbars", "--force-device-scale-factor=1", f"--user-data-dir={folder}/b"]
    command = [*base, *options, path.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def _look(shot: Path) -> tuple[float, int]:
    import numpy as np
    from matplotlib.image import imread

    pixels = (imread(shot)[..., :3] * 255).astype(int)
    ink = float((pixels.min(-1) < 240).mean())
    saturated = pixels[(pixels.max(-1) - pixels.min(-1)) > 80]
    _, counts = np.unique(saturated // 32, axis=0, return_counts=True)
    return ink, int((counts > 50).sum())
