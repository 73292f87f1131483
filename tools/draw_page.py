"""Draw docs/images/page-*.png: the page of a server of the demo model, used as a reader does, without the times of answers.

    python tools/draw_page.py

Needs a Chromium (TRIMTAB_CHROMIUM, or on the path) and playwright; nothing is downloaded. What is seen is a real server: bytes and
answers are those of the machine it is drawn on. Times would say how busy that machine was, and are left out.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.page import reading, serving  # noqa: E402

FOLDER = ROOT / "docs" / "images"
PICTURE = serving.DEMO / "images" / "image_1.png"
SIZE = {"width": 1366, "height": 768}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 1.5}
LARGEST_BYTES = 200_000  # of one picture in the docs


def main() -> None:
    from playwright.sync_api import sync_playwright

    if reading.EXECUTABLE is None:
        raise SystemExit("no Chromium: install the system's package, or name one in TRIMTAB_CHROMIUM")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serving.running() as url, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=reading.EXECUTABLE, args=list(reading.FLAGS))
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.locator("#memory-bar .slim-line").wait_for(state="attached")
        warm_up(page)
        ask(page)
        leave_times_out(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            save(page.screenshot(), FOLDER / f"page-{scheme}.png")
        page.emulate_media(color_scheme="light")
        show_chances(page)
        save(page.screenshot(), FOLDER / "page-probabilities.png")
        page.mouse.move(5, 5)
        page.click("#memory")
        page.wait_for_timeout(1500)
        save(page.screenshot(clip=above_requests(page)), FOLDER / "page-memory.png")
        phone = browser.new_context(**PHONE).new_page()
        phone.goto(url)
        phone.locator("#memory-bar .slim-line").wait_for(state="attached")
        ask(phone)
        leave_times_out(phone)
        save(phone.screenshot(), FOLDER / "page-phone.png")
        browser.close()


def warm_up(page: Any) -> None:
    """The first answers of a server are slower than what follows."""
    page.fill("#question", "What is the weather like?")
    page.click("#send")
    page.locator(".answer[aria-busy=false]").wait_for(timeout=60_000)
    page.get_by_role("button", name="Delete What is the weather like?").click()
    page.click("#undo-close")
    page.locator("#welcome").wait_for()


def ask(page: Any) -> None:
    """Ask the base and an adapter what an image shows, and wait for both answers."""
    page.set_input_files("#file", str(PICTURE))
    page.locator("#attached li").wait_for()
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    page.fill("#question", "What is shown?")
    page.click("#send")
    page.locator(".answer[aria-busy=false]").nth(1).wait_for(timeout=60_000)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(1500)  # until the page has read the server's numbers again


def show_chances(page: Any) -> None:
    """Ask an adapter about another image and look at one of its tokens."""
    page.click("#beside")
    page.click("#options-open")
    page.check("#chances")
    page.click("#options-dialog button.main")
    page.set_input_files("#file", str(serving.DEMO / "images" / "image_2.png"))
    page.locator("#attached li").wait_for()
    page.select_option("#voice-a", "gemma-demo:specialist")
    page.fill("#question", "What do you see?")
    page.click("#send")
    page.locator(".turn").nth(1).locator(".answer[aria-busy=false]").wait_for(timeout=60_000)
    page.get_by_role("button", name="Token probabilities").click()
    leave_times_out(page)  # before the pointer is over a token: lines move
    page.locator(".token").nth(2).hover()
    page.wait_for_timeout(300)


def leave_times_out(page: Any) -> None:
    """Leave the numbers of tokens in the line under each answer."""
    page.evaluate(
        """() => document.querySelectorAll(".facts").forEach((line) => {
            line.textContent = line.textContent.split(", ").filter((fact) => /tokens?$/.test(fact)).join(", ");
        })"""
    )


def above_requests(page: Any) -> dict[str, float]:
    """Return the part of the memory dialog with the load line: what is below are times."""
    dialog, end = page.locator("#load-dialog").bounding_box(), page.locator(".recent").bounding_box()
    return {**dialog, "height": end["y"] - dialog["y"]}


def save(picture: bytes, path: Path) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as found:
        found.convert("RGB").save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size} B")
    if size > LARGEST_BYTES:
        raise SystemExit(f"larger than {LARGEST_BYTES} B")


if __name__ == "__main__":
    main()
