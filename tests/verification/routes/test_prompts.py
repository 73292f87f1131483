"""Prompt files: what they may hold, every problem at once, and the built-in sets."""

import json
import wave

from PIL import Image

from tests.raised import raised
from trimtab.errors import RequestError
from trimtab.verification.routes.prompts import DEMO, Prompt, built_in, check_modalities, checked, demo_prompts, read_prompts


def write(folder, *lines):
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def refused(call, *arguments):
    error = raised(RequestError, call, *arguments)
    assert error.field == "prompts"
    return str(error)


def test_a_file_is_read_with_media_beside_it(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    found = read_prompts(
        write(tmp_path, {"id": "one", "text": "Hello"}, "", {"id": "two", "text": "See?", "image": "a.png"},
              {"id": "three", "token_ids": [3, 4]}, {"id": "four", "text": "?", "expected": {"base": "yes"}})
    )  # fmt: skip
    assert found == (
        Prompt("one", "Hello"), Prompt("two", "See?", image=str((tmp_path / "a.png").resolve())),
        Prompt("three", token_ids=(3, 4)), Prompt("four", "?", expected={"base": "yes"}),
    )  # fmt: skip
    assert [prompt.kind for prompt in found] == ["text", "image", "text", "text"]
    assert found[1].to_json() == {"id": "two", "text": "See?", "image": found[1].image}


def test_every_problem_of_a_file_is_said_at_once(tmp_path):
    text = refused(
        read_prompts,
        write(tmp_path, "{nonsense", [1], {"id": "a", "text": "x", "colour": "red"}, {"text": "x"}, {"id": "b"},
              {"id": "c", "text": " "}, {"id": "d", "text": "x", "image": "none.png", "audio": "none.wav"},
              {"id": "e", "token_ids": ["x"]}, {"id": "f", "text": "x", "token_ids": [1]}, {"id": "g", "text": "x"},
              {"id": "g", "text": "y"}, {"id": "h", "text": "x", "expected": "yes"}),
    )  # fmt: skip
    for problem in (
        "line 1: is not JSON", "line 2: must hold an object, it holds a list", "line 3: unknown key 'colour'",
        "line 4: has no id", "line 5: has neither text nor token_ids", "line 6: text must be a text that is not empty",
        "line 7: image ", "line 7: audio ", "line 8: token_ids must be a list of integers",
        "line 9: token_ids are used unchanged", "id 'g' is used 2 times", "line 12: expected must be an object",
    ):  # fmt: skip
        assert problem in text, problem
    assert str(tmp_path / "none.png") in text


def test_a_missing_file_is_refused(tmp_path):
    assert "cannot be read" in refused(read_prompts, tmp_path / "none.jsonl")


def test_an_empty_file_is_refused(tmp_path):
    assert "holds no prompt" in refused(read_prompts, write(tmp_path, "", ""))


def test_a_file_of_another_encoding_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"id": "\xff"}')
    assert "is not UTF-8" in refused(read_prompts, tmp_path / "p.jsonl")


def test_prompts_may_be_given_in_python():
    found = checked(["Hello", {"id": "x", "text": "y"}, Prompt("z", "w")])
    assert found == (Prompt("p1", "Hello"), Prompt("x", "y"), Prompt("z", "w"))
    assert "prompt 1: unknown key 'txt'" in refused(checked, [{"id": "x", "txt": "y"}])
    assert "id 'p1' is used 2 times" in refused(checked, ["a", Prompt("p1", "b")]) and "holds no prompt" in refused(checked, [])


def test_media_that_the_model_cannot_take_are_refused_together():
    prompts = [Prompt("a", "x", image="i"), Prompt("b", "x", audio="s"), Prompt("c", "x")]
    text = refused(check_modalities, prompts, {"model_type": "llama"})
    assert "a has an image, the model takes text" in text and "b has an audio" in text and "c has" not in text
    assert "b has an audio, the model takes text, image" in refused(check_modalities, prompts, {"vision_config": {"x": 1}})
    check_modalities(prompts, {"vision_config": {"x": 1}, "audio_config": {"x": 1}})


def test_the_demo_model_gets_its_own_questions(tmp_path):
    found = built_in(DEMO / "base", {}, tmp_path)
    assert found == demo_prompts() and [prompt.kind for prompt in found] == ["text", "image", "audio"]
    assert all(prompt.expected["base"] and prompt.text for prompt in found)


def test_other_models_get_texts_and_drawn_media(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    config = {"vision_config": {"a": 1}, "audio_config": {"a": 1}}
    found = built_in(model, config, tmp_path / "media")
    assert [prompt.id for prompt in found] == [
        "p01_lora_short", "p02_hypertension_short", "p03_medical_tutor", "p04_picture", "p05_tone",
    ]  # fmt: skip
    with Image.open(found[3].image) as picture:
        assert picture.size == (224, 224) and len(picture.getcolors()) >= 4
    with wave.open(found[4].audio) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (16000, 16000)
    assert [prompt.kind for prompt in built_in(model, {}, tmp_path)] == ["text"] * 3


def test_a_model_without_tokenizer_gets_token_ids(tmp_path):
    found = built_in(tmp_path, {"text_config": {"vocab_size": 320}}, tmp_path)
    assert len({prompt.token_ids for prompt in found}) == 3 and all(len(prompt.token_ids) == 24 for prompt in found)
    assert all(8 <= token < 240 for prompt in found for token in prompt.token_ids)
    assert found == built_in(tmp_path, {"text_config": {"vocab_size": 320}}, tmp_path)
