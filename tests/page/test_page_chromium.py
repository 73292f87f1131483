"""The page in a browser: what a reader does with it, with a mouse, with keys alone, on a small screen, in the dark.

Chromium is the system's own, found by TRIMTAB_CHROMIUM or on the path; nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import urllib.request
import wave

import pytest

from tests.page import serving

pytestmark = pytest.mark.slow

EXECUTABLE = os.environ.get("TRIMTAB_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if EXECUTABLE is None:
    pytest.skip("no Chromium: install the system's package, or name one in TRIMTAB_CHROMIUM", allow_module_level=True)
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect

KEY = "let-me-in"
ANSWER_MS = 60_000
QUESTIONS = [
    json.loads(line) for line in (serving.DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines() if line
]
# An answer of this form takes hundreds of tokens, whatever the model would rather say.
LONG = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 200}


def question(kind):
    return next(found for found in QUESTIONS if found["kind"] == kind)


@pytest.fixture(scope="module")
def url():
    with serving.running(KEY) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    sound = serving.DEMO / question("audio")["audio"]
    with playwright_api.sync_playwright() as running:
        found = running.chromium.launch(
            executable_path=EXECUTABLE,
            args=["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
                  f"--use-file-for-fake-audio-capture={sound}"],
        )  # fmt: skip
        yield found
        found.close()


@pytest.fixture
def opened(browser, url):
    """Return a function that opens the page in a new tab; whatever a console says there fails the test."""
    contexts, said = [], []

    def open_page(*, key=KEY, wait=True, before=None, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        if key:
            page.add_init_script(f"sessionStorage.setItem('trimtab-key', {json.dumps(key)})")
        if before is not None:
            before(page)
        page.goto(url)
        if wait:
            expect(page.locator("#bars svg").first).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A refused request is said by the browser itself, and is what some tests ask for.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []


def ask(page, text, *, voice=None, media=None):
    if voice is not None:
        page.select_option("#voice-a", voice)
    if media is not None:
        kind, path = media
        page.set_input_files(f"#{kind}-file", str(serving.DEMO / path))
        expect(page.locator("#attached li")).to_have_count(1)
    page.fill("#question", text)
    page.click("#send")


def api(url, path, body=None):
    """Return what the server answers without a page."""
    head = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)


def answers(page, count=1):
    done = page.locator(".answer[aria-busy=false]")
    expect(done).to_have_count(count, timeout=ANSWER_MS)
    return [done.nth(place).locator(".text").inner_text() for place in range(count)]


def set_options(page, **values):
    page.locator("#options").evaluate("found => { found.open = true; }")
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", value)


# Asking ---------------------------------------------------------------------------------------------------------------


def test_a_text_is_answered_in_pieces_with_its_speed(opened):
    page, asked = opened(), question("text")
    ask(page, asked["prompt"])
    assert answers(page) == [asked["answers"]["base"]]
    facts = page.locator(".facts").inner_text()
    assert "first token after" in facts and "tok/s" in facts
    expect(page.locator("#spoken")).to_contain_text("answer complete")
    expect(page.locator("#requests tbody tr").first).to_contain_text("done")


def test_a_picture_is_seen(opened):
    page, asked = opened(), question("image")
    ask(page, asked["prompt"], media=("image", asked["image"]))
    assert answers(page) == [asked["answers"]["base"]]
    expect(page.locator(".asked img")).to_be_visible()
    expect(page.locator("#attached li")).to_have_count(0)


def test_a_sound_is_heard(opened):
    page, asked = opened(), question("audio")
    ask(page, asked["prompt"], media=("sound", asked["audio"]))
    assert answers(page) == [asked["answers"]["base"]]


@pytest.mark.parametrize("voice", ["gemma-demo", "gemma-demo:style"])
def test_text_picture_and_sound_together_are_answered_as_the_api_answers(opened, url, voice):
    page, seen, heard = opened(), question("image"), question("audio")
    set_options(page, max_tokens="24")
    for place, (kind, path) in enumerate((("image", seen["image"]), ("sound", heard["audio"])), 1):
        page.set_input_files(f"#{kind}-file", str(serving.DEMO / path))
        expect(page.locator("#attached li")).to_have_count(place)
    ask(page, "What is there?", voice=voice)
    picture, sound = (
        base64.b64encode((serving.DEMO / one).read_bytes()).decode() for one in (seen["image"], heard["audio"])
    )
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "text", "text": "What is there?"},
    ]
    asked = {"model": voice, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
    found = api(url, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    assert found and answers(page) == [found]


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_a_picture_can_be_dropped_and_pasted(opened, how):
    page, asked = opened(), question("image")
    data = base64.b64encode((serving.DEMO / asked["image"]).read_bytes()).decode()
    page.evaluate(
        """([data, how]) => {
            const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
            const held = new DataTransfer();
            held.items.add(new File([bytes], "here.png", {type: "image/png"}));
            const event = how === "drop" ? new DragEvent("drop", {dataTransfer: held, bubbles: true, cancelable: true})
                : new ClipboardEvent("paste", {clipboardData: held, bubbles: true, cancelable: true});
            document.getElementById("question").dispatchEvent(event);
        }""",
        [data, how],
    )
    expect(page.locator("#attached li")).to_contain_text("here.png")
    ask(page, asked["prompt"])
    assert answers(page) == [asked["answers"]["base"]]


def test_something_else_is_refused_and_a_picture_can_be_removed(opened, tmp_path):
    page = opened()
    (tmp_path / "note.txt").write_text("no picture")
    page.set_input_files("#image-file", str(tmp_path / "note.txt"))
    expect(page.locator("#ask-error")).to_contain_text("neither a picture nor a sound")
    page.set_input_files("#image-file", str(serving.DEMO / question("image")["image"]))
    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#question")).to_be_focused()


def test_the_microphone_gives_a_wav_of_16_khz(opened):
    page = opened(permissions=["microphone"])
    sent = []

    def catch(route):
        sent.append(json.loads(route.request.post_data))
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route("**/v1/chat/completions", catch)
    page.click("#record")
    expect(page.locator("#record")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#record")).to_contain_text("Stop recording (1 s)")
    page.click("#record")
    expect(page.locator("#attached audio")).to_be_visible()
    expect(page.locator("#record")).to_have_attribute("aria-pressed", "false")
    ask(page, "What do you hear?")
    answers(page)
    parts = sent[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["input_audio", "text"]
    with wave.open(io.BytesIO(base64.b64decode(parts[0]["input_audio"]["data"]))) as found:
        assert (found.getframerate(), found.getnchannels(), found.getsampwidth()) == (16000, 1, 2)
        assert found.getnframes() > 8000
        assert any(found.readframes(found.getnframes()))


def test_each_adapter_answers_in_its_own_voice(opened):
    page, asked = opened(), question("image")
    for name in ("style", "specialist"):
        ask(page, asked["prompt"], voice=f"gemma-demo:{name}", media=("image", asked["image"]))
        assert answers(page) == [asked["answers"][name]]
        page.click("#clear")
    expect(page.locator("#adapters li", has_text="specialist")).to_contain_text("on the model")


def test_two_answer_side_by_side(opened):
    page, asked = opened(), question("image")
    page.check("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, asked["prompt"], voice="gemma-demo", media=("image", asked["image"]))
    assert answers(page, 2) == [asked["answers"]["base"], asked["answers"]["style"]]
    left, right = (page.locator(".answer").nth(place).bounding_box() for place in range(2))
    assert abs(left["y"] - right["y"]) < 2 and right["x"] >= left["x"] + left["width"]


def test_options_are_sent_as_they_are_set(opened):
    page = opened()
    sent = []

    def catch(route):
        sent.append(json.loads(route.request.post_data))
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route("**/v1/chat/completions", catch)
    set_options(page, system="Be brief.", temperature="0.5", top_p="0.9", max_tokens="17", seed="3")
    page.check("#json")
    ask(page, "Hello")
    answers(page)
    assert sent == [{
        "model": "gemma-demo", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 17, "seed": 3, "response_format": {"type": "json_object"},
        "stream": True, "stream_options": {"include_usage": True},
    }]  # fmt: skip


def test_an_answer_in_json_is_json(opened):
    page, asked = opened(), question("image")
    page.locator("#options").evaluate("found => { found.open = true; }")
    page.check("#json")
    ask(page, asked["prompt"], voice="gemma-demo:rslora-dora", media=("image", asked["image"]))
    assert json.loads(answers(page)[0]) == json.loads(asked["answers"]["rslora-dora"])


def test_what_the_server_refuses_is_said(opened):
    page = opened()
    set_options(page, max_tokens="100000")
    ask(page, "Hello")
    expect(page.locator(".answer .error")).to_contain_text("100000")
    expect(page.locator(".facts")).to_contain_text("failed")
    expect(page.locator("#send")).to_be_enabled()


# Ending early ---------------------------------------------------------------------------------------------------------


def begin_long(page):
    form = {"type": "json_schema", "json_schema": {"name": "long", "schema": LONG}}

    def lengthen(route):
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "response_format": form}))

    page.route("**/v1/chat/completions", lengthen, times=1)
    ask(page, "Tell me everything.")
    expect(page.locator(".answer .text")).not_to_be_empty(timeout=ANSWER_MS)


def test_stop_ends_the_answer_and_frees_its_row(opened):
    page = opened()
    begin_long(page)
    page.click("#stop")
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#requests tbody tr").first).to_contain_text("client left")
    expect(page.locator("#state-load")).to_contain_text("0 of 4 rows busy")


def test_a_reload_in_the_middle_frees_the_row_and_the_page_works_on(opened):
    page, asked = opened(), question("text")
    begin_long(page)
    page.reload()
    expect(page.locator("#requests tbody tr").first).to_contain_text("client left")
    expect(page.locator("#state-load")).to_contain_text("0 of 4 rows busy")
    ask(page, asked["prompt"])
    assert answers(page) == [asked["answers"]["base"]]


def test_an_unsent_question_survives_a_reload(opened):
    page = opened()
    page.fill("#question", "not yet sent")
    page.reload()
    expect(page.locator("#question")).to_have_value("not yet sent")


# Adapters and state ---------------------------------------------------------------------------------------------------


def test_an_adapter_is_loaded_asked_and_unloaded(opened):
    page, asked = opened(), question("image")
    page.fill("#adapter-name", "again")
    page.fill("#adapter-path", "specialist")
    page.click("#load-adapter-send")
    expect(page.locator("#adapters-said")).to_have_text("again is loaded")
    expect(page.locator("#adapters li", has_text="again")).to_be_visible()
    ask(page, asked["prompt"], voice="gemma-demo:again", media=("image", asked["image"]))
    assert answers(page) == [asked["answers"]["specialist"]]
    # What the operator named has no such button.
    expect(page.get_by_role("button", name="Unload")).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Unload again").click()
    expect(page.locator("#adapters li", has_text="again")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Unload again").click()
    expect(page.locator("#adapters-said")).to_have_text("again is unloaded")
    expect(page.locator("#adapters li", has_text="again")).to_have_count(0)
    expect(page.locator("#voice-a option", has_text="again")).to_have_count(0)


@pytest.mark.parametrize("path", ["../base", "nowhere"])
def test_an_adapter_that_cannot_be_loaded_is_refused_in_words(opened, path):
    page = opened()
    page.fill("#adapter-name", "other")
    page.fill("#adapter-path", path)
    page.click("#load-adapter-send")
    expect(page.locator("#adapters-error")).to_contain_text("is no folder below the server's adapter folder")
    expect(page.locator("#adapter-path")).to_have_value(path)


def faked(change):
    """Return what makes the page read the server's status with a change."""

    def before(page):
        def answer(route):
            found = route.fetch()
            status = found.json()
            change(status)
            route.fulfill(response=found, json=status)

        page.route("**/api/status", answer)

    return before


def test_the_load_line_shows_every_device_and_the_same_in_numbers(opened):
    page = opened()
    heads = page.locator(".bar-head").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["cpu", "host", "disk"]
    assert "budget 116.0 MiB" in heads[0]
    page.locator("#numbers summary").click()
    rows = dict(row.split("\t", 1) for row in page.locator("#tiers").inner_text().splitlines() if "\t" in row)
    assert rows["budget"].split("\t")[:2] == ["116.0 MiB", "640.0 MiB"]
    assert {"resident", "gathered", "streamed", "from disk", "adapters", "activations"} <= rows.keys()
    assert page.locator(".load-disc").count() == 2


def test_loading_restarting_and_failing_are_shown(opened):
    now = {"state": "loading", "loading": [1, 4], "plan": None}

    def change(status):
        status["models"][0].update(now)

    page = opened(before=faked(change), wait=False)
    expect(page.locator("#state-text")).to_have_text("loading")
    expect(page.locator("#loading-text")).to_have_text("Reading weights: 25 %")
    assert page.locator("#loading-bar").evaluate("bar => bar.value") == 0.25
    now.update({"state": "failed", "error": "cuda:0: out of memory"})
    expect(page.locator("#state-text")).to_have_text("failed")
    expect(page.locator("#trouble")).to_contain_text("out of memory")
    expect(page.locator("#loading")).to_be_hidden()


def test_nothing_is_shown_of_a_model_that_is_not_loaded(opened):
    now = {}

    def change(status):
        status["models"][0].update(now)
        status["models"].append(
            {**status["models"][0], "name": "other", "state": "stopped", "plan": None, "numbers": {}}
        )

    page = opened(before=faked(change))
    expect(page.locator("#load-note")).to_contain_text("context 512")
    expect(page.locator("#adapters li", has_text="style")).to_contain_text("on the model, kept there")
    page.select_option("#model", "other")
    expect(page.locator("#state-text")).to_contain_text("asleep")
    expect(page.locator("#bars")).to_have_text("The picture comes with the plan, as soon as the model is loaded.")
    expect(page.locator("#load-note, #legend")).to_have_text(["", ""])
    expect(page.locator("#numbers")).to_be_hidden()
    expect(page.locator("#adapters li", has_text="style")).to_contain_text("not loaded")
    page.select_option("#model", "gemma-demo")
    expect(page.locator("#bars svg")).to_have_count(3)
    expect(page.locator("#numbers")).to_be_visible()
    # One that was loaded keeps its plan, and says that nothing of it is in memory.
    now.update(state="stopped", numbers={})
    expect(page.locator("#load-note")).to_contain_text("nothing of it is in memory")
    expect(page.locator("#bars figcaption", has_text="peak so far")).to_have_count(0)


def test_names_are_never_markup(opened):
    evil = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"

    def change(status):
        model = status["models"][0]
        model["adapters"] = [*model["adapters"], evil]
        model.update(name=evil, state="failed", error=evil)
        model["plan"]["placements"][0]["part"] = evil
        model["plan"]["execution_device"] = evil
        status["requests"] = [{
            "at": 0, "model": evil, "adapter": evil, "ended": evil, "seconds": 1, "ttft_s": None, "tok_s": None,
            "prompt_tokens": evil, "completion_tokens": evil,
        }]  # fmt: skip

    page = opened(before=faked(change))
    expect(page.locator("#adapters li", has_text=evil)).to_be_visible()
    expect(page.locator("#requests tbody")).to_contain_text(evil)
    assert page.locator("img, b").count() == 0
    assert page.title() == "trimtab"


def test_a_server_that_went_away_is_said_and_comes_back(opened):
    page = opened()
    page.route("**/api/status", lambda route: route.abort())
    expect(page.locator("#state-text")).to_have_text("The server does not answer")
    page.unroute("**/api/status")
    expect(page.locator("#state-text")).to_have_text("ready")


def test_the_running_plan_is_held_against_the_resident_model(opened):
    page = opened()
    page.select_option("#verify-adapter", "style")
    page.click("#verify-send")
    expect(page.locator("#verify-said")).not_to_be_empty()
    # It loads the model twice in a process of its own: a minute on a slow machine.
    expect(page.locator(".verdict")).to_contain_text("As it should be", timeout=240_000)
    rows = page.locator("#verdict tbody tr")
    assert rows.count() >= 3
    expect(page.locator("#verify-send")).to_be_enabled()


def test_the_parity_verdict_is_shown_as_a_table(opened):
    report = {
        "verdict": "same", "ok": True, "against": "resident", "adapter": "style", "reference": "every weight resident",
        "subject": "the plan's tiers", "head": ["prompt", "max"], "rows": [["text_1", "0"]], "findings": ["one thing"],
        "floor": ["noise floor: 0"],
    }  # fmt: skip
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in ({"say": "running"}, {"report": report}))
    page = opened()
    asked = []

    def answer(route):
        asked.append(json.loads(route.request.post_data))
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body + "data: [DONE]\n\n")

    page.route("**/api/verify", answer)
    page.select_option("#verify-adapter", "style")
    page.click("#verify-send")
    expect(page.locator(".verdict")).to_have_text("✓ As it should be: same")
    expect(page.locator("#verdict table")).to_contain_text("text_1")
    expect(page.locator("#verdict")).to_contain_text("one thing")
    assert asked == [{"model": "gemma-demo", "adapter": "style", "against": "resident"}]
    page.unroute("**/api/verify")
    error = {"error": {"message": "no room for a second copy", "class": "DoesNotFitError", "fields": {}}}
    page.route("**/api/verify", lambda route: route.fulfill(status=507, json=error))
    page.click("#verify-send")
    expect(page.locator("#verify-error")).to_contain_text("no room")
    expect(page.locator("#verify-send")).to_be_enabled()


# Key and theme --------------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_once_and_kept_in_the_tab(opened):
    page = opened(key=None, wait=False)
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.press("Escape")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("not accepted")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#bars svg").first).to_be_visible()
    page.reload()
    expect(page.locator("#bars svg").first).to_be_visible()
    assert page.evaluate("[...Object.keys(localStorage), document.cookie]") == [""]
    assert KEY not in page.url


def test_the_key_can_be_changed_or_left_as_it_is(opened):
    page = opened()
    page.click("#key-change")
    page.click("#key-cancel")
    expect(page.locator("#key-dialog")).to_be_hidden()
    page.click("#key-change")
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#state-text")).to_have_text("ready")


def test_a_key_that_is_no_longer_good_is_asked_for_again(opened):
    page = opened(key="old", wait=False)
    expect(page.locator("#key-error")).to_contain_text("not accepted")


def test_the_theme_follows_the_system_until_one_is_chosen(opened):
    page = opened(color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert light != dark
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert page.evaluate(paper) == dark
    page.reload()
    assert page.evaluate(paper) == dark
    expect(page.locator("#theme")).to_have_text("Theme: dark")


# For everybody --------------------------------------------------------------------------------------------------------


def test_everything_can_be_done_with_keys_alone(opened):
    page, asked = opened(), question("text")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type(asked["prompt"])
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    for expected in ("add-image", "add-sound", "record", "voice-a"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == expected
    page.keyboard.type("style")
    expect(page.locator("#voice-a")).to_have_value("gemma-demo:style")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.locator("#voice-b")).to_be_visible()
    page.keyboard.press("Space")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert answers(page) == [asked["answers"]["style"]]
    expect(page.locator("#question")).to_be_focused()


def test_the_focus_order_is_the_order_of_the_page_and_nothing_is_trapped(opened):
    page = opened()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    expected = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
        .filter(one => !one.disabled && one.checkVisibility()).length"""
    )
    places = []
    for _ in range(expected):
        page.keyboard.press("Tab")
        places.append(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert places == sorted(places)
    assert len(set(places)) == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_has_a_name_for_those_who_hear_the_page(opened, scheme):
    page = opened(color_scheme=scheme)
    page.set_input_files("#image-file", str(serving.DEMO / question("image")["image"]))
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.check("#beside")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button", "link", "textbox", "combobox", "checkbox", "spinbutton", "progressbar", "table", "log", "image",
        "listbox", "DisclosureTriangle", "dialog",
    }  # fmt: skip
    found = [node for node in tree if not node["ignored"] and node.get("role", {}).get("value") in roles]
    nameless = [node["role"]["value"] for node in found if not node.get("name", {}).get("value", "").strip()]
    assert nameless == []
    assert len(found) > 25


CONTRASTS = """() => {
    const light = ([r, g, b]) => {
        const parts = [r, g, b].map(value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const ground = one => {
        for (let at = one; at; at = at.parentElement) {
            const found = rgba(getComputedStyle(at).backgroundColor);
            if (found[3] === 255) return found;
        }
        return [255, 255, 255, 255];
    };
    const found = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const one = walk.currentNode.parentElement;
        if (!walk.currentNode.textContent.trim() || !one.checkVisibility() || one.closest("title")) continue;
        const style = getComputedStyle(one), isDrawn = one instanceof SVGElement;
        const ink = light(rgba(isDrawn ? style.fill : style.color));
        const plate = isDrawn ? rgba(getComputedStyle(one.previousElementSibling).fill) : ground(one);
        const paper = light(plate);
        const words = walk.currentNode.textContent.trim();
        found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), one.tagName, words]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(opened, scheme):
    page = opened(color_scheme=scheme)
    page.evaluate(
        "document.querySelectorAll('details, #loading, #trouble, .error').forEach(one => { one.open = true; one.hidden = false; })"
    )
    page.evaluate("document.querySelectorAll('#trouble, .error').forEach(one => { one.textContent = 'wrong'; })")
    page.evaluate("document.getElementById('key-dialog').showModal()")
    found = page.evaluate(CONTRASTS)
    # 4.5 is what WCAG 2.2 asks of text of this size (1.4.3, AA).
    assert [one for one in found if one[0] < 4.5] == []
    assert len(found) > 60


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_cut_off_at_any_width(opened, width):
    page = opened(viewport={"width": width, "height": 740})
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.check("#beside")
    page.set_input_files("#sound-file", str(serving.DEMO / question("audio")["audio"]))
    expect(page.locator("#attached li")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """width => [...document.querySelectorAll("button, input, select, textarea, summary, h2, svg, audio")]
        .filter(one => one.checkVisibility() && !one.closest(".patterns, .scroll"))
        .filter(one => { const box = one.getBoundingClientRect(); return box.left < 0 || box.right > width + 0.5; })
        .map(one => one.id || one.tagName)""",
        width,
    )
    assert outside == []


def test_a_question_can_be_asked_on_a_small_screen(opened):
    page = opened(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    asked = question("text")
    page.fill("#question", asked["prompt"])
    page.tap("#send")
    assert answers(page) == [asked["answers"]["base"]]


def test_nothing_moves_for_those_who_asked_for_that(opened):
    page = opened(reduced_motion="reduce")
    page.locator("#state-mark").evaluate("mark => { mark.dataset.state = 'loading'; }")
    assert page.locator("#state-mark").evaluate("mark => getComputedStyle(mark).animationName") == "none"


def test_the_page_asks_nobody_but_its_server(opened, url):
    asked = []
    page = opened(before=lambda page: page.on("request", lambda request: asked.append(request.url)))
    ask(page, question("text")["prompt"])
    answers(page)
    assert asked
    assert {one for one in asked if not one.startswith((url, "blob:"))} == set()
