"""The page in a browser: what a reader does with it, with a mouse, with keys alone, on a small screen, in the dark."""

import base64
import io
import json
import os
import socket
import threading
import wave
from pathlib import Path

import pytest

from tests.page import serving
from tests.page.reading import (
    ADMIN_KEY,
    ANSWER_MS,
    CHAT,
    LONG,
    answers,
    api,
    ask,
    expect,
    faked,
    question,
    set_options,
    stand_in,
)  # fmt: skip

pytestmark = pytest.mark.slow

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
    ask(page, asked["prompt"], media=asked["image"])
    assert answers(page) == [asked["answers"]["base"]]
    expect(page.locator(".asked img")).to_be_visible()
    expect(page.locator("#attached li")).to_have_count(0)


def test_a_sound_is_heard(opened):
    page, asked = opened(), question("audio")
    ask(page, asked["prompt"], media=asked["audio"])
    assert answers(page) == [asked["answers"]["base"]]


@pytest.mark.parametrize("voice", ["gemma-demo", "gemma-demo:style"])
def test_text_picture_and_sound_together_are_answered_as_the_api_answers(opened, url, voice):
    page, seen, heard = opened(), question("image"), question("audio")
    set_options(page, max_tokens="24")
    for place, path in enumerate((seen["image"], heard["audio"]), 1):
        page.set_input_files("#file", str(serving.DEMO / path))
        expect(page.locator("#attached li")).to_have_count(place)
    ask(page, "What is there?", voice=voice)
    picture, sound = (base64.b64encode((serving.DEMO / one).read_bytes()).decode() for one in (seen["image"], heard["audio"]))
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


@pytest.mark.parametrize(("kind", "kept"), [("image", "image_url"), ("audio", "input_audio")])
def test_a_file_that_changes_after_it_was_attached_is_sent_as_it_was(opened, tmp_path, kind, kept):
    page, held = opened(), (serving.DEMO / question(kind)[kind]).read_bytes()
    sent, path = stand_in(page, "Fine."), tmp_path / Path(question(kind)[kind]).name
    path.write_bytes(held)
    page.set_input_files("#file", str(path))
    expect(page.locator("#attached li")).to_have_count(1)
    path.write_bytes(held + b"x")
    os.utime(path, (1, 1))
    ask(page, "What is it?")
    assert answers(page) == ["Fine."]
    assert base64.b64encode(held).decode() in json.dumps(sent[0]["messages"][0]["content"][0][kept])


def test_what_cannot_be_read_is_told_at_the_answer_and_the_page_goes_on(opened):
    page = opened()
    page.evaluate("() => { FileReader.prototype.readAsDataURL = () => { throw new Error('It is gone'); }; }")
    ask(page, "What is it?", media=question("image")["image"])
    expect(page.locator(".answer")).to_contain_text("It is gone")
    expect(page.locator("#stop")).to_be_hidden()


def test_something_else_is_refused_and_a_picture_can_be_removed(opened, tmp_path):
    page = opened()
    (tmp_path / "note.zip").write_text("no picture")
    page.set_input_files("#file", str(tmp_path / "note.zip"))
    expect(page.locator("#ask-error")).to_contain_text("neither an image nor audio nor a text file")
    page.set_input_files("#file", str(serving.DEMO / question("image")["image"]))
    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#question")).to_be_focused()


def test_the_microphone_gives_a_wav_of_16_khz(opened):
    page = opened(permissions=["microphone"])
    sent = []

    def catch(route):
        sent.append(json.loads(route.request.post_data))
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route(CHAT, catch)
    page.click("#record")
    expect(page.locator("#record")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#record")).to_contain_text("Stop recording, 1 s")
    page.click("#record")
    expect(page.locator("#attached audio")).to_be_visible()
    expect(page.locator("#record")).to_have_attribute("aria-pressed", "false")
    ask(page, "What do you hear?")
    answers(page)
    parts = sent[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["input_audio", "text"]
    with wave.open(io.BytesIO(base64.b64decode(parts[0]["input_audio"]["data"]))) as found:
        assert (found.getframerate(), found.getnchannels(), found.getsampwidth()) == (16000, 1, 2)
        assert found.getnframes() > 8000 and any(found.readframes(found.getnframes()))


def test_each_adapter_answers_in_its_own_voice(opened):
    page, asked = opened(), question("image")
    for name in ("style", "specialist"):
        ask(page, asked["prompt"], voice=f"gemma-demo:{name}", media=asked["image"])
        assert answers(page) == [asked["answers"][name]]
        page.click("#new-chat")
    expect(page.locator("#adapters li", has_text="specialist")).to_contain_text("on the model")


def test_two_answer_side_by_side(opened):
    page, asked = opened(), question("image")
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, asked["prompt"], voice="gemma-demo", media=asked["image"])
    assert answers(page, 2) == [asked["answers"]["base"], asked["answers"]["style"]]
    left, right = (page.locator(".answer").nth(place).bounding_box() for place in range(2))
    assert abs(left["y"] - right["y"]) < 2 and right["x"] >= left["x"] + left["width"]


def test_options_are_sent_as_they_are_set(opened):
    page = opened()
    sent = []

    def catch(route):
        sent.append(json.loads(route.request.post_data))
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route(CHAT, catch)
    set_options(page, system="Be brief.", temperature="0.5", top_p="0.9", max_tokens="17", seed="3", json_answer=True, chances=True)
    ask(page, "Hello")
    answers(page)
    assert sent == [{
        "model": "gemma-demo", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 17, "seed": 3, "logprobs": True, "top_logprobs": 5,
        "response_format": {"type": "json_object"}, "stream": True, "stream_options": {"include_usage": True},
    }]  # fmt: skip


def test_an_answer_in_json_is_json(opened):
    page, asked = opened(), question("image")
    set_options(page, json_answer=True)
    ask(page, asked["prompt"], voice="gemma-demo:rslora-dora", media=asked["image"])
    answers(page)
    assert json.loads(page.locator(".text pre").inner_text()) == json.loads(asked["answers"]["rslora-dora"])


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

    page.route(CHAT, lengthen, times=1)
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
    assert answers(page, 2)[1] == asked["answers"]["base"]


def test_an_unsent_question_survives_a_reload(opened):
    page = opened()
    page.fill("#question", "not yet sent")
    page.reload()
    expect(page.locator("#question")).to_have_value("not yet sent")


# Adapters and state ---------------------------------------------------------------------------------------------------


def test_an_adapter_is_loaded_asked_and_unloaded(opened):
    page, asked = opened(key=ADMIN_KEY), question("image")
    page.fill("#adapter-name", "again")
    page.fill("#adapter-path", "specialist")
    page.click("#load-adapter-send")
    expect(page.locator("#adapters-said")).to_have_text("again is loaded")
    expect(page.locator("#adapters li", has_text="again")).to_be_visible()
    ask(page, asked["prompt"], voice="gemma-demo:again", media=asked["image"])
    assert answers(page) == [asked["answers"]["specialist"]]
    # What the operator named has no such button.
    expect(page.get_by_role("button", name="Unload")).to_have_count(1)
    page.get_by_role("button", name="Unload again").click()
    expect(page.locator("#sure-text")).to_contain_text("Requests for it will fail")
    expect(page.locator("#sure-no")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#sure")).to_be_hidden()
    expect(page.locator("#adapters li", has_text="again")).to_be_visible()
    page.get_by_role("button", name="Unload again").click()
    page.click("#sure-yes")
    expect(page.locator("#adapters-said")).to_have_text("again is unloaded")
    expect(page.locator("#adapters li", has_text="again")).to_have_count(0)
    expect(page.locator("#voice-a option", has_text="again")).to_have_count(0)


def test_a_mix_is_made_answers_and_is_kept(opened, url):
    page, asked = opened(), question("image")
    page.click("#mix-send")
    expect(page.locator("#mix-error")).to_contain_text("a weight other than 0")
    page.get_by_label("style", exact=True).fill("0.6")
    page.get_by_label("specialist", exact=True).fill("0.4")
    page.click("#mix-send")
    chosen = page.locator("#voice-a").input_value()
    assert sorted(chosen.removeprefix("gemma-demo:").split("+")) == ["specialist:0.4", "style:0.6"]
    ask(page, asked["prompt"], voice=chosen, media=asked["image"])
    said = answers(page)
    data = base64.b64encode((serving.DEMO / asked["image"]).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": asked["prompt"]},
    ]
    body = {"model": "gemma-demo", "adapter": {"style": 0.6, "specialist": 0.4}, "temperature": 0}
    found = api(url, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]})
    assert said == [found["choices"][0]["message"]["content"]]
    page.reload()
    expect(page.locator("#mixes li")).to_have_count(1)
    expect(page.locator(f'#voice-b option[value="{chosen}"]')).to_have_count(1)
    page.get_by_role("button", name="Remove the mix").click()
    expect(page.locator("#mixes li")).to_have_count(0)
    expect(page.locator(f'#voice-b option[value="{chosen}"]')).to_have_count(0)


@pytest.mark.parametrize("path", ["../base", "nowhere"])
def test_an_adapter_that_cannot_be_loaded_is_refused_in_words(opened, path):
    page = opened(key=ADMIN_KEY)
    page.fill("#adapter-name", "other")
    page.fill("#adapter-path", path)
    page.click("#load-adapter-send")
    expect(page.locator("#adapters-error")).to_contain_text("is not a folder below the server's adapter folder")
    expect(page.locator("#adapter-path")).to_have_value(path)


def test_the_load_line_shows_every_device_and_the_same_in_numbers(opened):
    page = opened()
    page.click("#memory")
    expect(page.locator("#bars svg")).to_have_count(3)
    heads = page.locator(".bar-head").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["cpu", "host", "disk"] and "budget 116.0 MiB" in heads[0]
    page.locator("#numbers summary").click()
    rows = dict(row.split("\t", 1) for row in page.locator("#tiers").inner_text().splitlines() if "\t" in row)
    assert rows["budget"].split("\t")[:2] == ["116.0 MiB", "2.00 GiB"]
    assert {"resident", "gathered", "streamed", "from disk", "adapters", "activations"} <= rows.keys()
    assert page.locator(".load-disc").count() == 2


GIB = 2**30


@pytest.mark.parametrize(("peak", "words", "is_over"), [
    (2 * GIB, "peak so far 2.00 GiB", False), (7 * GIB // 2, "512.0 MiB more than planned", False),
    (6 * GIB, "2.00 GiB over the budget", True),
])  # fmt: skip
def test_a_peak_is_drawn_where_it_belongs(opened, peak, words, is_over):
    """Inside the plan, beyond its end, and beyond the budget."""

    def change(status):
        model = status["models"][0]
        model["plan"] |= {"gpu_budget_bytes": 4 * GIB, "execution_device": "cuda:0", "placements": [],
                          "gpu": {"weights": 3 * GIB}}  # fmt: skip
        model["numbers"]["memory"] = {"gpu_bytes": 1 * GIB, "gpu_peak_bytes": peak, "host_peak_bytes": 0}

    page = opened(before=faked(change))
    page.click("#memory")
    bar = page.locator(".bar").first
    expect(bar.locator("figcaption")).to_contain_text(words)
    places = bar.evaluate(
        """bar => {
            const start = selector => { const found = bar.querySelector(selector); return found && found.getBoundingClientRect(); };
            const middle = box => box.left + box.width / 2;
            const trough = start(".trough"), segment = start(".segment rect"), beyond = start(".beyond");
            return {left: trough.left, end: segment.right, width: trough.width, line: middle(start(".load-disc")),
                    peak: middle(start("[data-mark='peak so far']")), beyond: beyond && [beyond.left, beyond.right]};
        }"""
    )
    pixels = (places["end"] - places["left"]) / (3 * GIB)
    assert places["peak"] - places["left"] == pytest.approx(peak * pixels, abs=2)
    assert places["line"] - places["left"] == pytest.approx(4 * GIB * pixels, abs=2)
    assert (places["peak"] > places["line"]) is is_over and places["peak"] < places["left"] + places["width"]
    if peak > 3 * GIB:
        assert places["beyond"] == pytest.approx([places["end"], places["peak"]], abs=2)
    else:
        assert places["beyond"] is None
    # The slim bar has it too, at the same share.
    slim = page.locator("#memory-bar").evaluate(
        """bar => Object.fromEntries([...bar.querySelectorAll(".slim-mark, .slim-line")]
        .map(one => [one.classList.value, +one.getAttribute("x") + 0.6]))"""
    )
    assert ("slim-mark over" in slim) is is_over
    assert slim.get("slim-mark over", slim["slim-mark"]) / slim["slim-line"] == pytest.approx(peak / (4 * GIB), rel=0.01)


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
        status["models"].append({**status["models"][0], "name": "other", "state": "stopped", "plan": None, "numbers": {}})

    page = opened(before=faked(change))
    page.click("#memory")
    expect(page.locator("#load-note")).to_contain_text("context 512")
    expect(page.locator("#adapters li", has_text="style")).to_contain_text("on the model, kept there")
    page.keyboard.press("Escape")
    page.select_option("#model", "other")
    page.click("#memory")
    expect(page.locator("#state-text")).to_contain_text("unloaded")
    expect(page.locator("#bars")).to_have_text("The chart appears once the model is loaded.")
    expect(page.locator("#load-note, #legend")).to_have_text(["", ""])
    expect(page.locator("#numbers")).to_be_hidden()
    expect(page.locator("#adapters li", has_text="style")).to_contain_text("not loaded")
    page.keyboard.press("Escape")
    page.select_option("#model", "gemma-demo")
    page.click("#memory")
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

    page = opened(before=faked(change), wait=False)
    expect(page.locator("#adapters li", has_text=evil)).to_be_visible()
    page.click("#memory")
    expect(page.locator("#requests tbody")).to_contain_text(evil)
    assert page.locator("img, b").count() == 0 and page.title() == "trimtab"


def break_off(listener, is_seen):
    """Answer one request with the beginning of a stream, and end the connection there, as a server that is killed."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(2**16)
        line = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'Half of it'}}]})}\n\n".encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(line), line))
        is_seen.wait(ANSWER_MS / 1000)


def test_a_server_that_died_in_an_answer_is_said_there_and_above_it_and_comes_back(opened):
    page = opened()
    trouble, error = page.locator("#trouble"), page.locator(".answer .error")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=break_off, args=(listener, is_seen := threading.Event()), daemon=True).start()
        page.route(CHAT, lambda route: route.continue_(url=f"http://127.0.0.1:{port}/v1/chat/completions"))
        ask(page, "Hello")
        expect(page.locator(".answer .text")).to_have_text("Half of it")
        is_seen.set()
        expect(error).to_have_text("The connection to the server ended before the answer was complete")
    expect(page.locator(".answer .text")).to_have_text("Half of it")
    # Nothing listens now: neither what is asked again nor the status gets an answer.
    page.route("**/api/status", lambda route: route.abort())
    expect(page.locator("#state-text")).to_have_text("The server does not answer")
    expect(trouble).to_contain_text("The server does not answer: it has ended")
    page.get_by_role("button", name="Regenerate").click()
    expect(error).to_have_text("The server does not answer")
    page.unroute("**/api/status")
    expect(page.locator("#state-text")).to_have_text("ready")
    expect(trouble).to_be_hidden()
    stand_in(page, "All of it.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .text")).to_have_text("All of it.")
    expect(error).to_be_hidden()
