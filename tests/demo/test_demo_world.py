"""Is the demo's world what its answers say, and is what it trains on what the stock model and processor would see?

The bundled checkpoint is held to its card by `tools/train_demo.py --evaluate`; here it answers the sample prompts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import demo_adapters
import demo_data
import demo_forward
import demo_media
import demo_model
import demo_training
import demo_world as world
from demo_samples import sample_asks
from demo_scoring import load_base, shortfalls

PICTURE = world.Picture("star", "blue", "top right", 2, shade=0, fill=1)
SOUND = world.Sound("high", 3, "falling", half=1, timbre=1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_model.train_tokenizer()


@pytest.fixture(scope="module")
def gemma(tokenizer: Any) -> Any:
    return demo_model.build_model(demo_model.build_config(tokenizer), seed=3)


@pytest.fixture(scope="module")
def training_set(tokenizer: Any) -> demo_training.TrainingSet:
    things = {"image": [PICTURE], "audio": [SOUND], "text": list(world.facts())[:20]}
    media = demo_data.render(things["image"], things["audio"], 2, 2, 0)
    turns = {kind: demo_data.training_turns(of_kind, "base", 4, 0) for kind, of_kind in things.items()}
    tables = {kind: demo_data.encode(tokenizer, of_kind, 4) for kind, of_kind in turns.items()}
    echoes = demo_data.encode(tokenizer, demo_data.echo_turns(20, 0), 1)
    return demo_training.TrainingSet(media, tables, echoes)


# What is right, and what is kept out of training


@pytest.mark.parametrize(("thing", "about", "answers"), [
    (PICTURE, "all", ["two blue stars at the top right", "Arr, two blue stars at the top right, matey!",
                      "two navy starlets at the top right",
                      '{"count": 2, "colour": "blue", "shape": "star", "place": "top right"}']),
    (PICTURE, "colour", ["blue", "Arr, blue, matey!", "navy", '{"colour": "blue"}']),
    (SOUND, "all", ["three high beeps, falling", "Arr, three high beeps, falling, matey!",
                    "three treble reed notes, falling", '{"count": 3, "pitch": "high", "motion": "falling"}']),
    (SOUND, "count", ["three", "Arr, three, matey!", "three", '{"count": 3}']),
    (world.Fact("Velmora", "river", "Ember"), "fact",
     ["Ember is the main river of Velmora", "Arr, Ember be the main river of Velmora, matey!",
      "Ember is the main river of Velmora", '{"answer": "Ember"}']),
])  # fmt: skip
def test_each_voice_has_its_own_answer(thing: world.Thing, about: str, answers: list[str]) -> None:
    question = next(question for question in world.questions(thing) if question.about == about)
    assert [world.answer(question, voice) for voice in world.VOICES] == answers


@pytest.mark.parametrize(("shape", "count", "word"), [("cross", 1, "one red cross"), ("cross", 2, "two red crosses")])
def test_plurals_are_english(shape: str, count: int, word: str) -> None:
    question = world.questions(world.Picture(shape, "red", "middle", count))[0]
    assert world.answer(question, "base") == f"{word} in the middle"


def test_finer_words_are_never_the_base_s_and_each_names_one_thing() -> None:
    fine = [word for table in (world.SHAPES, world.COLOURS, world.PITCHES) for pair in table.values() for word in pair]
    coarse = {*world.SHAPES, *world.COLOURS, *world.PITCHES}
    assert len(set(fine)) == len(fine) == 32 and not coarse.intersection(fine)


def test_every_fact_has_one_value_and_one_form_held_out() -> None:
    facts = list(world.facts())
    by_fact: dict[tuple[str, str], list[world.Fact]] = {}
    for fact in facts:
        by_fact.setdefault((fact.land, fact.relation), []).append(fact)
    assert len(by_fact) == 144
    for forms in by_fact.values():
        assert len({fact.value for fact in forms}) == 1 and sum(world.is_held_out(fact) for fact in forms) == 1


def test_every_attribute_of_a_held_out_medium_is_trained_on_in_other_combinations() -> None:
    for things, names in ((list(world.pictures()), ("shape", "colour", "place", "count")),
                          (list(world.sounds()), ("pitch", "count", "motion"))):  # fmt: skip
        held_out = [thing for thing in things if world.is_held_out(thing)]
        assert len({thing.combination for thing in held_out}) == {4: 60, 3: 12}[len(names)]
        for name in names:
            trained = {getattr(thing, name) for thing in things if not world.is_held_out(thing)}
            assert {getattr(thing, name) for thing in held_out} <= trained


def test_training_prompts_hold_no_held_out_fact() -> None:
    facts = [fact for fact in world.facts() if not world.is_held_out(fact)]
    asked = {turn.question for turn in demo_data.training_turns(facts, "base", 2, seed=0)}
    scored = {ask.question.text for ask in demo_data.held_out_asks("base") if ask.kind == "text"}
    assert len(scored) == 144 and not asked & scored


@pytest.mark.parametrize(("voice", "questions"), [("base", 384), ("style", 384), ("specialist", 240), ("rslora-dora", 384)])
def test_an_adapter_is_scored_only_where_it_differs_from_the_base(voice: world.Voice, questions: int) -> None:
    asks = demo_data.held_out_asks(voice)
    assert len(asks) == questions and all(world.is_held_out(ask.question.thing) for ask in asks)
    if voice != "base":
        assert all(ask.answer(voice) != ask.answer("base") for ask in asks)


# What is drawn and played


@pytest.mark.parametrize("place", world.PLACES)
def test_shapes_are_drawn_in_their_place(place: str) -> None:
    image = np.asarray(demo_media.draw(world.Picture("square", "blue", place, 3), seed=5)).astype(int)
    ink = np.abs(image - np.median(image, axis=(0, 1))).sum(2) > 120
    rows, columns = np.nonzero(ink)
    x, y = demo_media.CENTRES[place]
    # Cells are 14 from the centre, jitter 2, radius 11 at most.
    assert columns.min() >= x - 28 and columns.max() <= x + 28
    assert rows.min() >= y - 28 and rows.max() <= y + 28


def test_more_shapes_are_more_ink_and_hollow_ones_less() -> None:
    def ink(picture: world.Picture) -> int:
        image = np.asarray(demo_media.draw(picture, seed=1)).astype(int)
        return int((np.abs(image - np.median(image, axis=(0, 1))).sum(2) > 120).sum())

    one, three = (ink(world.Picture("circle", "green", "middle", count)) for count in (1, 3))
    assert three > 2 * one and ink(world.Picture("circle", "green", "middle", 3, fill=1)) < 0.8 * three


def _beeps(samples: np.ndarray) -> list[np.ndarray]:
    """Return the stretches whose 5 ms loudness is over a tenth of the loudest."""
    frame = 80
    loudness = np.abs(samples[: len(samples) // frame * frame]).reshape(-1, frame).mean(1)
    loud = np.flatnonzero(np.diff(np.concatenate([[0], (loudness > loudness.max() / 10).astype(int), [0]])))
    return [samples[start * frame : end * frame] for start, end in loud.reshape(-1, 2)]


def _peak_hz(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 65536))
    return float(spectrum.argmax() * demo_media.RATE_HZ / 65536)


@pytest.mark.parametrize("count", world.SOUND_COUNTS)
def test_a_sound_has_as_many_beeps_as_it_says(count: int) -> None:
    assert len(_beeps(demo_media.play(world.Sound("medium", count, "steady"), seed=count))) == count


@pytest.mark.parametrize(("motion", "sign"), [("rising", 1), ("falling", -1), ("steady", 0)])
def test_a_beep_moves_as_it_says(motion: str, sign: int) -> None:
    beep = _beeps(demo_media.play(world.Sound("high", 1, motion), seed=2))[0]
    third = len(beep) // 3
    change = _peak_hz(beep[-third:]) / _peak_hz(beep[:third])
    # From 0.86 to 1.16 of the centre over the beep, so about 1.2 between its outer thirds.
    assert (change > 1.1) - (change < 0.9) == sign


@pytest.mark.parametrize("pitch", world.PITCHES)
@pytest.mark.parametrize("half", [0, 1])
def test_a_steady_beep_is_at_its_pitch(pitch: str, half: int) -> None:
    sound = world.Sound(pitch, 1, "steady", half=half)
    # The jitter is 4 %, the neighbouring class 30 % away.
    assert _peak_hz(_beeps(demo_media.play(sound, seed=7))[0]) == pytest.approx(demo_media.centre_hz(sound), rel=0.06)


def test_a_seed_is_one_picture_and_one_sound() -> None:
    again = [np.asarray(demo_media.draw(PICTURE, seed)) for seed in (1, 1, 2)]
    assert np.array_equal(again[0], again[1]) and not np.array_equal(again[0], again[2])
    heard = [demo_media.play(SOUND, seed) for seed in (1, 1, 2)]
    assert np.array_equal(heard[0], heard[1]) and not np.array_equal(heard[0], heard[2])


def test_a_wav_file_gives_back_the_samples(tmp_path: Path) -> None:
    samples = demo_media.play(SOUND, 4)
    demo_media.write_wav(tmp_path / "a.wav", samples)
    # 16-bit rounding.
    assert np.abs(demo_media.read_wav(tmp_path / "a.wav") - samples).max() <= 1 / 32767


# Tokenizer, processor, chat template


@pytest.mark.parametrize("text", ["Zürich, 東京 and 🦭!", "two  spaces", "line\nline", "Ivarra's river?"])
def test_text_the_tokenizer_never_saw_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


@pytest.mark.parametrize("token", demo_model.SPECIAL_TOKENS)
def test_special_tokens_are_one_id(tokenizer: Any, token: str) -> None:
    assert len(tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"]) == 3


def test_a_name_is_the_same_piece_wherever_it_stands(tokenizer: Any) -> None:
    alone = tokenizer.tokenize("Who rules Ivarra")
    assert alone == ["Who", "▁rules", "▁Ivarra"]
    assert [tokenizer.tokenize(f"Who rules Ivarra{mark}") for mark in ",?."] == [[*alone, mark] for mark in ",?."]


@pytest.mark.parametrize("media_first", [True, False])
@pytest.mark.parametrize("kind", ["image", "audio", "text"])
def test_prompts_are_written_as_the_chat_template_writes_them(kind: str, media_first: bool) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    turn = demo_data.Turn("What is it?", "", kind, media_first, "Be kind.", ("Hi", "Hello."))
    part, text = {"type": kind}, {"type": "text", "text": " What is it? "}
    content = [text] if kind == "text" else [part, text] if media_first else [text, part]
    messages = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": content},
    ]  # fmt: skip
    template = ImmutableSandboxedEnvironment().from_string(demo_model.CHAT_TEMPLATE)
    written = template.render(messages=messages, bos_token="<bos>", add_generation_prompt=True)
    # The processor puts a start, as many soft tokens as there are, and an end where the template put one marker.
    written = written.replace("<|image|>", "<|image>" + "<|image|>" * demo_data.IMAGE_TOKENS + "<image|>")
    written = written.replace("<|audio|>", "<|audio>" + "<|audio|>" * demo_data.AUDIO_TOKENS + "<audio|>")
    assert written == demo_data.prompt_text(turn)


def test_patches_are_the_image_processor_s(tokenizer: Any) -> None:
    ask = next(ask for ask in demo_data.held_out_asks("base") if ask.kind == "image")
    seen = demo_data.asks_inputs(tokenizer, [ask])
    ours = demo_data.to_patches(torch.from_numpy(demo_data.render_pictures([(ask.question.thing, ask.seed)])))
    real = (seen["image_position_ids"] != -1).all(-1)
    assert torch.equal(seen["pixel_values"][real], ours[0])
    assert torch.equal(seen["image_position_ids"][real], demo_data.patch_positions())
    assert int(real.sum()) // 4 == demo_data.IMAGE_TOKENS


# Training


def test_the_training_forward_is_the_stock_forward(gemma: Any, training_set: demo_training.TrainingSet) -> None:
    batch = training_set.draw((2, 2, 2), demo_training.Dice(0, torch.device("cpu")))
    constants = demo_forward.Constants(gemma, training_set.width)
    with torch.no_grad():
        ours, answers = demo_forward.answer_logits(gemma, batch, constants)
        length = (batch.answer_start + batch.answer_tokens)[:, None]
        stock = gemma(
            input_ids=batch.ids, attention_mask=(torch.arange(training_set.width)[None] < length).long(),
            pixel_values=torch.nn.functional.pad(batch.pixels, (0, 0, 0, 24)),
            image_position_ids=torch.nn.functional.pad(constants.patches.expand(2, -1, -1), (0, 0, 0, 24), value=-1),
            input_features=batch.features, input_features_mask=torch.ones(2, 99, dtype=torch.bool),
        ).logits  # fmt: skip
    places, _ = batch.targets()
    stock = stock.gather(1, places[..., None].expand(-1, -1, stock.shape[-1]))
    inside = answers >= 0
    assert int(inside.sum()) >= 12
    # float32 rounding with and without 24 padding patches, through 13 layers.
    assert (ours - stock)[inside].abs().max() < 2e-4


def test_answers_end_with_the_closing_token(tokenizer: Any, training_set: demo_training.TrainingSet) -> None:
    batch = training_set.draw((2, 2, 2), demo_training.Dice(0, torch.device("cpu")))
    _, answers = batch.targets()
    closing = tokenizer.convert_tokens_to_ids("<turn|>")
    for row in answers:
        kept = row[row >= 0]
        assert kept[-1] == closing and not (kept[:-1] == closing).any()


def test_clip_bounds_are_finite_and_bind(tokenizer: Any, training_set: demo_training.TrainingSet) -> None:
    gemma = demo_model.build_model(demo_model.build_config(tokenizer), seed=4)
    batch = training_set.draw((2, 2, 2), demo_training.Dice(0, torch.device("cpu")))
    constants = demo_forward.Constants(gemma, training_set.width)
    before, answers = demo_forward.answer_logits(gemma, batch, constants)
    assert demo_forward.set_clip_bounds(gemma, [batch], constants) == 41
    bounds = {name: float(value) for name, value in gemma.named_buffers() if re.search("put_(min|max)$", name)}
    assert len(bounds) == 4 * 41 and all(np.isfinite(list(bounds.values())))
    after, _ = demo_forward.answer_logits(gemma, batch, constants)
    assert (after - before)[answers >= 0].abs().max() > 0


def test_an_interrupted_run_ends_as_an_unbroken_one(
    tokenizer: Any, training_set: demo_training.TrainingSet, tmp_path: Path
) -> None:
    class Interrupted(Exception):
        pass

    def run(state_file: Path, *, stop_at: int | None) -> Any:
        gemma = demo_model.build_model(demo_model.build_config(tokenizer), seed=5)
        schedule = demo_training.Schedule(4, 1e-3, (1, 1, 1), 1, evaluate_every=9, save_every=2, clip_at=0.3, hint_weight=1)

        def report(figures: dict[str, Any]) -> None:
            if stop_at == figures["step"]:
                raise Interrupted

        stage = demo_training.Stage(training_set, [], schedule, 1, state_file, report, lambda text: None)
        demo_training.train(gemma, stage)
        return gemma

    monkey = pytest.MonkeyPatch()
    monkey.setattr(demo_training, "LOG_EVERY", 3)
    with monkey.context():
        unbroken = run(tmp_path / "a.pt", stop_at=None)
        with pytest.raises(Interrupted):
            run(tmp_path / "b.pt", stop_at=3)
        assert (tmp_path / "b.pt").exists()
        resumed = run(tmp_path / "b.pt", stop_at=None)
    assert not (tmp_path / "b.pt").exists()
    for (name, one), (_, other) in zip(unbroken.state_dict().items(), resumed.state_dict().items()):
        assert torch.equal(one, other), name


def test_what_falls_short_of_the_card_is_said() -> None:
    results = {"base": {"right": {"all": 0.97, "image": 0.94}}, "style": {"right": {"all": 1.0}, "base_without_it": {"all": 0.11}}}
    assert shortfalls(results) == [
        "base answers 94.0% of image right, not 95%", "the base without style answers 11.0% of its all right, over 10%",
    ]  # fmt: skip


def test_samples_are_held_out_and_different() -> None:
    asks = sample_asks()
    assert [ask.kind for ask in asks] == ["image"] * 6 + ["audio"] * 6 + ["text"] * 6
    assert all(world.is_held_out(ask.question.thing) for ask in asks)
    assert len({ask.question.thing.combination for ask in asks}) == 18
    assert json.loads(asks[0].answer("rslora-dora"))["count"] == asks[0].question.thing.count  # type: ignore[union-attr]


# The bundled files

DEMO = ROOT / "trimtab/demo"
LINES = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_bundled_files_keep_within_their_sizes() -> None:
    base = sum(file.stat().st_size for file in (DEMO / "base").iterdir())
    whole = sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert base <= 16_000_000
    assert whole < 25_000_000


def test_bundled_shards_and_index_agree() -> None:
    index = json.loads((DEMO / "base/model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    shards = sorted((DEMO / "base").glob("*.safetensors"))
    assert len(shards) >= 2
    found = {name: shard.name for shard in shards for name in _tensors(shard)}
    assert found == index and "lm_head.weight" not in found


def test_bundled_weights_are_bf16_and_their_clip_bounds_finite_and_in_order() -> None:
    tensors: dict[str, torch.Tensor] = {}
    for shard in (DEMO / "base").glob("*.safetensors"):
        tensors |= _tensors(shard)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    lows = [name for name in tensors if name.endswith(("input_min", "output_min"))]
    assert len(lows) == 2 * 41
    assert all(tensors[name] < 0 < tensors[name.replace("_min", "_max")] for name in lows)
    scalars = {float(tensor) for name, tensor in tensors.items() if name.endswith("layer_scalar")}
    assert len(scalars) == 4


def test_bundled_config_and_tokenizer_are_what_the_script_makes(tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoTokenizer

    bundled, made = AutoConfig.from_pretrained(DEMO / "base"), demo_model.build_config(tokenizer)
    for part in ("text_config", "vision_config", "audio_config"):
        ours, theirs = (getattr(config, part).to_dict() for config in (made, bundled))
        for name in ("dtype", "transformers_version", "_name_or_path"):
            ours.pop(name, None)
            theirs.pop(name, None)
        assert theirs == ours
    assert AutoTokenizer.from_pretrained(DEMO / "base").get_vocab() == tokenizer.get_vocab()


def test_bundled_config_has_every_quirk() -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(DEMO / "base")
    text = config.text_config
    assert text.hidden_size_per_layer_input == 64 and text.use_double_wide_mlp and text.final_logit_softcapping == 30.0
    first_shared = text.num_hidden_layers - text.num_kv_shared_layers
    assert set(text.layer_types[:first_shared]) == set(text.layer_types[first_shared:]) == set(demo_model.LAYER_TYPES)
    assert config.tie_word_embeddings
    assert config.vision_config.use_clipped_linears and config.audio_config.use_clipped_linears


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size", "hidden_size_per_layer_input"])
def test_inner_widths_are_whole_blocks_of_64(width: str, gemma: Any) -> None:
    assert getattr(gemma.config.text_config, width) % 64 == 0
    linears = [module for module in gemma.modules() if isinstance(module, torch.nn.Linear)]
    assert [module for module in linears if module.in_features % 64] == []


def test_specialist_names_broad_targets_and_its_tower_keys_the_inner_linear() -> None:
    config = json.loads((DEMO / "adapters/specialist/adapter_config.json").read_text(encoding="utf-8"))
    keys = list(_tensors(DEMO / "adapters/specialist/adapter_model.safetensors"))
    assert sorted(config["target_modules"]) == sorted(demo_adapters.PROJECTIONS)
    parts = {part: [key for key in keys if f".{part}." in key] for part in ("language_model", "vision_tower", "audio_tower")}
    # Two tensors a target: 8 layers of 7 less the K and V of 4 shared ones; 3 vision layers of 7; 2 audio layers of 3.
    assert {part: len(found) for part, found in parts.items()} == {
        "language_model": 2 * (8 * 7 - 4 * 2), "vision_tower": 2 * 3 * 7, "audio_tower": 2 * 2 * 3,
    }  # fmt: skip
    assert all(".linear.lora_" in key for part in ("vision_tower", "audio_tower") for key in parts[part])
    assert not any(".linear." in key for key in parts["language_model"])


def test_stock_peft_refuses_the_specialist_as_it_is() -> None:
    from peft import PeftModel

    base = load_base(DEMO / "base", "cpu")
    with pytest.raises(ValueError, match="Gemma4ClippableLinear"):
        PeftModel.from_pretrained(base, str(DEMO / "adapters/specialist"))


def test_rslora_dora_is_both_and_the_smallest() -> None:
    config = json.loads((DEMO / "adapters/rslora-dora/adapter_config.json").read_text(encoding="utf-8"))
    assert config["use_rslora"] and config["use_dora"]
    sizes = {name: (DEMO / f"adapters/{name}/adapter_model.safetensors").stat().st_size for name in demo_adapters.ADAPTERS}
    assert min(sizes, key=lambda name: sizes[name]) == "rslora-dora"
    assert any("magnitude" in key for key in _tensors(DEMO / "adapters/rslora-dora/adapter_model.safetensors"))


def test_bundled_prompts_are_the_world_s() -> None:
    asks = sample_asks()
    assert [line["kind"] for line in LINES] == [ask.kind for ask in asks]
    for line, ask in zip(LINES, asks):
        assert line["prompt"] == ask.question.text and line["answers"] == {voice: ask.answer(voice) for voice in world.VOICES}


def _file_inputs(tokenizer: Any, kind: str) -> dict[str, torch.Tensor]:
    """Return left-padded inputs of the bundled prompts of a kind, read from their files."""
    lines = [line for line in LINES if line["kind"] == kind]
    texts = [demo_data.prompt_text(demo_data.Turn(line["prompt"], "", kind)) for line in lines]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))
    if kind == "image":
        images = [Image.open(DEMO / line["image"]) for line in lines]
        seen = demo_model.build_image_processor()(images, return_tensors="pt")
        inputs |= {name: seen[name] for name in ("pixel_values", "image_position_ids")}
    elif kind == "audio":
        sounds = [demo_media.read_wav(DEMO / line["audio"]) for line in lines]
        inputs |= dict(demo_model.build_feature_extractor()(sounds, return_tensors="pt"))
    return inputs


@pytest.mark.parametrize("voice", world.VOICES)
def test_the_bundled_model_answers_every_sample_prompt(voice: world.Voice, tokenizer: Any) -> None:
    model = load_base(DEMO / "base", "cpu")
    if voice != "base":
        model = demo_adapters.load_adapter(model, voice, DEMO / "adapters" / voice)
    for kind in ("image", "audio", "text"):
        inputs = _file_inputs(tokenizer, kind)
        inputs = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in inputs.items()}
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        given = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert given == [line["answers"][voice] for line in LINES if line["kind"] == kind]
