"""How does the stock stack load the model of a case: the map, the imitated GPU, the memory pressure, the placement?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.cases.cases import Case, Parts, device_map, find_parts, skip_modules
from trimtab.stock import load

ROOMY_BYTES = 64 * 2**30
HOST_BYTES = 256 * 2**30
# With less, cuBLAS' workspace does not fit the card, and a forward pass would fail for another reason than the case's.
SMALLEST_FREE_BYTES = 512 * 2**20
GRAIN_BYTES = 2 * 2**20  # granularity of the driver's allocations


class Card:
    """The execution device of a run: a real GPU, or the CPU that imitates one.

    main: the device for a 0 in a map. total_bytes: of the imitated card; None on a GPU. accelerate compares devices by value:
    `torch.device("cpu")` imitates the GPU, the string "cpu" is offload. Patched are the free memory (`get_max_memory`,
    `torch.cuda.mem_get_info`), and that safetensors may read onto it.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.is_gpu = device != "cpu"
        self.main: Any = 0 if self.is_gpu else torch.device("cpu")
        self.device = torch.device("cuda:0" if self.is_gpu else "cpu")
        self.total_bytes = ROOMY_BYTES
        self.used_bytes = 0
        self.ballast: Any = None
        self.load_peak_bytes = 0
        if not self.is_gpu:
            _imitate(self)

    @property
    def name(self) -> str:
        import torch

        return torch.cuda.get_device_name(0) if self.is_gpu else "CPU (the GPU is imitated)"

    def place(self, placement: Mapping[str, Any] | str) -> Any:
        """Return a map for this card: 0 becomes the device that imitates the GPU."""
        if isinstance(placement, str):
            return placement
        return {key: self.main if place == 0 else place for key, place in placement.items()}

    def press(self, model: Any, share: float | None) -> str | None:
        """Fill the card as if the loaded model used this share of it. Returns a description."""
        self.used_bytes = sum(tensor.nbytes for tensor in model.parameters() if tensor.device.type == self.device.type)
        if share is None:
            return None
        free = int(self.used_bytes * (1 - share) / share)
        if not self.is_gpu:
            self.total_bytes = self.used_bytes + free
            return f"imitated card of {self.total_bytes} bytes, {free} of them free after the base"
        if free < SMALLEST_FREE_BYTES:
            _tell_accelerate(lambda: {0: free, "cpu": HOST_BYTES})
            return f"too small to fill: accelerate sees {free} bytes are free"
        import torch

        self.load_peak_bytes = torch.cuda.max_memory_allocated(0)
        torch.cuda.empty_cache()
        ballast_bytes = (torch.cuda.mem_get_info(0)[0] - free) // GRAIN_BYTES * GRAIN_BYTES
        self.ballast = torch.empty(max(ballast_bytes, 0), dtype=torch.uint8, device="cuda:0")
        torch.cuda.reset_peak_memory_stats(0)
        return f"ballast of {ballast_bytes} bytes, {torch.cuda.mem_get_info(0)[0]} free after it"

    def memory(self) -> dict[str, int | None]:
        """Return the GPU's memory figures; only None on the CPU. The ballast is not counted."""
        names = ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_peak_bytes", "gpu_free_bytes", "gpu_total_bytes")
        if not self.is_gpu:
            return dict.fromkeys(names)
        import torch

        ballast = 0 if self.ballast is None else self.ballast.nbytes
        free, total = torch.cuda.mem_get_info(0)
        counts = (
            torch.cuda.memory_allocated(0) - ballast, torch.cuda.memory_reserved(0) - ballast,
            max(self.load_peak_bytes, torch.cuda.max_memory_allocated(0) - ballast), free, total,
        )  # fmt: skip
        return dict(zip(names, counts, strict=True))


def _imitate(card: Card) -> None:
    import accelerate.utils.offload

    # 0.9: the share that get_balanced_memory leaves of a numbered card; it does not recognize the imitated card as one.
    _tell_accelerate(lambda: {card.main: int(0.9 * (card.total_bytes - card.used_bytes)), "cpu": HOST_BYTES}, main=card.main)
    plain_open = accelerate.utils.offload.safe_open

    def safe_open(*args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return plain_open(*args, device=str(device), **kwargs)

    accelerate.utils.offload.safe_open = safe_open


def _tell_accelerate(read: Callable[[], dict[Any, int]], *, main: Any = 0) -> None:
    """Make accelerate read the free memory from `read`. A user's max_memory is kept, with 0 as the main device."""
    import accelerate.utils.modeling
    import transformers.integrations.accelerate as of_transformers

    def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Any, int]:
        if max_memory is None:
            return read()
        return {main if key == 0 else key: _as_bytes(value) for key, value in max_memory.items()}

    accelerate.utils.modeling.get_max_memory = get_max_memory
    of_transformers.accelerate_max_memory = get_max_memory


def _as_bytes(value: Any) -> int:
    from accelerate.utils.modeling import convert_file_size_to_int

    return int(convert_file_size_to_int(value)) if isinstance(value, str) else int(value)


def empty_model(folder: Path) -> Any:
    """Return the model without memory."""
    import torch

    kind, config = load.model_class(folder)
    with torch.device("meta"):
        return kind._from_config(config, dtype=torch.bfloat16)


def parts_of(model: Any) -> Parts:
    """Return the parts that a map can name."""
    return find_parts([path for path, _ in model.named_modules()])


def load_arguments(case: Case, parts: Parts, empty: Any, work: Path) -> dict[str, Any]:
    """Return the arguments of from_pretrained as JSON values: maps with 0 for the GPU, the quantization as its fields."""
    arguments: dict[str, Any] = {"device_map": device_map(case.base_map, parts), **case.load}
    if case.quant != "none":
        four = case.quant != "int8"
        arguments["quantization_config"] = {
            **({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_use_double_quant": case.quant == "nf4-dq"} if four else {"load_in_8bit": True}),
            "llm_int8_enable_fp32_cpu_offload": True,
            **({"llm_int8_skip_modules": skip_modules(parts)} if case.keep else {}),
        }  # fmt: skip
    if case.gpu_share is not None:
        arguments["max_memory"] = {0: int(case.gpu_share * _quantized_bytes(empty, case.quant)), "cpu": HOST_BYTES}
    if "disk" in str(arguments["device_map"]) or "offload_folder" in arguments:
        arguments["offload_folder"] = str(work / "offload")
    return arguments


def _quantized_bytes(empty: Any, quant: str) -> int:
    import torch

    share = {"none": 1.0, "int8": 0.5}.get(quant, 0.27)
    linear = sum(m.weight.numel() * 2 for p, m in empty.named_modules() if type(m) is torch.nn.Linear and p != "lm_head")
    return int(sum(tensor.numel() * 2 for tensor in empty.parameters()) - linear * (1 - share))


def load_base(folder: Path, arguments: Mapping[str, Any], card: Card) -> Any:
    """Return the stock model of JSON arguments, in eval mode, bf16."""
    import torch

    options = dict(arguments)
    options["device_map"] = card.place(options["device_map"])
    if "quantization_config" in options:
        options["quantization_config"] = load.bitsandbytes(**options["quantization_config"])
    return load.load_base(folder, dtype=torch.bfloat16, **options)


def offloaded(model: Any, card: Card) -> dict[str, bool]:
    """Return for every weight of the base whether it is off the GPU, by its path in the base."""
    modules = {}
    hooked = {path for path, module in model.named_modules() if _takes_away(getattr(module, "_hf_hook", None))}
    for path, tensor in model.named_parameters():
        if "lora_" in path or "modules_to_save" in path:
            continue
        own = path.removeprefix("base_model.model.").replace(".base_layer", "")
        away = tensor.device.type == "meta" or (card.is_gpu and tensor.device.type == "cpu")
        modules[own] = away or path.rpartition(".")[0] in hooked
    return modules


def _takes_away(hook: Any) -> bool:
    return any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ())))


def map_json(device_map: Mapping[str, Any] | None) -> dict[str, int | str] | None:
    """Return a model's hf_device_map as JSON values: 0 for the GPU, also for the imitated one."""
    import torch

    if device_map is None:
        return None
    return {
        path: place if isinstance(place, int) else (place.index or 0 if isinstance(place, torch.device) else str(place))
        for path, place in device_map.items()
    }


def sequential_hooks(model: Any) -> int:
    """Return how many modules have two hooks in a row (from a catch-all entry)."""
    return sum(type(getattr(module, "_hf_hook", None)).__name__ == "SequentialHook" for module in model.modules())
