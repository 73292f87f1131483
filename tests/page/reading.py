"""What the page's tests do with it: send messages, read answers, and stand in for the server where an answer has to be known."""

import json
import math
import os
import re
import shutil
import urllib.request

from tests.page import serving

# Chromium is the system's own; nothing is downloaded, and it calls nobody.
EXECUTABLE = os.environ.get("TRIMTAB_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
KEY = "let-me-in"
ADMIN_KEY = KEY + serving.ADMIN
ANSWER_MS = 60_000
QUESTIONS = [json.loads(line) for line in (serving.DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines() if line]
# An answer of this form takes hundreds of tokens, whatever the model would rather say.
LONG = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 200}
CHAT = "**/v1/chat/completions"


def question(kind):
    return next(found for found in QUESTIONS if found["kind"] == kind)


def expect(found):
    from playwright import sync_api

    return sync_api.expect(found)


def ask(page, text, *, voice=None, media=None):
    if voice is not None:
        page.select_option("#voice-a", voice)
    if media is not None:
        page.set_input_files("#file", str(serving.DEMO / media))
        expect(page.locator("#attached li")).to_have_count(1)
    page.fill("#question", text)
    page.click("#send")


def answers(page, count=1):
    """Return what the answers say, once so many are whole."""
    done = page.locator(".answer[aria-busy=false]")
    expect(done).to_have_count(count, timeout=ANSWER_MS)
    return [done.nth(place).locator(".text").inner_text() for place in range(count)]


def set_options(page, *, json_answer=False, chances=False, **values):
    page.click("#options-open")
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", value)
    page.set_checked("#json", json_answer)
    page.set_checked("#chances", chances)
    page.click("#options-dialog button.main")


def api(url, path, body=None):
    """Return what the server answers without a page."""
    head = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)


def stand_in(page, *texts, chances=None, finish="stop"):
    """Answer the next chats with texts, in pieces; return the list that what is sent goes into. chances: of each piece."""
    sent, left = [], list(texts)

    def answer(route):
        sent.append(json.loads(route.request.post_data))
        pieces = re.findall(r"\s*\S+|\s+$", left.pop(0))
        lines = []
        for at, piece in enumerate(pieces):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            if chances is not None:
                other = {"token": " else", "logprob": math.log(0.01)}
                token = {"token": piece, "logprob": math.log(chances[at])}
                choice["logprobs"] = {"content": [{**token, "top_logprobs": [token, other]}]}
            lines.append({"choices": [choice]})
        lines.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        lines.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(pieces)}})
        body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)

    page.unroute(CHAT)
    page.route(CHAT, answer)
    return sent


def answered(page, *texts, message="A message", count=1, media=None, **options):
    """Send a message whose answers are texts, as `stand_in` has them; return what is sent, once `count` answers are whole."""
    sent = stand_in(page, *texts, **options)
    ask(page, message, media=media)
    answers(page, count)
    return sent


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
