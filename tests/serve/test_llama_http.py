"""A Llama over HTTP whose answers are known: calls of tools, a round with their result, and penalties that change an answer.

The model is a real Llama of two layers, trained for a few seconds on exactly these conversations.
"""

import json
import os

import pytest
import torch

from bench.served import Served
from tests import ROOT, talking
from tests.tool_templates import NOW, TEMPLATES, WEATHER

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

TOOLS = [WEATHER, NOW]
WRITTEN = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]}  # fmt: skip
ASKED = {"role": "user", "content": "How is the weather in Paris?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
SING = {"role": "user", "content": "Sing"}
SONG = " la la la la la la la la"
CONVERSATIONS = [([ASKED], TOOLS, WRITTEN), ([ASKED, CALLED, RESULT], TOOLS, "It is sunny."), ([SING], None, SONG)]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = talking.build_llama(tmp_path_factory.mktemp("llama"), chat_template=TEMPLATES["llama"])
    train(folder)
    flags = ["--name", "llama", "--quant", "none", "--dtype", "float32", "--context", "512", "--device", "cpu"]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with Served([str(folder), *flags, "--rows", "2"], environment={**os.environ, **environment}) as server:
        yield openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def train(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    examples = []
    for messages, tools, answer in CONVERSATIONS:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        examples.append((prompt, tokenizer(answer, add_special_tokens=False)["input_ids"] + [1]))
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(400):
        losses = [loss_of(model, *example) for example in examples]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if max(losses) < 0.02:
            break
    assert max(losses) < 0.05
    model.save_pretrained(folder)


def loss_of(model, prompt, answer):
    ids = torch.tensor([prompt + answer])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])


def ask(client, messages, **options):
    return client.chat.completions.create(model="llama", messages=messages, temperature=0, **{"max_tokens": 100, **options})


def test_a_call_that_the_model_chooses_is_one(client):
    choice = ask(client, [ASKED], tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    assert choice.finish_reason == "tool_calls" and choice.message.content is None


def test_without_tools_the_same_text_is_text(client):
    choice = ask(client, [ASKED], tools=TOOLS, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_a_stream_has_the_name_first_and_then_the_arguments_in_pieces(client):
    deltas = [chunk.choices[0] for chunk in ask(client, [ASKED], tools=TOOLS, stream=True)]
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather" and calls[0].id and all(call.index == 0 for call in calls)
    assert all(call.function.name is None and call.id is None for call in calls[1:]) and len(calls) > 2
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Paris"}
    assert deltas[-1].finish_reason == "tool_calls" and not any(one.delta.content for one in deltas)


def test_a_result_is_answered(client):
    first = ask(client, [ASKED], tools=TOOLS).choices[0].message
    choice = ask(client, [ASKED, first, {**RESULT, "tool_call_id": first.tool_calls[0].id}], tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is sunny.", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"get_weather", "now"}), ({"type": "function", "function": {"name": "now"}}, {"now"})]
)
def test_what_has_to_be_called_is_called_whatever_the_model_would_say(client, choice, names, stream):
    """The model was never asked this: its own answer is no call."""
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
    answer = ask(client, [SING], **options)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer]
        calls = [call for one in deltas for call in one.delta.tool_calls or ()]
        name, finish = calls[0].function.name, deltas[-1].finish_reason
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        (call,), finish = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        name, arguments = call.function.name, call.function.arguments
    assert name in names and finish == "tool_calls"
    fields = json.loads(arguments)
    assert fields == {} if name == "now" else {"city"} <= set(fields) <= {"city", "unit"}


def test_without_a_penalty_the_model_repeats_itself(client):
    assert ask(client, [SING]).choices[0].message.content.strip() == SONG.strip()


@pytest.mark.parametrize("options", [{"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 5.0}}])
def test_a_penalty_ends_what_repeats(client, options):
    text = ask(client, [SING], **options).choices[0].message.content
    assert text.strip() != SONG.strip() and text.count("la") < SONG.count("la")


def test_a_presence_penalty_lets_another_token_win(client):
    """A bias brings the best token that the song has not to within 1 of the winner: a penalty of 2 on what was written decides."""
    place = ask(client, [SING], logprobs=True, top_logprobs=5).choices[0].logprobs.content[2]
    other = next(one for one in place.top_logprobs if one.token not in SONG)
    said = client.post(
        str(client.base_url).replace("/v1/", "/tokenize"),
        body={"model": "llama", "prompt": other.token, "add_special_tokens": False},
        cast_to=object,
    )
    token_id = said["tokens"][-1]
    bias = {str(token_id): place.top_logprobs[0].logprob - other.logprob - 1}
    assert ask(client, [SING], logit_bias=bias, max_tokens=3).choices[0].message.content in SONG
    changed = ask(client, [SING], logit_bias=bias, presence_penalty=2.0).choices[0].message.content
    assert not changed.startswith(SONG[:4]) and changed.count("la") < SONG.count("la")
