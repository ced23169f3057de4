"""Opens a page in a headless browser: what it wrote to the console, and how much ink it shows."""

from __future__ import annotations

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


def open_page(path: Path, folder: Path, height: int = 3000) -> Opened:
    """Skips the test where no browser is installed (.ci/run installs one)."""
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no headless browser: apt-get install chromium-headless-shell")
    shot = folder / "page.png"
    base = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    base += ["--hide-scrollbars", "--force-device-scale-factor=1", f"--user-data-dir={folder}/b"]
    url = path.resolve().as_uri()
    picture = [*base, f"--screenshot={shot}", f"--window-size=1000,{height}", url]
    done = subprocess.run(picture, capture_output=True, text=True, timeout=60, check=True)
    dom = subprocess.run(
        [*base, "--dump-dom", url], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    ink, colours = _look(shot)
    return Opened(console, dom.count("<svg"), ink, colours)


def _look(shot: Path) -> tuple[float, int]:
    import numpy as np
    from matplotlib.image import imread

    pixels = (imread(shot)[..., :3] * 255).astype(int)
    ink = float((pixels.min(-1) < 240).mean())
    saturated = pixels[(pixels.max(-1) - pixels.min(-1)) > 80]
    _, counts = np.unique(saturated // 32, axis=0, return_counts=True)
    return ink, int((counts > 50).sum())
