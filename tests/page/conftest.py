"""A server of the demo model, a browser, and tabs of it that fail the test on whatever their console says."""

import json

import pytest

from tests.page import reading, serving


# One server and one browser for all files: each starts in seconds, on a busy machine in a minute. A test has a context of its own.
@pytest.fixture(scope="session")
def url():
    with serving.running(reading.KEY) as found:
        yield found


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if reading.EXECUTABLE is None:
        pytest.skip("no Chromium: install the system's package, or name one in TRIMTAB_CHROMIUM")
    sound = serving.DEMO / reading.question("audio")["audio"]
    with sync_api.sync_playwright() as running:
        found = running.chromium.launch(
            executable_path=reading.EXECUTABLE,
            args=[*reading.FLAGS, "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
                  f"--use-file-for-fake-audio-capture={sound}"],
        )  # fmt: skip
        yield found
        found.close()


@pytest.fixture
def opened(browser, url):
    """Return a function that opens the page in a new tab; whatever a console says there fails the test."""
    contexts, said = [], []

    def open_page(*, key=reading.KEY, wait=True, before=None, **options):
        context = browser.new_context(**{"viewport": {"width": 1366, "height": 768}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        if key:
            page.add_init_script(f"sessionStorage.setItem('trimtab-key', {json.dumps(key)})")
        if before is not None:
            before(page)
        page.goto(url)
        if wait:
            page.locator("#memory-bar .slim-line").wait_for(state="attached")
            page.locator(":is(#load-adapter, #adapters-closed):not([hidden])").wait_for(state="attached")
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # or one under way fails the next test
        context.close()
    # A refused request is said by the browser itself, and is what some tests ask for.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []
