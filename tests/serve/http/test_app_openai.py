"""`trimtab serve` as its users meet it: the command, a real model, and OpenAI's own client, unchanged.

What it answers is held against what `LoadedModel` answers alone in this process, and once against the command `trimtab run`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from typing import Literal

import pytest
from pydantic import BaseModel

import trimtab
from tests import ROOT, waiting
from tests.long_runs import crossed
from tests.raised import raised
from trimtab.cli import main
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

KEY, ADMIN_KEY = "a-key-of-the-tests", "an-admin-key-of-the-tests"
READY_S = 120
PLACED = ["--quant", "none", "--dtype", "float32", "--context", "512", "--device", "cpu", "--images", "2", "--audio-s", "2"]
NAMED = [word for name in ADAPTERS for word in ("--adapter", f"{name}={DEMO / 'adapters' / name}")]
QUESTIONS = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text("utf-8").splitlines()]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def address():
    command = [
        sys.executable, "-m", "trimtab", "serve", str(DEMO / "base"), "--name", "demo", *PLACED, *NAMED,
        "--resident-adapters", "2", "--port", "0", "--adapter-root", str(DEMO / "adapters"), "--rows", "6", "--grace", "1",
        "--limit", "prompt_tokens=400",
    ]  # fmt: skip
    # The key comes from the environment: on a command line every user of the machine could read it.
    process = subprocess.Popen(
        command, cwd=ROOT,
        env={**ENVIRONMENT, "TRIMTAB_API_KEY": KEY, "TRIMTAB_ADMIN_KEY": ADMIN_KEY},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None and process.stderr.readline() == "demo: 3 adapters, 6 rows\n"
        found = process.stderr.readline().split()[0]
        waiting.until(lambda: process.poll() is not None or is_ready(found), READY_S)
        yield found
    finally:
        process.terminate()
        process.communicate(timeout=30)


def is_ready(address):
    found = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    try:
        return found.get("/ready", cast_to=object) == {"status": "ready"}
    except openai.APIError:
        return False


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(
        DEMO / "base", quant="none", dtype="float32", context=512, device="cpu", images=2, audio_s=2,
        adapters={name: DEMO / "adapters" / name for name in ADAPTERS},
    )  # fmt: skip
    with trimtab.load(plan) as loaded:
        yield loaded


def encoded(name):
    return base64.b64encode((DEMO / name).read_bytes()).decode()


def image(name):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(name)}"}}


def sound(name):
    return {"type": "input_audio", "input_audio": {"data": encoded(name), "format": "wav"}}


def user(text, *parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def asked(question):
    media = [image(question["image"])] if "image" in question else [sound(question["audio"])] if "audio" in question else []
    return user(question["prompt"], *media)


def alone(model, question, adapter=None, **options):
    """What the line answers when nothing else is asked."""
    media = {kind: str(DEMO / question[kind]) for kind in ("image", "audio") if kind in question}
    return model.answer(question["prompt"], adapter=adapter, **{"max_new_tokens": 64, **media, **options})


def first(kind):
    return next(question for question in QUESTIONS if question["kind"] == kind)


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adapter", "kind"), crossed([None, *ADAPTERS], ["text", "image", "audio"], first=["rslora-dora"], rest=1))
def test_text_pictures_and_sounds_are_answered_as_alone(client, model, kind, adapter):
    question = first(kind)
    found = client.chat.completions.create(model=adapter or "demo", messages=asked(question), temperature=0, max_tokens=64)
    expected = alone(model, question, adapter)
    assert found.choices[0].message.content == expected.text == question["answers"][adapter or "base"]
    assert found.choices[0].finish_reason == expected.finish_reason == "stop"
    assert found.usage.prompt_tokens == expected.prompt_tokens and found.usage.completion_tokens == len(expected.token_ids)


def test_a_stream_has_the_same_text_in_pieces(client, model):
    question = first("image")
    stream = client.chat.completions.create(
        model="style", messages=asked(question), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == alone(model, question, "style").text and sum(map(bool, pieces)) > 3
    assert chunks[-1].choices[0].finish_reason == "stop" and last.choices == [] and last.usage.completion_tokens > 3


def test_adapters_mixed_in_one_batch_answer_as_each_alone(address, model):
    # More than there are rows, and three adapters where two may be on the model at once.
    jobs = [(question, name) for question in QUESTIONS[::6] for name in (None, *ADAPTERS)]
    assert {question["kind"] for question, _ in jobs} == {"text", "image", "audio"}

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120) as together:

            async def ask(question, name, stream):
                found = await together.chat.completions.create(
                    model=name or "demo", messages=asked(question), temperature=0, max_tokens=64, stream=stream
                )
                if not stream:
                    return found.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

            return await asyncio.gather(*(ask(*job, stream=bool(place % 2)) for place, job in enumerate(jobs)))

    before = steps(address)
    found = asyncio.run(ask_all())
    expected = [alone(model, *job) for job in jobs]
    assert found == [answer.text for answer in expected]
    # Fewer steps than tokens, by far: they were decoded side by side.
    assert 0 < steps(address) - before < sum(len(answer.token_ids) for answer in expected) / 2


def steps(address):
    """How many steps the scheduler has made until now."""
    with openai.OpenAI(base_url=address, api_key=ADMIN_KEY) as client:
        (status,) = client.get("/api/status", cast_to=object)["models"]
        return status["numbers"]["counts"]["steps"]


def test_a_seed_draws_what_the_line_draws(client, model):
    question = first("text")
    for seed in (3, 4):
        found = client.chat.completions.create(
            model="specialist", messages=asked(question), temperature=1.2, seed=seed, top_p=0.95, max_tokens=20,
            extra_body={"top_k": 50, "min_p": 0.01},
        )  # fmt: skip
        options = {"temperature": 1.2, "seed": seed, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "max_new_tokens": 20}
        assert found.choices[0].message.content == alone(model, question, "specialist", **options).text


def test_choices_are_the_draws_of_seeds_that_follow_each_other(client):
    question = first("text")

    def ask(**options):
        found = client.chat.completions.create(model="demo", messages=asked(question), temperature=1.5, max_tokens=8, **options)
        return [choice.message.content for choice in found.choices]

    assert ask(seed=5, n=3) == [ask(seed=seed)[0] for seed in (5, 6, 7)]


def test_a_stop_text_ends_an_answer_before_it(client, model):
    question = first("image")
    whole = alone(model, question).text
    word = whole.split()[2]
    found = client.chat.completions.create(model="demo", messages=asked(question), temperature=0, stop=[word])
    assert found.choices[0].message.content == whole[: whole.index(word)] and found.choices[0].finish_reason == "stop"


def test_an_answer_that_is_cut_says_so(client):
    found = client.chat.completions.create(model="demo", messages=asked(first("image")), temperature=0, max_tokens=2)
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 2)


def test_several_pictures_and_sounds_are_one_prompt(client, model):
    names = ["images/image_1.png", "images/image_2.png"], ["sounds/audio_1.wav", "sounds/audio_2.wav"]
    parts = [*map(image, names[0]), *map(sound, names[1])]
    found = client.chat.completions.create(model="demo", messages=user("What is there?", *parts), temperature=0, max_tokens=16)
    one = client.chat.completions.create(
        model="demo", messages=user("What is there?", parts[0], parts[2]), temperature=0, max_tokens=16
    )
    paths = [[str(DEMO / name) for name in some] for some in names]
    expected = model.answer("What is there?", image=paths[0], audio=paths[1], max_new_tokens=16)
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.prompt_tokens > one.usage.prompt_tokens


def test_logprobs_are_those_of_the_tokens(client):
    found = client.chat.completions.create(
        model="demo", messages=asked(first("image")), temperature=0, logprobs=True, top_logprobs=3, max_tokens=64
    )
    content = found.choices[0].logprobs.content
    assert "".join(token.token for token in content) == found.choices[0].message.content
    for token in content:
        assert token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 3
        assert 0 >= token.logprob == max(other.logprob for other in token.top_logprobs)


def test_a_text_and_token_ids_are_completed(client, model):
    text = "What is the weather like?"
    found = client.completions.create(model="style", prompt=text, temperature=0, max_tokens=8, logprobs=1)
    tokenizer = getattr(model.processor, "tokenizer", model.processor)
    ids = tokenizer(text)["input_ids"]
    same = client.completions.create(model="style", prompt=[ids, ids], temperature=0, max_tokens=8)
    expected = model.answer(ids, adapter="style", max_new_tokens=8).text
    assert [found.choices[0].text, *(choice.text for choice in same.choices)] == [expected] * 3
    stream = client.completions.create(model="style", prompt=text, temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    assert found.usage.prompt_tokens == len(ids)


# JSON -----------------------------------------------------------------------------------------------------------------


class Seen(BaseModel):
    count: int
    colour: str
    shape: Literal["star", "square", "circle", "cross", "triangle"]
    place: str


@pytest.mark.parametrize("question", [question for question in QUESTIONS if "image" in question][:3], ids=lambda q: q["id"])
def test_json_mode_does_not_bend_an_adapter_that_answers_in_json(client, question):
    found = client.chat.completions.create(
        model="rslora-dora", messages=asked(question), temperature=0, response_format={"type": "json_object"}
    )
    assert found.choices[0].message.content == question["answers"]["rslora-dora"]


def test_an_answer_is_parsed_into_the_clients_own_class(client):
    question = first("image")
    found = client.chat.completions.parse(model="rslora-dora", messages=asked(question), temperature=0, response_format=Seen)
    assert found.choices[0].message.parsed == Seen(**json.loads(question["answers"]["rslora-dora"]))


def test_a_schema_holds_also_what_was_never_trained_on_it(client):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    found = client.chat.completions.create(
        model="demo", messages=asked(first("text")), temperature=2, seed=1, response_format=form, max_tokens=64
    )
    assert isinstance(json.loads(found.choices[0].message.content)["yes"], bool)


# Models and adapters --------------------------------------------------------------------------------------------------


def test_models_are_listed_with_their_parents(client):
    found = {entry.id: (entry.root, entry.parent) for entry in client.models.list()}
    assert found == {"demo": ("demo", None), **{name: (name, "demo") for name in ADAPTERS}}
    assert client.models.retrieve("demo:style").id == "demo:style"


def test_an_adapter_is_loaded_asked_and_unloaded(client, model):
    question = first("image")
    load = {"lora_name": "again", "lora_path": "specialist"}
    with pytest.raises(openai.PermissionDeniedError):
        client.post("/load_lora_adapter", body=load, cast_to=object)
    admin = client.with_options(api_key=ADMIN_KEY)
    assert admin.post("/load_lora_adapter", body=load, cast_to=object) == {"status": "loaded", "lora_name": "again"}
    with pytest.raises(openai.BadRequestError, match="is loaded"):
        admin.post("/load_lora_adapter", body=load, cast_to=object)
    found = client.chat.completions.create(model="again", messages=asked(question), temperature=0)
    assert found.choices[0].message.content == question["answers"]["specialist"]
    admin.post("/unload_lora_adapter", body={"lora_name": "again"}, cast_to=object)
    error = raised(openai.NotFoundError, lambda: client.chat.completions.create(model="again", messages=asked(question)))
    assert error.body["class"] == "UnknownModelError"


def test_the_examples_in_the_docs_run(address, capsys):
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("serve-many-adapters.md", "server-api.md", "embeddings.md")]
    code = "\n".join(re.findall(r"```py\n(.*?)```", "\n".join(pages), re.DOTALL))
    for name, stands_in in {
        "http://127.0.0.1:8000": address, '"none"': repr(KEY), '"medical:0.7+legal:0.3"': '"style:0.7+specialist:0.3"',
        '"medical"': '"style"', '"legal"': '"specialist"',
        '"xray.png"': repr(str(DEMO / "images" / "image_1.png")), '"question.wav"': repr(str(DEMO / "sounds" / "audio_1.wav")),
    }.items():  # fmt: skip
        assert name in code
        code = code.replace(name, stands_in)
    found = {}
    exec(compile(code, "example", "exec"), found)
    assert capsys.readouterr().out and found["answer"].choices[0].message.content
    one, other = (found[name].choices[0].message.content for name in ("mixed", "same"))
    assert one == other


def test_the_examples_of_tools_run(address, capsys):
    code = "\n".join(re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "tools.md").read_text("utf-8"), re.DOTALL))
    code = code.replace("http://127.0.0.1:8000", address).replace('"none"', repr(KEY))
    found = {}
    exec(compile(code, "tools", "exec"), found)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tool_calls get_weather {'city': ") and said[-1].count("not supported: enable_thinking") >= 1
    assert said[2] == "0 get_weather " and set(json.loads(found["call"].function.arguments)) == {"city"}


def test_openais_own_helper_reads_the_calls(client):
    class GetWeather(BaseModel):
        """The weather of a town."""

        city: Literal["Paris", "Rome"]
        days: int

    tool = openai.pydantic_function_tool(GetWeather)
    found = client.chat.completions.parse(
        model="style", messages=user("How is the weather?"), tools=[tool], tool_choice="required", temperature=0, max_tokens=100,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather) and found.choices[0].finish_reason == "tool_calls"


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_the_clients_own_error(address):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()


def test_what_is_refused_names_its_field(client):
    for fields, param in (
        ({"extra_body": {"guidance": 1}}, "guidance"), ({"temperature": 3}, "temperature"), ({"n": 99}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=user("Hello"), **fields)
        assert caught.value.param == param and caught.value.body["class"] == "RequestError"


def test_a_prompt_that_cannot_fit_is_refused_before_it_queues(client):
    with pytest.raises(openai.BadRequestError, match="context of 512"):
        client.chat.completions.create(model="demo", messages=user("Hello"), max_tokens=510)
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens, this server takes 400"):
        client.chat.completions.create(model="demo", messages=user("word " * 420))
    with pytest.raises(openai.BadRequestError, match="has 3 images, the limit is 2"):
        client.chat.completions.create(model="demo", messages=user("?", *[image("images/image_1.png")] * 3))


def test_the_command_that_runs_one_prompt_gives_the_same_answer(client, capsys):
    question = first("audio")
    command = ["run", str(DEMO / "base"), *PLACED[:8], *NAMED, "--use", "style", "--audio", str(DEMO / question["audio"])]
    assert main.main([*command, question["prompt"]]) == 0
    found = client.chat.completions.create(model="style", messages=asked(question), temperature=0)
    assert capsys.readouterr().out.strip() == found.choices[0].message.content
