"""Figures of pages that were measured on an H100, as test_doc_figures.py has them of the other results."""

import pytest

from tests.test_doc_figures import ROOT, images, results_of, rounded


def pictures():
    image = images("e4b")
    h100 = [row for row in results_of("prompts_h100")["rows"] if row["model"] == "e4b"]
    now = {row["way"]: row["ms"] for row in h100 if row["what"] == "picture 640x480"}
    (parts,) = [row for row in h100 if row["what"] == "parts of a picture"]
    yield (
        f"| 40 | {image['captured']:.1f}, stock {image['stock']:.0f}; since then on an H100 {now['captured']:.1f}, "
        f"stock {now['stock']:.0f} |"
    )
    towers, prompt = rounded(parts["towers_ms"], 1), f"{parts['prompt_ms']:.1f}"
    yield f"H100: inputs on the host {parts['inputs_ms']:.1f}, vision tower {towers} (its kernels"
    yield f"11.6 in an earlier run), prompt {prompt}"
    yield f"the image takes {now['captured']:.1f} ms, and stock {now['stock']:.0f}."
    yield f"take {parts['inputs_ms']:.1f}\nms, the tower {towers}, and the prompt {prompt}"


def prompts_on_an_h100():
    rows = [row for row in results_of("prompts_h100")["rows"] if row["what"] == "text"]
    with_adapter = {
        (row["model"], row["tokens"], row["way"]): row["ms"] for row in rows if row["adapter"] and "ms" in row
    }
    for model, title in (("e4b", "E4B: stock / eager / captured"), ("e2b", "E2B"), ("qwen3-8b", "Qwen3-8B")):
        cells = []
        for tokens in (64, 512, 2048):
            stock, eager, captured = (with_adapter[model, tokens, way] for way in ("stock", "eager", "captured"))
            cells.append(f"{stock:.0f} / {eager:.0f} / **{captured:.1f}**")
        yield f"| {title} | {' | '.join(cells)} |"
    captured = [row for row in rows if row["way"] == "captured"]
    others = [(row["model"], row["tokens"], row["adapter"]) for row in captured if not row["same_token"]]
    assert others == [("e4b", 64, False), ("e2b", 64, True)]
    yield f"Of its {len(captured)} captured texts two have another first token than the eager prompt"
    goals = " / ".join(f"{with_adapter['e4b', tokens, 'captured']:.1f}" for tokens in (64, 512, 2048))
    yield f"since then on an H100 {goals} |"
    yield f"since then on an H100 {with_adapter['e2b', 512, 'captured']:.1f} |"
    yield f"since then on an H100 {with_adapter['qwen3-8b', 512, 'captured']:.1f} for Qwen3-8B |"


def load_on_an_h100():
    one, eight, many, mixed, adapters = results_of("load_h100")["rows"]
    rates = [f"{float(rounded(row['tok_s'], 0)):,.0f}" for row in (one, eight, many, mixed, adapters)]
    yield f"An H100 makes {rates[0]}, {rates[1]} and {rates[2]}"
    yield f"below {eight['between_ms']['p99']:.1f}\nand {many['between_ms']['p99']:.1f} ms"
    yield f"after {many['ttft_ms']['p50']:.0f} ms at 32 clients, in 99 of 100 cases after {many['ttft_ms']['p99']:.0f} at most"
    yield f"it makes {rates[3]}, and {rates[4]} with 32 adapters"


def together():
    rows = results_of("together_h100")["rows"]
    alone = {row["tokens"]: row["ms"] for row in rows if row["what"] == "alone"}
    passes = {(row["prompts"], row["tokens"]): row["ms"] for row in rows if row["what"] == "together"}
    step = min(row["ms"] for row in rows if row["what"] == "step" and (row["rows"], row["adapters"]) == (16, 8))
    yield f"an H100 takes {alone[64]:.1f} ms for 64 tokens and {alone[512]:.1f} for 512"
    yield f"of 16 rows with 8 adapters takes {step:.1f} ms over packed weights"
    yield f"prompts of 64 tokens take {passes[16, 64]:.0f} ms instead of {16 * alone[64]:.0f}"
    yield f"two of 256 take {passes[2, 256]:.1f} instead of {2 * alone[256]:.1f}"
    yield f"in {2 * alone[512]:.1f} ms instead of {passes[2, 512]:.1f}"


def second_turns():
    now, before = results_of("turns")["rows"][0]["ms"], results_of("turns")["before_h100"]["rows"][0]["ms"]
    yield f"takes {now:.1f} ms instead of {before:.1f}"


CASES = {
    pictures: "how-fast-and-why",
    prompts_on_an_h100: "how-fast-and-why",
    load_on_an_h100: "server-under-load",
    together: "serve-many-adapters",
    second_turns: "decisions/0018-unpacked-weights",
}


@pytest.mark.parametrize("texts", CASES, ids=lambda texts: texts.__name__)
def test_figures_of_a_page_are_those_of_the_results(texts):
    page = " ".join((ROOT / "docs" / f"{CASES[texts]}.md").read_text(encoding="utf-8").split())
    missing = [text for text in texts() if " ".join(text.split()) not in page]
    assert not missing
