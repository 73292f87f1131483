"""Questions: text, pictures and sounds become exactly what the model's own processor makes of them."""

import json
from contextlib import nullcontext

import jinja2
import pytest
import torch
import transformers

import trimtab
from tests import talking
from tests.lent import DEVICE
from tests.raised import raised, raising, refused
from trimtab.engine.chat import prompt as chat
from trimtab.engine.loader.processor import check_named_ids, load_processor
from trimtab.errors import CheckpointError, RequestError
from trimtab.verification.routes.inputs import WithoutWeights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = talking.build_gemma4(tmp_path_factory.mktemp("gemma4"))
    with trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=256, images=2, audio_s=1.0)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = talking.build_llama(tmp_path_factory.mktemp("llama"))
    with trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=128)) as loaded:
        yield loaded


def test_media_go_where_the_processor_wants_them(model):
    found = model.prepare("What is it?", image=talking.png(), audio=talking.wav())
    config = model.hf_model.config
    ids = found.token_ids
    picture, sound = ids.count(config.image_token_id), ids.count(config.audio_token_id)
    patches = int((found.tensors["image_position_ids"] >= 0).all(-1).sum())
    assert picture == patches // 4 > 0  # pooled 2 x 2
    assert sound == 20  # 0.8 s at 40 ms a token
    assert ids.index(config.image_token_id) < ids.index(config.audio_token_id)
    assert found.tensors["pixel_values"].dtype == torch.bfloat16 and found.prompt_tokens == len(ids)
    assert ids.count(config.get_text_config().bos_token_id) == 1


def test_several_pictures_and_messages_in_their_order(model):
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "one"}, {"type": "image", "image": talking.png()},
            {"type": "text", "text": "two"}, {"type": "image", "image": talking.png(size=(90, 90))},
        ],
    }  # fmt: skip
    found = model.prepare([message])
    assert found.tensors["pixel_values"].shape[0] == 2
    plain = model.prepare("one two", image=[talking.png(), talking.png(size=(90, 90))])
    assert plain.tensors["pixel_values"].shape == found.tensors["pixel_values"].shape and plain.token_ids != found.token_ids


def test_more_media_than_were_counted_are_refused(model):
    error = refused(lambda: model.prepare("one", image=[talking.png()] * 3), match="has 3 images, the limit is 2")
    assert error.field == "image"
    error = refused(lambda: model.prepare("one", audio=[talking.wav()] * 2), match="1.6 seconds of audio, the limit is 1")
    assert error.field == "audio"


def test_the_text_route_equals_the_processors_own(model):
    processor = load_processor(model.processor_folder)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    own = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    expected = own["input_ids"]
    expected = expected[0] if isinstance(expected[0], (list, tuple)) else expected
    assert list(model.prepare("Hello").token_ids) == list(expected)


def test_tokens_of_a_text_are_read_at_once_and_nothing_looks_at_each(model, monkeypatch):
    """Python runs one thread at a time: what preparing a prompt takes is taken from the thread that makes tokens."""
    expected = model.prepare("Hello you")
    calls = []
    real = type(model.processor).__call__

    def noted(self, *arguments, **options):
        calls.append(options)
        return real(self, *arguments, **options)

    monkeypatch.setattr(type(model.processor), "__call__", noted)
    monkeypatch.setattr(torch.Tensor, "__int__", raising(AssertionError("a token was read by itself")))
    found = model.prepare("Hello you")
    assert found.token_ids == expected.token_ids and list(found.tensors) == list(expected.tensors)
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.tensors.items())
    # With tensors requested, the processor would look at every number first.
    assert all("return_tensors" not in options for options in calls) and len(calls) == 1


def test_a_system_text_comes_first(model):
    tokenizer = model.processor.tokenizer
    text = tokenizer.decode(model.prepare("Hello", system="Be brief").token_ids)
    assert text.index("system") < text.index("Be") < text.index("Hello")


@pytest.mark.parametrize("prompt, options, field", [
    (17, {}, "prompt"), ([{"role": "wizard", "content": "x"}], {}, "prompt"),
    ([{"role": "user", "content": [{"type": "video", "video": b""}]}], {}, "prompt"), ([{"role": "user"}], {}, "prompt"),
    ([{"role": "user", "content": "x"}], {"image": talking.png()}, "image"), ([1, 2, 3], {"image": talking.png()}, "prompt"),
    ([1, 10**9], {}, "prompt"), ("", {}, "prompt"), (" \n", {}, "prompt"), ([{"role": "user", "content": ""}], {}, "prompt"),
    ([{"role": "user", "content": [{"type": "text", "text": " "}]}], {"system": "Be kind"}, "prompt"),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "\n"}], {},
        "prompt",
    ),
    ([{"role": "system", "content": ""}], {}, "prompt"),
    ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], {"system": "c"}, "system"),
])  # fmt: skip
def test_what_is_no_question_is_refused(model, prompt, options, field):
    assert refused(model.prepare, prompt, **options).field == field


def test_a_message_that_only_shows_something_is_a_prompt(model):
    shown = [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image", "image": talking.png()}]}]
    assert model.prepare(shown).has_media


def test_a_modality_that_the_model_lacks_is_refused(llama):
    assert refused(lambda: llama.prepare("Hello", image=talking.png()), match="this model takes text").field == "image"
    assert refused(lambda: llama.prepare("Hello", audio=talking.wav()), match="this model takes text").field == "audio"


def test_a_tokenizer_alone_is_enough_for_text(llama):
    ids = llama.prepare("Hello there").token_ids
    assert ids[0] == 2 and llama.processor.decode(ids, skip_special_tokens=True) == "Hello there"
    assert refused(llama.prepare, "Hello", system="Be brief", match="no chat template").field == "system"


def test_template_arguments_pass_through(tmp_path):
    template = "{{ bos_token }}{% if enable_thinking %}THINK {% endif %}{{ messages[0]['content'] }}"
    folder = talking.build_llama(tmp_path / "llama", chat_template=template)
    with trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=128)) as loaded:
        tokenizer = loaded.processor
        with_it = loaded.prepare("Hello", template_kwargs={"enable_thinking": True}).token_ids
        without = loaded.prepare("Hello").token_ids
        assert "THINK" in tokenizer.decode(with_it) and "THINK" not in tokenizer.decode(without)
        assert with_it.count(2) == 1


def test_names_are_written_by_templates_that_know_them_and_refused_by_others(tmp_path):
    knows = "{{ bos_token }}{% for m in messages %}{{ m.name or 'nobody' }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "Hello", "name": "Ann"}, {"role": "user", "content": "there"}]
    for template, is_known in ((knows, True), ("{{ bos_token }}{{ messages[0].content }}", False)):
        folder = talking.build_llama(tmp_path / str(is_known), chat_template=template)
        with trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=128)) as loaded:
            if is_known:
                assert loaded.processor.decode(loaded.prepare(messages).token_ids[1:]) == "Ann: Hello\nnobody: there\n"
                forged = [{**messages[0], "name": "<bos>"}, messages[1]]
                assert loaded.prepare(forged).token_ids.count(2) == 1
            else:
                with pytest.raises(RequestError, match="not supported: name"):
                    loaded.prepare(messages)


PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content | trim | upper }}{% endfor %}"


@pytest.mark.parametrize("template, system, wanted", [
    (PARTS, None, "user:Hello"), (PARTS, "Be brief", "system:Be briefuser:Hello"), (USERS, None, "HELLO"),
    (USERS, "Be brief", "not supported: system"), ("{{ messages[0].role }}", None, "not write the text of the last question"),
])  # fmt: skip
def test_no_text_is_lost_in_a_template(tmp_path, template, system, wanted):
    folder = talking.build_llama(tmp_path / "llama", chat_template=template)
    asked = WithoutWeights(folder, "bfloat16")
    if not wanted.startswith("not "):
        assert asked.processor.decode(chat.prepare(asked, "Hello", system=system).token_ids) == wanted
    else:
        with pytest.raises(RequestError, match=wanted):
            chat.prepare(asked, "Hello", system=system)


# As Mistral's: a system message stands in front of a question that comes last, and nowhere else.
LAST = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("template, is_written", [(LAST, True), (LAST.replace("{{ messages[0].content }}", ""), False)])
def test_a_system_message_that_a_template_writes_elsewhere_is_no_error(template, is_written):
    def render(messages, tools):
        return jinja2.Template(template).render(messages=messages)

    said = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "tool")]
    with nullcontext() if is_written else pytest.raises(RequestError, match="not supported: system"):
        chat._check_written(render, said, [], render(said, []))


def test_a_system_message_in_parts_is_written_whole():
    def render(messages, tools):
        return "".join(m["content"] if isinstance(m["content"], str) else m["content"][0]["text"] for m in messages)

    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    said = [{"role": "system", "content": parts}, {"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="not supported: system"):
        chat._check_written(render, said, [], render(said, []))


def test_a_checkpoint_without_tokenizer_says_so(tmp_path):
    from tests import pico

    folder = pico.build("llama", tmp_path / "bare")
    with trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=64)) as loaded:
        with pytest.raises(CheckpointError, match="has no tokenizer files"):
            loaded.prepare("Hello")
        assert loaded.answer([1, 2, 3], max_new_tokens=3).text == ""  # token ids need none


def loaded_with(tokenizer, folder):
    """Return a Llama with the vocabulary of the demo's tokenizer, and another tokenizer in its folder."""
    talking.build_llama(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return trimtab.load(trimtab.plan(folder, quant="nf4", device=DEVICE, context=128))


def test_a_tokenizer_without_words_is_refused(tmp_path):
    config = (talking.build_llama(tmp_path / "whole") / "tokenizer_config.json").read_text("utf-8")
    with loaded_with(None, tmp_path / "bare") as loaded:
        # transformers makes a tokenizer of the special tokens in this file, and every text becomes <unk>.
        (tmp_path / "bare" / "tokenizer_config.json").write_text(config, encoding="utf-8")
        error = raised(CheckpointError, loaded.prepare, "Hello", match="tokenizer.json is missing|special tokens and no others")
    assert error.path == str(tmp_path / "bare") and "tokenizer.json" in error.hint


def word_tokenizer(words, *, specials=("<unk>", "<eos>", "<bos>")):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: place for place, word in enumerate([*specials, *words])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_a_foreign_tokenizer_of_equal_size_is_refused_where_the_ends_are_words(tmp_path):
    with loaded_with(None, tmp_path / "foreign") as loaded:
        words = [f"word{number}" for number in range(loaded.hf_model.config.vocab_size - 1)]
        word_tokenizer(words, specials=("<unk>",)).save_pretrained(tmp_path / "foreign")
        with pytest.raises(CheckpointError, match=r"its eos_token_id is an ordinary word .*1 \('word0'\).*two models"):
            loaded.prepare("word1")


def test_a_foreign_tokenizer_is_refused_where_a_picture_would_be_a_word(tmp_path):
    folder = talking.build_gemma4(tmp_path / "seeing")
    known = json.loads((folder / "config.json").read_text("utf-8"))
    tokenizer = word_tokenizer([f"word{number}" for number in range(known["image_token_id"])])
    with pytest.raises(CheckpointError, match=r"its image_token_id is an ordinary word of its tokenizer: \d+ \('word"):
        check_named_ids(tokenizer, folder)
    check_named_ids(transformers.AutoTokenizer.from_pretrained(folder), folder)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path):
    with loaded_with(word_tokenizer([f"word{number}" for number in range(5000)]), tmp_path / "foreign") as loaded:
        rows = loaded.hf_model.config.vocab_size
        with pytest.raises(CheckpointError, match=f"ids up to 5002, the model has {rows} embedding rows"):
            loaded.prepare("word1")


def test_an_added_token_without_a_row_is_refused_where_a_prompt_has_it(tmp_path):
    tokenizer = word_tokenizer(["Hello", "there"])
    with loaded_with(tokenizer, tmp_path / "added") as loaded:
        rows = loaded.hf_model.config.vocab_size
        tokenizer.add_tokens([f"extra{number}" for number in range(rows)])
        tokenizer.save_pretrained(tmp_path / "added")
        assert loaded.prepare("Hello there").token_ids == (3, 4)
        with pytest.raises(CheckpointError, match=f"made token id {rows + 4} of this prompt, the model has {rows}"):
            loaded.prepare(f"Hello extra{rows - 1}")


def test_a_prompt_of_which_the_tokenizer_knows_nothing_is_refused(tmp_path):
    with loaded_with(word_tokenizer(["Hello"]), tmp_path / "poor") as loaded:
        assert loaded.prepare("Hello you").token_ids == (3, 0)
        assert refused(loaded.prepare, "Guten Tag", match="every token is <unk>").field == "prompt"
