"""The end of each command's --help: examples, and where the exit codes are."""

from __future__ import annotations

_MODEL = "google/gemma-4-E4B-it"
_ADAPTER = "--adapter medical=PATH"
_DEMO = "demo --adapter demo/style"
EXAMPLES = {
    "plan": (f"{_MODEL} --gpu-memory 4GiB", f'{_MODEL} {_ADAPTER} --card "RTX 4060 8GB"', f"{_MODEL} --save plan.json"),
    "run": (
        f'{_MODEL} "Why is the sky blue?"', f'{_MODEL} {_ADAPTER} --image x.png "What is it?"',
        '--plan plan.json "Why is the sky blue?"', f"{_MODEL} --prompts questions.jsonl --out answers.jsonl",
    ),
    "chat": (f"{_MODEL} {_ADAPTER} --gpu-memory 4GiB", "--plan plan.json", _DEMO),
    "inspect": (f"adapters/medical --model {_MODEL}",),
    "models": ("", "checkpoints --quick"),
    "adapters": (f"adapters --model {_MODEL}",),
    "pull": (_MODEL,),
    "completion": ("bash",),
    "merge": (
        f"{_MODEL} merged {_ADAPTER} --check", f"{_MODEL} merged --adapter style=PATH:0.7",
        f"{_MODEL} packed {_ADAPTER} --requantize nf4-dq",
    ),
    "verify": (
        f"{_MODEL} {_ADAPTER} --against stock", f"{_MODEL} {_ADAPTER} --against merged/",
        f"{_MODEL} {_ADAPTER} --against http://localhost:8000/v1",
    ),
    "bench": (f"{_MODEL} {_ADAPTER} --save bench.json",),
    "tune": (_MODEL,),
    "doctor": ("", "--trace error.txt", f"{_MODEL} {_ADAPTER} --device-map map.json", "--matrix --save runs.json"),
    "serve": (
        f"{_MODEL} {_ADAPTER} --gpu-memory 6GiB", "models.toml --together 1", "--config serve.toml", _DEMO,
    ),
    "demo": ("",),
}  # fmt: skip


def examples_text(command: str) -> str:
    """Return the examples of one command, for --help."""
    lines = [f"  trimtab {command} {words}".rstrip() for words in EXAMPLES[command]]
    return "\n".join(["examples:", *lines, "", "`trimtab --help` lists the exit codes of all commands."])
