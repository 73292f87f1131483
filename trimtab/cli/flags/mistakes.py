"""What did a mistyped command line mean: a flag or command of almost that name, or what another program's flag is called here?"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from trimtab.checkpoint.names import near_names
from trimtab.errors import choices_text

# Flags of other programs -> what says the same here, the first that a command has: flags, or a positional argument.
# Source: --help of llama.cpp (llama-cli), vLLM (serve), mlx-lm (generate), and arguments of transformers.
ELSEWHERE = {
    **dict.fromkeys(("-p", "--prompt", "--message"), "PROMPT"),
    **dict.fromkeys(("-m", "--model", "--model-path", "--base-model"), "MODEL"),
    **dict.fromkeys(("-c", "--ctx-size", "--n-ctx", "--max-model-len", "--max-seq-len"), "--context"),
    **dict.fromkeys(("-n", "--n-predict", "--max-tokens", "--max-length"), "--max-new-tokens --new-tokens"),
    **dict.fromkeys(("--adapters", "--lora", "--lora-modules", "--lora-path", "--adapter-path", "--enable-lora"), "--adapter"),
    **dict.fromkeys(("--gpu-memory-utilization", "--vram", "--n-gpu-layers", "-ngl", "--cpu-offload-gb"), "--gpu-memory"),
    **dict.fromkeys(("--quantization", "--load-in-4bit", "--load-in-8bit"), "--quant"),
    "--torch-dtype": "--dtype", "--temp": "--temperature", "-t": "--threads", "-s": "--seed",
}  # fmt: skip


def unknown_flags(unknown: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Return the message for words that a command does not take: for each flag, the probable intended one."""
    options = [text for action in command._actions for text in action.option_strings]
    positional = [str(action.metavar) for action in command._actions if not action.option_strings]
    texts = []
    for word in unknown:
        if not word.startswith("-") or word.strip("-").replace(".", "").isdigit():
            continue
        flag = word.partition("=")[0]
        near = _near(flag, options, positional)
        if near and near[0] in positional:
            texts.append(f"{near[0]} has no flag: {command.prog} {' '.join(positional)}")
        elif near:
            texts.append(flag + choices_text((), near))
        else:
            texts.append(f"{flag} (`{command.prog} --help` lists the flags)")
    return "; ".join(dict.fromkeys(texts))


def _near(flag: str, options: Sequence[str], positional: Sequence[str]) -> list[str]:
    spelled = flag.lower().replace("_", "-")
    for one in (spelled, *ELSEWHERE.get(spelled, "").split()):
        if one in options or one in positional:
            return [one]
    by_name = {option.lstrip("-").replace("-", "_"): option for option in options}
    return [by_name[name] for name in near_names(spelled.lstrip("-").replace("-", "_"), by_name)]


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return the message for a first word that is no command."""
    known = tuple(commands)
    return f"there is no command {word!r}{choices_text(known, near_names(word, known))}"
