"""In how many ways is each thing done: a prompt run, a step run, a LoRA added? Tables of all ways, and of what looks like one.

    python tools/ways.py          the ways, as docs/architecture.md has them

A way is a class or a function with its own computation. Captured or not is no other way: `GraphCache` replays what a way computes.
A question's `mark` finds the code of its ways. tests/tools/test_rooms.py: all that it finds is in the table, and the reverse.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import rooms

# These look into other packages, or into models of theirs, and answer no request: searched where `is_everywhere`.
OTHERS = ("doctor/", "bridge/")


@dataclass(frozen=True)
class Ways:
    """The ways of one question. step, goal: how many there are to be. mark: of their code, as `ast.unparse` writes it, without
    docstrings. ways: "file:object" -> what it is. others: what the mark finds besides -> which way it is, or why it is none."""

    key: str
    question: str
    step: int
    goal: int
    mark: str
    ways: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)
    is_everywhere: bool = False

    def count(self, _: object = None) -> int:
        """Return how many ways there are."""
        return len(self.ways)

    def found(self) -> set[str]:
        """Return the functions, and the methods of classes, in which the mark is."""
        searched = (one for one in definitions() if self.is_everywhere or not one[0].startswith(OTHERS))
        return {name for name, text in searched if re.search(self.mark, text)}

    def unnamed(self) -> list[str]:
        """Return what the mark finds and no table names."""
        return sorted(one for one in self.found() if not any(_covers(name, one) for name in (*self.ways, *self.others)))

    def lost(self) -> list[str]:
        """Return what a table names and the mark does not find."""
        found = self.found()
        return sorted(name for name in (*self.ways, *self.others) if not any(_covers(name, one) for one in found))


def _covers(name: str, found: str) -> bool:
    return found == name or found.startswith((f"{name}.", f"{name}:", f"{name}/"))


@cache
def definitions() -> tuple[tuple[str, str], ...]:
    """Return ("file:function" or "file:Class.method", its code) of the package, and the rest of each file and class."""
    files = (file.relative_to(rooms.PACKAGE).as_posix() for file in sorted(rooms.PACKAGE.rglob("*.py")))
    return tuple(one for file in files for one in _definitions(file))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _rest(body: list[ast.stmt]) -> str:
    """Return the code of a file or a class but for functions, classes and texts."""
    texts = (one for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    left_out = {id(one) for one in texts}
    return "\n".join(
        ast.unparse(one) for one in body if id(one) not in left_out and not isinstance(one, (*_FUNCTIONS, ast.ClassDef))
    )


def _definitions(file: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse((rooms.PACKAGE / file).read_text(encoding="utf-8"))
    yield f"{file}:module", _rest(tree.body)
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        if isinstance(node, ast.ClassDef):
            yield f"{file}:{node.name}", _rest(node.body)
        for inner in inside:
            if isinstance(inner, _FUNCTIONS):
                yield f"{file}:{inner.name if inner is node else f'{node.name}.{inner.name}'}", _code(inner)  # type: ignore[union-attr]


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(node)


_STOCK = "transformers' own generation, where steps are not captured"
TABLE = (
    Ways(
        "prompt_ways", "a prompt runs", 5, 3,
        r"\b(hf_model|base_model|_?module|decoder)\((\*\*|inputs?_)|\bmodel\.generate\(|def forward\(self, number",
        {
            "engine/batch/generate.py:stock_generate": _STOCK,
            "engine/prefill/stock_pass.py:_computed": "transformers' modules: whole, or in chunks where none are captured",
            "engine/passes/chunk_forward.py:ChunkForward": "chunks of static shapes, also for embeddings; a pack has more rows",
            "engine/families/chunk.py:ChunkLayers": "its layers, from the kernels of a step",
            "engine/families/chunk.py:LastLayers": "its layers that see the last token alone",
        },
        {
            "engine/decode/decode_step.py:DecodeStep._modules": "a step",
            "engine/decode/decode_step.py:_wrong_rows": "a check", "engine/families/check.py:_wrong_layers": "a check",
            "engine/passes/media_embeddings.py:media_of": "stops before the decoder: the towers alone",
            "verification/routes/teacher_forcing.py": "measures a model, also stock's",
        },
    ),
    Ways(
        "step_ways", "a step runs", 4, 3,
        r"hf_model\(input_ids=self\.tokens|\._modules\(|_short_ops\.step\(|self\._fused\(|def __call__\(self, count: int, next_"
        r"|\bmodel\.generate\(",
        {
            "engine/batch/generate.py:stock_generate": _STOCK,
            "engine/decode/decode_step.py:DecodeStep._modules": "transformers' modules for all rows",
            "engine/decode/decode_step.py:DecodeStep._short": "the same with fewer operations",
            "engine/families/step.py:FusedStep": "a few kernels, of a family's description",
        },
        {
            "engine/decode/decode_step.py:DecodeStep._finish": "calls a fused step",
            "engine/decode/decode_step.py:DecodeStep._one_by_one": "DecodeStep._modules, one row after the other",
        },
    ),
    Ways(
        "lora_ways", "a LoRA is added", 4, 4,
        r"def apply\(self, \w+: \w+, (x|ids)\b|def operands\(|linear\((low\b|[\w.]*linear\()|lora_tables\(|ExpertSlots\("
        r"|\.linear\.apply\(",
        {
            "engine/lora/store.py:EagerAdapters": "PEFT's operations; of an expert, after its product",
            "engine/lora/fewer_ops.py:ShortAdapters": "fewer operations, or a prompt's kernels; of experts, EagerAdapters'",
            "engine/batched_lora/table.py:AdapterSlots": "each row's by a table on the device, of experts too",
            "engine/batched_lora/columns.py:Columns": "as columns of the weight of a product",
        },
        {
            "engine/lora/layers.py:LinearAdapter": "EagerAdapters at a linear layer",
            "engine/lora/layers.py:EmbeddingAdapter": "EagerAdapters at an embedding",
            "engine/lora/layers.py:ExpertsAdapter": "EagerAdapters at an expert's product",
            "engine/batched_lora/table.py:StandIn": "ExpertsAdapter of another adapter",
            "engine/batched_lora/table.py:ExpertSlots": "the experts of AdapterSlots, which alone makes it",
            "engine/batched_lora/columns.py:runs": "times columns", "engine/lora/fewer_ops.py:_add": "ShortAdapters",
            "engine/kernels/dequantize.py:add": "ShortAdapters", "engine/kernels/dequantize.py:_add_runs": "times it",
            "engine/lora/mixes.py": "EagerAdapters for the sum of several adapters",
            "engine/lora/routers.py:RouterModule": "EagerAdapters inside a router",
            "engine/lora/store.py:AdapterApplier": "the protocol",
            "engine/kernels/experts.py:check": "a check", "engine/kernels/experts.py:lora_tables": "the numbers of ExpertSlots",
            "engine/kernels/experts.py:_product": "the kernel of AdapterSlots for experts, in torch",
            "verification/routes/rounding.py:_Merged": "a merge in memory, to measure its rounding",
        },
    ),
    Ways(
        "matmul_ways", "a 4-bit weight is multiplied", 5, 4,
        r"(?m)\bMatmul\('|^def \w*shell\(|-> Shell:|"
        r"linear\([^\n]*(dequantize|unpack)|^def (experts|linear)\((?!self)|[^_]shell\(.*\)\(",
        {
            "engine/kernels/gemv4.py:matmul": "packed, a few rows",
            "engine/kernels/gemm4.py:matmul": "packed, more rows",
            "engine/layers/leaves.py:Dequantized": "by cuBLAS, kept dequantized or for a product, with or without columns",
            "engine/formats/weights.py:shell": "by the format's own library, or dequantized by torch",
            "engine/kernels/experts.py:experts": "chosen experts, packed",
        },
        {
            "engine/families/step.py:FusedStep": "gemv4, gemm4 and kept, of layers over one input",
            "engine/kernels/gemm4.py:linear": "gemm4",
            "engine/formats/bitsandbytes.py:shell": "a format of weights.shell",
            "engine/formats/mobile.py": "a format of weights.shell", "engine/formats/packed.py": "formats of weights.shell",
            "engine/formats/weights.py:_plain_shell": "16 bits", "engine/formats/weights.py:unpacked_shell": "kept, on a CPU",
            "engine/batched_lora/columns.py:runs": "times columns",
            "engine/lora/experts.py:_Forward._product": "weights.shell of one expert after the other",
        },
    ),
    Ways(
        "graph_owners", "a CUDA graph is owned", 1, 1, r"\.capture_begin\(|CUDAGraph\(",
        {"engine/memory/graph_cache.py:GraphCache": "captures, replays and drops them all"},
    ),
    Ways(
        "renderers", "a report is shown", 2, 1,
        r"jinja2\.Environment\(|'#{1,6} |<h[1-6]|<table|<t[drh]\b|'```|\| ?---|\.[lr]just\(|html\.escape"
        r"|import textwrap|(from|import) rich\b",
        {"report/render.py": "text, Markdown and pages of one document"},
        {
            "report/charts.py": "figures of a document",
            "cli/chat/file.py:_as_markdown": "a conversation, whose texts are Markdown",
            "former_names.py:module": "names, with < between new and former", "serve/ray/config.py:module": "comments of a file",
            "cli/flags/output.py:PhaseLine": "a line of progress", "formats/bitsandbytes.py:state_json": "pads a file's JSON",
        },
        is_everywhere=True,
    ),
    Ways(
        "stock_loaders", "the stock stack loads a model", 1, 1,
        r"BitsAndBytesConfig\(|\b(?!Auto[CTP]|\w*Config\.|\w*Tokenizer\w*\.)\w+\.from_pretrained\(",
        {"stock/load.py": "a model class of transformers, bitsandbytes, PEFT"},
        {
            "stock/unsplit.py": "stock/load.py for formats whose weights are read apart",
            "engine/loader/transformers_model.py": "transformers' loader on tensors without data: where each comes from",
            "engine/loader/processor.py": "processors are no models", "doctor/issues/words.py:_call": "the text of a call",
            "doctor/catalogue": "runs of known bugs",
        },
        is_everywhere=True,
    ),
    Ways(
        "tuners", "a launch is tuned", 1, 1, r"^def tune\(",
        {"engine/kernels/autotune.py:tune": "times configurations on the card"},
        {"engine/kernels/device_kernels.py:DeviceKernels.tune": "autotune.tune of a model's products"},
    ),
    Ways(
        "choosers", "a kernel is used, or left out, on a card", 1, 1, r"= reason_of\(exc\b",
        {"engine/kernels/selfcheck.py:KernelFamily": "compiled, known to the kernel, right, faster"},
    ),
    Ways(
        "pass_contexts", "modules are changed for a pass (context managers)", 4, 1,
        r"(?s)(@contextmanager|-> AbstractContextManager).*(\bcovered\(|\.applying\(|short\w*\.step\()"
        r"|finally:.*(vars\(\w+\)|__dict__)(\[.*\] = |\.pop\()|finally:.*\.(forward|applier|matmuls) = ",
        {
            "engine/lora/store.py:covered": "the one place that writes: forwards and attributes, and what was there before",
            "engine/lora/store.py:AdapterStore.applying": "who adds adapters, and which products layers ask for",
            "engine/lora/fewer_ops.py:ShortOps.step": "norms, with adapters and products",
            "engine/towers/graphs.py:Towers.running": "layers of towers",
        },
        {
            "engine/towers/graphs.py:TowerOps.running": "ShortOps.step for towers",
            "engine/prefill/prefill.py:PrefillRunner._short_ops": "ShortOps.step for chunks",
            "engine/prefill/prefill.py:PrefillRunner.head_ops": "ShortOps.step for a packed head",
            "engine/decode/decode_step.py:DecodeStep._being_captured": "AdapterStore.applying in a capture",
        },
    ),
)  # fmt: skip


def in_words() -> str:
    """Return the ways as a table of Markdown."""
    told = {one.question: ", ".join(f"`{name.replace(':', ': ')}`" for name in one.ways) for one in TABLE}
    return "\n".join(["| how ... | ways |", "|---|---|", *(f"| {question} | {names} |" for question, names in told.items())])


if __name__ == "__main__":
    print(in_words())
