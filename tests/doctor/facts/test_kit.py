"""What probes build with does what it says: checkpoints, the imitated GPU, adapters, evidence without a machine's paths."""

import importlib
import logging
import warnings
from pathlib import Path

import pytest
import torch

from tests.raised import raised
from trimtab.doctor.facts import probe_kit, tiny
from trimtab.doctor.facts.bug import FIXED, PRESENT, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, LLAMA_SPLIT, TOWERS_OFF, Kit

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return Kit(tmp_path_factory.mktemp("kit"))


# Packages -------------------------------------------------------------------------------------------------------------


def test_version_of_what_is_not_installed_is_none(kit):
    assert kit.version("nowhere-to-be-found") is None and not kit.has("nowhere-to-be-found")
    assert kit.version("torch") == importlib.metadata.version("torch") and kit.has("torch")


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_tiny_checkpoint_loads_and_answers(kit, name):
    with probe_kit.quiet() as said:
        logits = kit.forward(kit.load(kit.checkpoint(name)))
    assert logits.shape == (8, tiny.VOCABULARY) and logits.dtype == torch.float32
    assert 0.05 < float(logits.std()) < 5  # neither silent nor blown up
    assert not [line for line in said if "MISSING" in line or "UNEXPECTED" in line]


@pytest.mark.parametrize("kind", ["text", "image", "audio"])
def test_gemma4_reads_sees_and_hears(kit, kind):
    path = kit.checkpoint()
    assert kit.inputs(path, kind).keys() == kit.inputs(kit.load(path), kind).keys()
    assert torch.isfinite(kit.forward(kit.load(path), kind)).all()


def test_kind_that_a_model_does_not_take_is_refused(kit):
    with pytest.raises(ValueError, match="llama takes no audio"):
        kit.inputs(kit.checkpoint("llama"), "audio")


def test_checkpoint_is_written_once_for_each_variant(kit):
    first = kit.checkpoint("llama")
    written = (first / "model.safetensors").stat().st_mtime_ns
    wide = kit.checkpoint("llama", intermediate_size=192)
    assert kit.checkpoint("llama") == first != wide and (first / "model.safetensors").stat().st_mtime_ns == written
    assert kit.load(wide).config.intermediate_size == 192


@pytest.mark.parametrize(
    "quant, expected", [("none", (0, 0, 15)), ("nf4", (14, 0, 1)), ("nf4-dq", (14, 0, 1)), ("int8", (0, 14, 1))]
)
def test_quant_is_what_is_loaded(kit, quant, expected):
    with probe_kit.quiet():
        model = kit.load(kit.checkpoint("llama"), quant=quant, device_map={"": 0})
    assert tuple(probe_kit.quantized(model).values()) == expected
    if quant.startswith("nf4"):
        state = model.model.layers[0].mlp.up_proj.weight.quant_state
        assert state.nested == (quant == "nf4-dq") and state.quant_type == "nf4"


def test_split_model_offloads_what_the_map_says_and_answers_the_same(kit):
    with probe_kit.quiet():
        split = kit.load(kit.checkpoint(), device_map=TOWERS_OFF)
    assert split.model.vision_tower.encoder.layers[0].mlp.up_proj.linear.weight.device.type == "meta"
    assert split.model.language_model.layers[0].mlp.up_proj.weight.device == CPU
    # The same weights and the same CPU kernels: offload changes no bit.
    assert torch.equal(kit.forward(split, "image"), kit.forward(kit.load(kit.checkpoint()), "image"))


def test_disk_map_offloads_to_the_kit_folder(kit):
    with probe_kit.quiet():
        split = kit.load(kit.checkpoint("llama"), device_map={**LLAMA_SPLIT, "model.layers.1": "disk"})
    assert split.hf_device_map["model.layers.1"] == "disk" and split.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(kit.forward(split), kit.forward(kit.load(kit.checkpoint("llama"))))


def test_map_numbers_become_the_imitated_gpu():
    assert probe_kit.on_cpu({"a": 0, "b": "cpu"}) == {"a": CPU, "b": "cpu"}
    assert probe_kit.on_cpu({"a": 0, "b": "disk"}) == {"a": "cpu", "b": "disk"}
    assert probe_kit.on_cpu({"a": 0, "b": "cpu", "c": "disk"}) == {"a": CPU, "b": "cpu", "c": "disk"}
    assert probe_kit.on_cpu("auto") == "auto" and probe_kit.on_cpu(None) is None


def test_names_behind_peft_are_those_of_the_wrapped_model(kit):
    base = kit.checkpoint("llama")
    model = kit.peft(kit.load(base), kit.adapter(base, targets=["q_proj"]))
    assert set(probe_kit.behind_peft(LLAMA_SPLIT)) <= {path for path, _ in model.named_modules()}


def test_4bit_weights_are_not_repacked_unless_asked(kit):
    with probe_kit.quiet():
        models = [kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": 0}, repack=on) for on in (False, True)]
    layers = [model.model.layers[0].mlp.up_proj for model in models]
    assert layers[0].support_avx512bf16_for_cpu is False
    assert layers[1].support_avx512bf16_for_cpu == type(layers[1])(64, 64).support_avx512bf16_for_cpu


def test_unmark_takes_the_mark_off_every_parameter(kit):
    with probe_kit.quiet():
        model = kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": 0})
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    probe_kit.unmark(model)
    assert not [name for name, parameter in model.named_parameters() if hasattr(parameter, "_is_hf_initialized")]


# Adapters -------------------------------------------------------------------------------------------------------------


def test_adapter_reaches_every_part_and_changes_the_answer(kit):
    base = kit.checkpoint()
    with probe_kit.quiet():
        adapter = kit.adapter(base, targets=EVERYWHERE)
        model = kit.peft(kit.load(base), adapter)
    parts = {name.split(".")[3] for name, _ in model.named_parameters() if "lora_A" in name}
    assert parts == {"language_model", "vision_tower", "audio_tower"}
    for kind in ("text", "image", "audio"):
        assert float((kit.forward(model, kind) - kit.forward(kit.load(base), kind)).abs().max()) > 0.1


def test_adapter_is_saved_once_for_each_configuration(kit):
    base = kit.checkpoint("llama")
    first = kit.adapter(base, targets=["q_proj"])
    assert kit.adapter(base, targets=["q_proj"]) == first != kit.adapter(base, targets=["q_proj"], rank=2)
    assert first != kit.adapter(base, targets=["q_proj"], use_rslora=True)


# What is heard --------------------------------------------------------------------------------------------------------


def test_quiet_collects_warnings_and_log_lines_and_puts_back(capfd):
    import transformers

    logger = logging.getLogger("transformers")
    before = (logger.handlers[:], logging.getLogger().handlers[:])
    with probe_kit.quiet() as said:
        warnings.warn("a warning", stacklevel=1)
        transformers.utils.logging.get_logger("transformers.modeling_utils").warning("a line")
        logging.getLogger("accelerate.big_modeling").warning("another")
    assert [*said] == ["a warning", "a line", "another"]
    assert (logger.handlers, logging.getLogger().handlers) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("told", "heard"), [((), []), (("accelerate",), ["does not fit"])])
def test_info_lines_are_heard_of_the_libraries_that_are_named(told, heard):
    with probe_kit.quiet(*told) as said:
        for library in ("accelerate.big_modeling", "peft.tuners"):
            logging.getLogger(library).info("does not fit")
    assert said.log_lines == heard and said.warnings == []


def test_what_transformers_says_once_is_heard_each_time():
    import transformers

    logger = transformers.utils.logging.get_logger("transformers.modeling_utils")
    heard = []
    for _ in range(2):
        with probe_kit.quiet() as said:
            logger.warning_once("only once")
        heard.append([*said])
    assert heard == [["only once"], ["only once"]]


# Where an error came from ---------------------------------------------------------------------------------------------


def test_frames_name_libraries_and_files_from_the_package_on(kit):
    error = raised(OSError, kit.load, kit.folder / "empty")
    frames = probe_kit.frames(error)
    assert frames and {frame["library"] for frame in frames} == {"transformers"}
    assert all(frame["file"].startswith("transformers/") and frame["line"] > 0 for frame in frames)
    last = frames[-1]
    assert probe_kit.failure(error).endswith(f" at {last['file']}:{last['line']} {last['function']}")


def test_failure_of_an_error_without_text_or_library_says_so():
    try:
        raise AssertionError
    except AssertionError as error:
        assert probe_kit.failure(error) == "AssertionError: (no text)"


@pytest.mark.parametrize("file, expected", [
    ("/home/peft/env/lib/python3.11/site-packages/peft/peft_model.py", "peft/peft_model.py"),
    ("/home/peft/src/peft/peft_model.py", "peft/peft_model.py"), ("/opt/src/peft/peft_model.py", "peft/peft_model.py"),
    ("/opt/elsewhere/thing.py", "thing.py"),
])  # fmt: skip
def test_file_of_a_frame_never_shows_what_lies_before_the_package(file, expected):
    assert probe_kit.from_package(file, "peft") == expected


def test_installed_source_points_at_the_line():
    file, line = probe_kit.installed_source("peft.peft_model", "def load_adapter(")
    assert file == "peft/peft_model.py"
    text = Path(importlib.import_module("peft.peft_model").__file__).read_text(encoding="utf-8").splitlines()
    assert "def load_adapter(" in text[line - 1]


@pytest.mark.parametrize("module", ["peft.peft_model", "peft.no_such_module", "no_such_package.module"])
def test_source_that_is_not_there_is_none(module):
    assert probe_kit.installed_source(module, "not written anywhere in it") is None


@pytest.mark.parametrize(("kind", "words", "is_sign"), [
    (ValueError, (), True), (ValueError, ("other", "wide"), True), ((KeyError, ValueError), ("wide",), True),
    (ValueError, ("narrow",), False), (KeyError, (), False),
])  # fmt: skip
def test_an_error_of_its_kind_and_words_is_the_bug_and_no_other(kind, words, is_sign):
    def refuse():
        raise ValueError("too wide")

    if is_sign:
        fault = probe_kit.error_of(refuse, kind, *words)
        assert fault == "ValueError: too wide" and probe_kit.seen(fault, "gone") == Seen(PRESENT, fault)
    else:
        with pytest.raises(ValueError, match="too wide"):
            probe_kit.error_of(refuse, kind, *words)
    assert probe_kit.seen(probe_kit.error_of(int, kind, *words), "gone") == Seen(FIXED, "gone")
