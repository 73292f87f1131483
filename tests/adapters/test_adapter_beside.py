"""Weights beside an adapter: what changes the output is refused in every way in, what training leaves there is no alarm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers

import trimtab
from tests import ROOT, pico
from tests.raised import raised
from trimtab import bridge
from trimtab.adapters import file
from trimtab.adapters.file import HARMLESS, KNOWN, TOLD, read_adapter, weights_beside
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.cli.main import main
from trimtab.errors import AdapterError
from trimtab.merging import merge
from trimtab.serve.adapters.adapter_cache import HeldAdapters
from trimtab.verification.verify import check_adapters

# Trained weights, and who writes them.
TRAINED = (
    "vit.safetensors",  # ms-swift
    "non_lora_trainables.bin", "non_lora_state_dict.bin", "mm_projector.bin",  # LLaVA, Qwen-VL finetune scripts
    "projector.pt", "aligner.safetensors", "multi_modal_projector.safetensors", "mlp1.bin", "resampler.bin",
    "new_embeddings.safetensors", "embed_tokens.pt", "learned_embeds.safetensors", "lm_head.pt", "score.safetensors",
    "vision_tower.bin", "audio_encoder.safetensors", "adapter_model-00002-of-00002.safetensors", "modules_to_save.bin",
    "extra.safetensors", "trainable.ckpt", "STATE.PTH", "mm_projector.npz", "mm_projector.pth.tar", "non_lora_state_dict.h5",
    "visual/model.safetensors", "vision/model.safetensors", "mm/mm_projector.bin", "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "projector/model.safetensors", "visual_encoder/pytorch_model.bin",
)  # fmt: skip
# What trainers leave in a folder of an adapter that changes nothing.
HARMLESS_FILES = (
    "optimizer.pt", "optimizer.bin", "optimizer_0.pt", "scheduler.pt", "scheduler.bin", "scaler.pt", "rng_state.pth",
    "rng_state_0.pth", "random_states_0.pkl", "custom_checkpoint_0.pkl", "training_args.bin",
    "sampler.bin",  # transformers, accelerate
    "adapter_model.pt", "adapter_0.pt", "recipe_state.pt", "lr_scheduler.pt", "grad_scaler.pt", "rng-state.pt",
    "finetuning_args.bin", "ggml-adapter-model-f16.bin",
    "trainer_state.json", "training_state.pt", "dataloader.pt", "adapter_model.bin", "README.md", "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json",
    "processor_config.json", "vocab.json", "merges.txt", "config.json", "generation_config.json", "trainer_log.jsonl",
    "all_results.json", "training_loss.png", "args.json", "additional_config.json",  # LLaMA-Factory, ms-swift
    "zero_to_fp32.py", "latest", "global_step500/mp_rank_00_model_states.pt",
    "global_step500/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/__0_0.distcp",  # DeepSpeed, FSDP
    "optimizer_0/__0_0.distcp", "checkpoint-500/adapter_model.safetensors", "checkpoint-500/optimizer.pt",
    "runs/events.out.tfevents",
    "1_Pooling/config.json", "modules.json", "sentence_bert_config.json", "automodel_peft_config.json", "unsloth.Q8_0.gguf",
    "ggml-adapter-model.bin", "pissa_init/adapter_model.safetensors", "ref/adapter_model.safetensors", ".gitattributes",
)  # fmt: skip
TOLD_FILES = (
    "value_head.safetensors", "value_head.bin", "v_head.bin", "pytorch_model.bin", "model.safetensors",
    "model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin", "consolidated.safetensors", "consolidated.00.pth",
    "w.npz", "labels.npy", "label_encoder.pkl",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("beside")
    base = pico.build("llama", folder / "base", dtype="float32")
    return base, pico.adapter(base, folder / "adapter")


@pytest.fixture
def adapter(made: tuple[Path, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for one in made[1].iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    return folder


def put(folder: Path, name: str) -> None:
    weights = folder / name
    weights.parent.mkdir(exist_ok=True)
    if not weights.exists():
        weights.write_bytes(b"\x80\x04not read")  # a pickle's first bytes: nothing may open it


@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_beside_an_adapter_are_refused_by_name(name: str, adapter: Path) -> None:
    put(adapter, name)
    (problem,) = raised(AdapterError, read_adapter, adapter).problems
    assert problem.startswith(f"{name}: weights next to the adapter (") and "name that folder as the model" in problem


def test_what_training_leaves_is_no_alarm(adapter: Path) -> None:
    for name in HARMLESS_FILES:
        put(adapter, name)
    found = read_adapter(adapter)
    assert found.notes == () and len(found.tensors) > 10


@pytest.mark.parametrize("name", TOLD_FILES)
def test_weights_that_no_answer_uses_are_told(name: str, adapter: Path) -> None:
    put(adapter, name)
    (note,) = read_adapter(adapter).notes
    assert note.startswith(f"{name} is not used: ")


def test_every_entry_of_the_tables_has_a_reason_and_few_overlap() -> None:
    for table in (HARMLESS, TOLD, KNOWN):
        assert all(len(why) > 8 for why in table.values())
    assert weights_beside(ROOT / "tests" / "data") == ([], [])


def test_all_files_are_named_at_once_and_many_are_counted(adapter: Path) -> None:
    for number in range(30):
        put(adapter, f"part{number:02}.safetensors")
    put(adapter, "optimizer.pt")
    error = raised(AdapterError, read_adapter, adapter)
    assert len(error.problems) == 21 and error.problems[0].startswith("part00.safetensors: ")
    assert error.problems[-1].startswith("10 more files")


def test_no_way_in_ignores_them(made: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    base, good = made
    put(adapter, "vit.safetensors")
    plan = trimtab.plan(base, adapters={"good": good}, quant="none", context=64, device="cpu")
    with trimtab.load(plan) as model:
        ways = (
            lambda: model.load_adapter("a", adapter), lambda: model.read_adapter(adapter),
            lambda: trimtab.plan(base, adapters={"a": adapter}, quant="none", context=64, device="cpu"),
            lambda: trimtab.inspect(adapter), lambda: trimtab.inspect(adapter, model=base),
            lambda: merge(base, tmp_path / "out", adapters={"a": adapter}),
            lambda: trimtab.verify(base, adapters={"a": adapter}, against="base"),
        )  # fmt: skip
        for way in ways:
            with pytest.raises(AdapterError, match=r"vit\.safetensors"):
                way()
    assert not (tmp_path / "out").exists()


def test_plan_and_inspect_say_what_is_not_used(made: tuple[Path, Path], adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(adapter, "value_head.safetensors")
    options = ["--device", "cpu", "--quant", "none", "--context", "64"]
    assert main(["plan", str(made[0]), "--adapter", f"a={adapter}", *options]) == 0
    assert "adapter a: value_head.safetensors is not used: " in capsys.readouterr().err
    assert main(["inspect", str(adapter), "--model", str(made[0])]) == 0
    assert "value_head.safetensors is not used" in capsys.readouterr().out


def test_every_way_to_load_tells_what_is_not_used(
    made: tuple[Path, Path], adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(adapter, "value_head.safetensors")
    same = Path(shutil.copytree(made[1], tmp_path / "same"))  # the same files, with another head beside them
    put(same, "v_head.bin")

    def told() -> list[str]:
        texts = [record.getMessage().partition(" is not used: ")[0] for record in caplog.records]
        caplog.clear()
        return texts

    plan = trimtab.plan(made[0], adapters={"a": adapter}, quant="none", context=64, device="cpu", gpu_memory="1GiB")
    assert told() == []
    with trimtab.load(plan) as model:
        assert told() == ["adapter a: value_head.safetensors"]
        model.unload_adapter("a")
        model.load_adapter("b", adapter)
        assert told() == ["adapter b: value_head.safetensors"]
        held = HeldAdapters(model)
        first = held.read(adapter, name="c")
        assert held.read(same, name="d") is first
        assert told() == ["adapter c: value_head.safetensors", "adapter d: v_head.bin"]
    check_adapters(read_checkpoint(str(made[0])), {"e": str(adapter)})
    assert told() == ["adapter e: value_head.safetensors"]


def test_one_look_at_a_folder_serves_whoever_reads_its_adapter(
    made: tuple[Path, Path], adapter: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(adapter, "value_head.safetensors")
    looks: list[Path] = []
    monkeypatch.setattr(file, "weights_beside", lambda folder: looks.append(folder) or weights_beside(folder))

    def seen() -> tuple[int, list[str]]:
        told = [record.getMessage().partition(" is not used: ")[0] for record in caplog.records]
        counted = (len(looks), told)
        looks.clear(), caplog.clear()
        return counted

    plan = trimtab.plan(made[0], quant="none", context=64, device="cpu")
    with trimtab.load(plan) as model:
        model.read_adapter(adapter)
        assert seen() == (1, [f"adapter {adapter}: value_head.safetensors"])
        model.read_adapter(adapter, name="a")
        assert seen() == (1, ["adapter a: value_head.safetensors"])
    check_adapters(read_checkpoint(str(made[0])), {"b": str(adapter)})
    assert seen() == (1, ["adapter b: value_head.safetensors"])
    base = transformers.AutoModelForCausalLM.from_pretrained(made[0])
    bridge.load_peft(base, adapter, adapter_name="c")
    assert seen() == (1, ["adapter c: value_head.safetensors"])
    read_adapter(adapter)  # a plan, whose command tells of it
    assert seen() == (1, [])


def test_a_copy_of_a_held_adapter_is_refused_for_what_lies_beside_it(made: tuple[Path, Path], adapter: Path) -> None:
    plan = trimtab.plan(made[0], adapters={"good": made[1]}, quant="none", context=64, device="cpu")
    with trimtab.load(plan) as model:
        held = HeldAdapters(model)
        good = held.read(made[1])
        put(adapter, "vit.safetensors")
        with pytest.raises(AdapterError, match=r"vit\.safetensors"):
            held.read(adapter, name="a")
        (adapter / "vit.safetensors").unlink()
        assert held.read(adapter, name="a") is good


def test_names_of_files_are_printable(made: tuple[Path, Path], adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(adapter, "\x1b[2J.npz")
    options = ["--device", "cpu", "--quant", "none", "--context", "64"]
    assert main(["plan", str(made[0]), "--adapter", f"a={adapter}", *options]) == 0
    assert "adapter a: \\x1b[2J.npz is not used: " in capsys.readouterr().err
