"""Which modules transformers renamed between two releases, and whether the newer one's table leads to each of them.

    python tools/former_names.py list OUT.json              # with PYTHONPATH at the older release
    python tools/former_names.py compare OUT.json RENAMED.json   # with the newer release and this package

`list` builds every language model of the release without data, two layers deep, and writes its module paths by model class.
`compare` builds the classes that both releases have, applies the renames that `engine/loader/transformers_model.py` reads, and
writes the former paths that lead to another name. It ends with code 1 if a former path of a layer leads to none.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

transformers.logging.set_verbosity_error()
_LISTS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
_DEPTHS = (
    "num_hidden_layers", "depth", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "n_layer",
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
)  # fmt: skip


def classes() -> list[str]:
    """Return the names of the language models that this release loads automatically."""
    names = set()
    for mapping in _LISTS:
        for value in getattr(modeling_auto, mapping, {}).values():
            names.update([value] if isinstance(value, str) else value)
    return sorted(names)


def build(name: str) -> Any:
    """Return the model of a class with its default config, two layers deep, without data; None if it cannot be built so."""
    try:
        model_class = getattr(transformers, name)
        config = model_class.config_class()
        for part in [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]:
            for field in _DEPTHS:
                if isinstance(getattr(part, field, None), int):
                    setattr(part, field, 2)
            for field in ("layer_types", "mlp_layer_types", "layers_block_type"):
                if isinstance(getattr(part, field, None), list):
                    setattr(part, field, getattr(part, field)[:2])
        with torch.device("meta"):
            return model_class(config)
    except Exception:
        return None


def paths(model: Any) -> dict[str, int]:
    """Return path -> weight dimensions of the modules that LoRA can change, a layer for all of a list."""
    return {
        path: module.weight.dim()
        for path, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Embedding", "Conv1D")
        and not any(int(number) > 1 for number in re.findall(r"\.(\d+)\.", path))
    }


def main() -> None:
    """Do what the first argument says."""
    command, out = sys.argv[1], Path(sys.argv[2])
    if command == "list":
        built = {name: build(name) for name in classes()}
        found = {name: {"paths": sorted(paths(model))} for name, model in built.items() if model is not None}
        out.write_text(json.dumps({"transformers": transformers.__version__, "models": found}))
        print(f"{len(found)} of {len(built)} classes of {transformers.__version__}")
        return
    sys.exit(compare(json.loads(out.read_text()), Path(sys.argv[3])))


def compare(former: dict[str, Any], out: Path) -> int:
    """Write the renamed paths of each class and print those that lead to no module; return 1 if there are some."""
    from trimtab.checkpoint.names import renamed
    from trimtab.engine.loader.transformers_model import read_renames

    known = set(classes())
    written, lost, built = {}, 0, 0
    for name, entry in sorted(former["models"].items()):
        model = build(name) if name in known else None
        if model is None:
            continue
        built += 1
        have = dict(model.named_modules())
        renames = read_renames(model)
        moved = {path: renamed(path, renames) for path in entry["paths"] if path not in have}
        gone = [path for path, new in moved.items() if new not in have]
        if moved:
            written[name] = {path: new for path, new in moved.items() if new in have}
            print(f"{name}: {len(moved) - len(gone)} renamed, {len(gone)} lead to no module")
        for path in gone[:12]:
            print(f"    {path} -> {moved[path]}")
        lost += len(gone)
    out.write_text(json.dumps({"from": former["transformers"], "to": transformers.__version__, "models": written}, indent=1))
    print(f"{built} classes of both releases, {len(written)} with renames, {lost} paths that lead to no module")
    return 1 if lost else 0


if __name__ == "__main__":
    main()
