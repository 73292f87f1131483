"""Draw docs/images/page-light.png and page-dark.png: the page of a server of the demo model, asked one question.

    python tools/draw_page.py

Needs a Chromium (TRIMTAB_CHROMIUM, or on the path) and playwright; nothing is downloaded. What is seen is a real server:
bytes, seconds and answers are those of the machine it is drawn on.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.page import serving  # noqa: E402

FOLDER = ROOT / "docs" / "images"
PICTURE = serving.DEMO / "images" / "image_1.png"
SIZE = {"width": 1280, "height": 900}
LARGEST_BYTES = 200_000  # of one picture in the docs


def main() -> None:
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    executable = os.environ.get("TRIMTAB_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        raise SystemExit("no Chromium: install the system's package, or name one in TRIMTAB_CHROMIUM")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serving.running() as url, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.locator("#bars svg").first.wait_for()
        ask(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            save(page.screenshot(full_page=True), FOLDER / f"page-{scheme}.png")
        browser.close()


def ask(page: Any) -> None:
    """Ask the base and an adapter what a picture shows, and wait for both answers."""
    # The first answers of a server are slower than what follows.
    page.fill("#question", "What is the weather like?")
    page.click("#send")
    page.locator(".answer[aria-busy=false]").wait_for(timeout=60_000)
    page.click("#clear")
    page.set_input_files("#image-file", str(PICTURE))
    page.locator("#attached li").wait_for()
    page.check("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    page.fill("#question", "What is shown?")
    page.click("#send")
    page.locator(".answer[aria-busy=false]").nth(1).wait_for(timeout=60_000)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(1500)  # until the page has read the server's numbers again


def save(picture: bytes, path: Path) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as found:
        # This way of choosing a palette keeps the colors of small areas, such as the picture that was asked about.
        small = found.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size} B")
    if size > LARGEST_BYTES:
        raise SystemExit(f"larger than {LARGEST_BYTES} B")


if __name__ == "__main__":
    main()
