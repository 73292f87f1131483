"""Are Qwen3-VL's projector files read whole, and is every wrong one refused by name, within limits?"""

import json
from itertools import count

import pytest
import torch

from tests import gguf_files, gguf_towers, pico
from trimtab.checkpoint.folder import find_folder
from trimtab.errors import CheckpointError
from trimtab.gguf.header import read_gguf

LAYERS, WIDE = 2, pico.WIDTH


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return gguf_towers.qwen3vl(pico.built("qwen3_vl"), tmp_path_factory.mktemp("pair") / "pair")[0]


@pytest.fixture
def refused(pair, tmp_path):
    """Write one of the files again with other keys or tensors (None: without); return what is raised."""
    numbers = count()

    def tried(keys=None, tensors=None, file="mmproj-model.gguf"):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        for one in pair.iterdir():
            (folder / one.name).write_bytes(one.read_bytes())
        header, raw = read_gguf(folder / file), (folder / file).read_bytes()
        held = {
            name: (one.type_name, torch.frombuffer(bytearray(raw[one.start :][: one.nbytes]), dtype=torch.uint8), one.shape)
            for name, one in header.tensors.items()
        }  # fmt: skip
        made = {name: one for name, one in (header.keys | (keys or {})).items() if one is not None}
        parts = {name: one for name, one in (held | (tensors or {})).items() if one is not None}
        gguf_files.write(folder / file, made, parts)
        with pytest.raises(CheckpointError) as told:
            find_folder(folder)
        assert str(told.value.path).startswith(str(folder)) and told.value.hint
        return str(told.value), told.value

    return tried


def test_config_and_processor_are_the_files(pair):
    made = find_folder(pair)
    config = json.loads((made / "config.json").read_text())
    source = json.loads((pico.built("qwen3_vl") / "config.json").read_text())
    own, text = config.pop("vision_config"), config.pop("text_config")
    # What a config has in addition: how weights are drawn, and positions that transformers gives every such tower.
    rest = {"initializer_range", "rope_parameters", "dtype"}
    assert source["vision_config"] | own == source["vision_config"] and source["vision_config"].keys() - own.keys() <= rest
    assert text["rope_parameters"].pop("mrope_interleaved") is True
    same = source["text_config"].keys() & text.keys()
    assert {name: text[name] for name in same} == {name: source["text_config"][name] for name in same}
    assert {"hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "vocab_size"} <= same
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")
    assert {name: config[name] for name in ids} == {name: source[name] for name in ids}
    processor = json.loads((made / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        cut = {
            name: processor[part][name] for name in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
        }
        mean, std = ([torch.tensor(one).item() for one in cut.pop(name)] for name in ("image_mean", "image_std"))
        assert list(cut.values()) == [8, 2, 2]
        # The file's numbers are float32, as the processors compute with them.
        assert mean == torch.tensor([0.48145466, 0.4578275, 0.40821073]).tolist()
        assert std == torch.tensor([0.26862954, 0.26130258, 0.27577711]).tolist()


def test_every_key_is_needed_and_checked(pair, refused):
    may_lack = {
        "clip.has_vision_encoder", "clip.projector_type", "clip.vision.spatial_merge_size", "clip.vision.is_deepstack_layers",
    }  # fmt: skip
    keys = [name for name in read_gguf(pair / "mmproj-model.gguf").keys if name.startswith("clip.")]
    assert len(keys) == 15
    for name in keys:
        if name not in may_lack:
            assert f"has no {name}" in refused({name: None})[0]
        if name != "clip.projector_type":  # of another type: another model, or none
            assert name in refused({name: "text"})[0]
    for name, value, words in (
        ("clip.vision.block_count", 3, "is_deepstack_layers has 2 values for 3 layers"),
        ("clip.vision.block_count", 10**9, "block_count is 1000000000, 1 to 512 is read"),
        ("clip.vision.block_count", 0, "block_count is 0"),
        ("clip.vision.embedding_length", 2**40, "embedding_length is 1099511627776, 1 to"),
        ("clip.vision.embedding_length", 128, "has the shape"),
        ("clip.vision.feed_forward_length", 4, "has the shape"),
        ("clip.vision.attention.head_count", 3, "embedding_length is 64 for 3 heads"),
        ("clip.vision.attention.head_count", 32, "embedding_length is 64 for 32 heads"),
        ("clip.vision.patch_size", 16, "has the shape"),
        ("clip.vision.image_size", 2**31, "v.position_embd.weight"),
        ("clip.vision.image_size", 64, "v.position_embd.weight"),
        ("clip.vision.spatial_merge_size", 4, "has the shape"),
        ("clip.vision.projection_dim", 128, "projection_dim is 128, the model is 64 wide"),
        ("clip.vision.attention.layer_norm_epsilon", 1e-5, "layer_norm_epsilon is 1e-05, 1e-06 is read"),
        ("clip.vision.attention.layer_norm_epsilon", float("nan"), "layer_norm_epsilon is nan"),
        ("clip.vision.image_std", [0.5, 0.0, 0.5], "image_std is [0.5, 0.0, 0.5], three numbers are read"),
        ("clip.vision.image_mean", [0.5, 0.5], "image_mean is [0.5, 0.5], three numbers are read"),
        ("clip.vision.image_mean", [float("inf")] * 3, "image_mean is [inf"),
        ("clip.vision.image_min_pixels", 2**40, "image_min_pixels is 1099511627776, image_max_pixels 16777216"),
        ("clip.vision.is_deepstack_layers", [False, False], "feeds 0 layers of the model, whose file says 1"),
        ("clip.vision.is_deepstack_layers", [1, 0], "is_deepstack_layers has 2 values for 2 layers"),
        ("clip.vision.is_deepstack_layers", [], "is_deepstack_layers has 0 values"),
        ("clip.use_gelu", False, "use_gelu is False, True is read"),
        ("clip.use_silu", True, "use_silu is True, False is read"),
        ("clip.has_audio_encoder", True, "has_audio_encoder is True, False is read"),
        ("clip.vision.projector_type", "qwen2.5vl_merger", "is a projector of the type 'qwen2.5vl_merger'"),
        ("clip.vision.n_wa_pattern", 8, "keys whose meaning is not known here: clip.vision.n_wa_pattern = 8"),
    ):  # fmt: skip
        assert words in refused({name: value})[0], name


def test_the_models_keys_and_words_must_fit(refused):
    def told(**keys):
        return refused({name.replace("__", "."): one for name, one in keys.items()}, file="model.gguf")[0]

    assert "has no qwen3vl.rope.dimension_sections" in told(qwen3vl__rope__dimension_sections=None)
    assert "has no qwen3vl.n_deepstack_layers" in told(qwen3vl__n_deepstack_layers=None)
    assert "feeds 1 layers of the model, whose file says 2" in told(qwen3vl__n_deepstack_layers=2)
    for sections in ([4, 6, 7, 0], [4, 6, 6, 1], [16], [], [0, 8, 8, 0], ["4", "6", "6"]):
        assert "dimension_sections is" in told(qwen3vl__rope__dimension_sections=sections)
    tokens = [f"t{place}" for place in range(pico.VOCABULARY)]
    assert "its vocabulary has no <|image_pad|>" in told(tokenizer__ggml__tokens=tokens)
    assert "of the architecture 'qwen3', qwen3vl is read with it" in told(
        general__architecture="qwen3", **{
            f"qwen3__{name.replace('.', '__')}": one for name, one in {
                "context_length": 512, "embedding_length": WIDE, "feed_forward_length": 2 * WIDE, "block_count": 2,
                "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.key_length": pico.HEAD, "attention.value_length": pico.HEAD, "rope.freq_base": 1e4,
            }.items()
        }
    )  # fmt: skip


def test_every_tensor_is_needed_in_its_shape_and_a_type_that_is_read(pair, refused):
    header = read_gguf(pair / "mmproj-model.gguf")
    assert len(header.tensors) == 4 + 4 + 2 + 6 + 12 * LAYERS
    for name, tensor in header.tensors.items():
        assert f"lacks 1 of {len(header.tensors)} tensors: {name}" in refused(tensors={name: None})[0]
        shape = (tensor.shape[0] + 1, *tensor.shape[1:])
        words, error = refused(tensors={name: ("F32", torch.zeros(shape), shape)})
        assert f"has the shape {list(shape)}, {list(tensor.shape)} follows from its keys" in words and error.tensor_name == name
        if len(tensor.shape) == 1:  # flat values in a matrix of one row
            assert "has the shape" in refused(tensors={name: ("F32", torch.zeros(tensor.shape), (1, *tensor.shape))})[0]
    unknown = ("F32", torch.zeros(4), (4,))
    for name in (
        "v.pre_ln.weight",
        "v.blk.2.ln1.weight",
        "v.deepstack.1.norm.weight",
        "v.blk.0.attn_q.weight",
        "mm.1.weight",
        "a.b",
    ):
        assert f"meaning is not known here: {name}" in refused(tensors={name: unknown})[0]
    wide = torch.zeros(16, WIDE // 32 * 34, dtype=torch.uint8)
    words, error = refused(tensors={"v.position_embd.weight": ("Q8_0", wide, (16, WIDE))})
    assert "types that are not read (Q8_0): v.position_embd.weight" in words and "mmproj" in str(error.path)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        gone = torch.full((WIDE, 3, 8, 8), float("nan"))
        assert "not finite" in refused(tensors={name: ("F32", gone, tuple(gone.shape))})[0]


def test_both_frames_of_a_patch_stand_in_their_order(pair):
    from safetensors.torch import load_file

    found = load_file(find_folder(pair) / "small.safetensors")["model.visual.patch_embed.proj.weight"]
    truth = load_file(pico.built("qwen3_vl") / "model.safetensors")["model.visual.patch_embed.proj.weight"]
    assert not torch.equal(truth[:, :, 0], truth[:, :, 1]) and torch.equal(found, truth.half())


def test_a_tower_of_more_layers_than_its_file_has_is_refused(refused):
    """Of the most layers that are read, each of which feeds the model."""
    many = {"clip.vision.block_count": 512, "clip.vision.is_deepstack_layers": [True] * 512}
    assert "feeds 512 layers of the model, whose file says 1" in refused(many)[0]
    many["clip.vision.is_deepstack_layers"] = [True] + [False] * 511
    assert f"lacks {510 * 12} of" in refused(many)[0]


def test_one_of_several_projectors_is_not_chosen(pair, tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    for name, source in (
        ("a.gguf", "model.gguf"),
        ("mmproj-F16.gguf", "mmproj-model.gguf"),
        ("mmproj-F32.gguf", "mmproj-model.gguf"),
    ):
        (folder / name).write_bytes((pair / source).read_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 projectors \(mmproj\): mmproj-F16.gguf, mmproj-F32.gguf") as told:
        find_folder(folder)
    assert told.value.hint == "Leave one of them in the folder, or give a.gguf for text alone"
    assert find_folder(folder / "a.gguf").name == "a.gguf"


def test_a_damaged_projector_is_not_left_out(pair, tmp_path):
    """A folder whose projector cannot be read is no model without images."""
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "model.gguf").write_bytes((pair / "model.gguf").read_bytes())
    (folder / "mmproj-model.gguf").write_bytes((pair / "mmproj-model.gguf").read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"mmproj-model\.gguf, tensor .*ends at byte"):
        find_folder(folder)
