"""Figures that the docs have in sentences and in tables written by hand: each is computed from its file in bench/results.

`tools/readme_numbers.py` fills whole tables. Here a case names a page and returns the texts that the page must contain.
"""

import json
import math
from pathlib import Path

import pytest

from tests import ROOT
from tests.rules import each
from trimtab.demo.demo import ADAPTERS
from trimtab.planning.candidates import HEAD8_KL
from trimtab.planning.values.byte_sizes import KV8_KL

RESULTS = ROOT / "bench" / "results"


def rounded(value, digits):
    """Return the value with so many decimals, ties upwards: 0.365 as 0.37."""
    return f"{value + 1e-9:.{digits}f}"


def short(value):
    """Return the value with two digits: 0.000142 as 1.4e-4."""
    return f"{value:.1e}".replace("e-0", "e-")


def results_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def card(gib, head, run, *, model="e4b", copies=1):
    (row,) = [
        row
        for row in results_of("cards")["rows"]
        if (row["model"], row["card_gib"], row["head"], row["run"]) == (model, gib, head, run)
        and row.get("copies", 1) == copies and row.get("engine") != "stock"
    ]  # fmt: skip
    return row


def staging():
    before, now, whole = (card(3.7, "auto", run) for run in (5, 6, 7))
    yield f"E4B on 3.7 GiB went from {before['tok_s']:.0f} to {now['tok_s']:.0f} tokens per second"
    yield f"last layers: {whole['tok_s']:.0f}, where {whole['predicted_tok_s']:.0f} are predicted"
    old, new = card(4, "full", 4), card(4, "full", 7)
    yield (
        f"decoded {new['tok_s']:.0f} instead of {old['tok_s']:.0f}; its plan also streamed less, {new['streamed_gib']:.2f} GiB "
        f"instead of {old['streamed_gib']:.2f}"
    )
    yield (f"takes {card(4, 'auto', 2)['ttft_ms']:.0f} ms instead of {card(4, 'auto', 1)['ttft_ms']:.0f} on that card")


def predictions():
    latest = {
        tuple(row.get(key) for key in ("model", "card_gib", "head", "copies", "gpu")): row
        for row in results_of("cards")["rows"]
        if "predicted_tok_s" in row
    }
    highest = max(row["predicted_tok_s"] / row["tok_s"] for row in latest.values() if row["streamed_gib"])
    yield f"Where layers are streamed, the prediction is up to {100 * (highest - 1):.0f} % too high"


def prompt_rows(run=5):
    return [row for row in results_of("prompts")["rows"] if row["run"] == run]


def captured_text(model, tokens, *, adapter=True):
    (row,) = [
        row for row in prompt_rows()
        if (row["model"], row["what"], row.get("tokens"), row.get("adapter"), row.get("way"))
        == (model, "text", tokens, adapter, "captured")
    ]  # fmt: skip
    return row


def first_ms(model, tokens, *, adapter=True):
    """Return the milliseconds to the first token of a captured text."""
    return captured_text(model, tokens, adapter=adapter)["ms"]


def prompts():
    found = {
        (row["model"], row["tokens"], row["way"]): row["ms"]
        for row in prompt_rows()
        if row["what"] == "text" and row["adapter"] and "ms" in row
    }
    names = {"e4b": "E4B: stock / eager / captured", "e2b": "E2B", "qwen3-8b": "Qwen3-8B", "qwen3-vl-4b": "Qwen3-VL-4B"}
    for model, title in names.items():
        cells = [
            " / ".join(f"{found[model, tokens, way]:.0f}" for way in ("stock", "eager"))
            + f" / **{found[model, tokens, 'captured']:.1f}**"
            for tokens in (64, 512, 2048)
        ]
        yield f"| {title} | {' | '.join(cells)} |"
    yield f"tokens of E4B take {first_ms('e4b', 512, adapter=False):.1f} ms"
    e4b, qwen = (first_ms(model, 512) - first_ms(model, 512, adapter=False) for model in ("e4b", "qwen3-8b"))
    yield f"adds {e4b:.1f} ms to 512 tokens of E4B and {qwen:.1f} ms to those of Qwen3-8B"
    yield f"The graph of 512 tokens of E4B with an adapter takes {captured_text('e4b', 512)['gpu_ms']:.1f} ms"
    (memory,) = [row for row in prompt_rows() if (row["model"], row["what"]) == ("e4b", "memory")]
    taken = memory["taken_bytes"]
    yield (
        f"{taken['torch'] / 1e6:.0f} MB for all chunk sizes of E4B, mostly the activations of the largest, and "
        f"{taken['others'] / 1e6:.0f} MB in the driver's memory for {memory['graphs']} graphs"
    )


def same_first_tokens():
    captured = [row for row in prompt_rows() if row.get("way") == "captured"]
    texts = [row for row in captured if row["what"] == "text"]
    others = [(row["model"], row["tokens"], row["adapter"]) for row in texts if not row["same_token"]]
    assert others == [("e4b", 64, False), ("e2b", 64, True), ("e2b", 2048, False)]
    yield "It differs for 64 tokens of E4B without the adapter, 64 of E2B with it, and 2,048 of E2B without it"
    yield f"has {len(texts)} captured texts"
    yield f"In {len(texts) - len(others)} of them the greedy first token equals"
    yield f"by up to {100 * max(row['difference'] for row in texts):.1f} % of the largest"


def prompt_goals():
    e4b = [f"{first_ms('e4b', tokens):.1f}" for tokens in (64, 512, 2048)]
    yield f"| 10 / 15 / 40 | {' / '.join(e4b)} |"
    yield f"| E2B, 512 tokens, ms | 12 | {first_ms('e2b', 512):.1f} |"
    yield f"| 28 / 18 | {first_ms('qwen3-8b', 512):.1f} / {first_ms('qwen3-vl-4b', 512):.1f} |"
    yield f"| 121 ms; {e4b[1]} captured (below) |"


def prompts_alone():
    short, long = (f"{first_ms('e4b', tokens):.1f}" for tokens in (64, 512))
    yield f"64 tokens take {short} ms and 512 take {long}"
    yield f"A prompt of 64 tokens of E4B takes {short} ms and one of 512 takes {long}"


def prompts_with_adapters_decided():
    for model, text in (("qwen3-8b", "Qwen3-8B ({} and {} ms)"), ("qwen3-vl-4b", "Qwen3-VL-4B ({} and {})")):
        pair = [first_ms(model, 512, adapter=adapter) for adapter in (True, False)]
        yield text.format(*(f"{one:.1f}" for one in pair))
        yield f"{pair[0] - pair[1]:.1f} {'ms to 512 tokens' if model == 'qwen3-8b' else 'to those'} of {text.split()[0]}"
    pair = [first_ms("e4b", 512, adapter=adapter) for adapter in (True, False)]
    yield f"For E4B it adds {pair[0] - pair[1]:.1f} ({pair[0]:.1f} and {pair[1]:.1f})"


def last_layers_decided():
    yield f"The graph takes {captured_text('e4b', 512)['gpu_ms']:.1f} ms"
    yield f"The first token takes {first_ms('e4b', 512):.1f} ms, and {first_ms('e2b', 512):.1f} on E2B"


def images(model):
    """Return the milliseconds from an image's file and a question to the first token, by way."""
    return {row["way"]: row["ms"] for row in prompt_rows() if (row["model"], row["what"]) == (model, "picture 640x480")}


def parts_of_an_image(model, *, both=False):
    """Return the parts of that time; both: and those with transformers' and bitsandbytes' operations in the towers."""
    rows = [row for row in prompt_rows() if row["model"] == model and row["what"].startswith("parts of a picture")]
    assert [row["what"].count("transformers") for row in rows] == [0, 1]
    return rows if both else rows[:1]


def towers():
    eager, captured, now = (
        next(
            row for row in prompt_rows(run)
            if (row["model"], row["what"], row.get("way")) == ("e4b", "picture and sound", "captured")
        )
        for run in (2, 3, 5)
    )  # fmt: skip
    yield f"594 tokens, to the first token | {eager['ms']:.0f} ms | {captured['ms']:.0f} ms | **{now['ms']:.0f} ms** |"
    yield f"on the GPU | {eager['gpu_ms']:.1f} | {captured['gpu_ms']:.1f} | {now['gpu_ms']:.1f} |"
    (parts,) = [row for row in prompt_rows(3) if row["what"] == "parts of a picture"]
    yield f"the vision tower took {parts['towers_ms']:.1f} ms and the decoder {parts['prompt_ms']:.1f}"
    for model, title in (("e4b", "E4B, 283 tokens"), ("e2b", "E2B")):
        ms = images(model)
        yield f"| {title} | {ms['stock']:.0f} ms | {ms['eager']:.0f} ms | **{ms['captured']:.0f} ms** |"
    (e4b, plain), e2b = parts_of_an_image("e4b", both=True), parts_of_an_image("e2b", both=True)
    yield (
        f"are {e4b['inputs_ms']:.1f} ms for the inputs (reading, resizing and the processor, on the host), "
        f"{rounded(e4b['towers_ms'], 1)} ms for the vision tower and {e4b['prompt_ms']:.1f} ms for the prompt"
    )
    yield (
        f"the tower takes {rounded(plain['towers_ms'], 1)} ms in the same run "
        f"(E2B: {e2b[1]['towers_ms']:.1f} instead of {e2b[0]['towers_ms']:.1f})"
    )


def towers_decided():
    ours, plain = (rounded(one["towers_ms"], 1) for one in parts_of_an_image("e4b", both=True))
    yield f"the vision tower takes {ours} ms for an image of 640x480, and {plain} with"
    eager, captured = (next(row["ms"] for row in prompt_rows(run) if row.get("way") == "captured") for run in (2, 3))
    yield f"take {captured:.0f} ms to the first token instead of {eager:.0f}"


def prompt_kernels():
    rows = [row for row in results_of("prompt_kernels")["rows"] if row["shape"] == [10240, 2560]]
    (unpack,) = [row for row in rows if row["what"] == "unpack"]
    yield f"({unpack['us']:.0f} µs instead of {unpack['bitsandbytes_us']:.0f} for E4B's gate)"
    (lora,) = [row for row in rows if (row.get("tokens"), row.get("rank")) == (512, 8)]
    yield f"({lora['us']:.0f} µs instead of {lora['torch_us']:.0f} for 512 tokens)"


def columns(*shapes):
    """Return the rows of layers of these shapes with an adapter of rank 8, for 512 tokens."""
    rows = [row for row in results_of("adapter_columns")["rows"] if (row["tokens"], row["rank"]) == (512, 8)]
    return [next(row for row in rows if row["shape"] == shape) for shape in shapes]


GATE_UP, QKV, OUTPUT, DOWN = ([[10240, 10240], 2560], [[2048, 512, 512], 2560], [[2560], 2048], [[2560], 10240])


def adapters_inside():
    gate_up, qkv = columns(GATE_UP, QKV)
    yield (
        f"gate and up of E4B take {gate_up['us']:.0f} µs instead of {gate_up['before_us']:.0f}, queries, keys and values "
        f"{qkv['us']:.0f} instead of {qkv['before_us']:.0f}"
    )


def adapters_inside_decided():
    gate_up, qkv, output, down, qwen = columns(GATE_UP, QKV, OUTPUT, DOWN, [[12288, 12288], 4096])
    yield f"gate and up of E4B {gate_up['before_us']:.0f} and {gate_up['us']:.0f}"
    yield f"values {qkv['before_us']:.0f} and {qkv['us']:.0f}, output {output['before_us']:.0f} and {output['us']:.0f}"
    yield f"down {down['before_us']:.1f} and {down['us']:.1f}; gate and up of Qwen3-8B"
    yield f"{qwen['before_us']:.0f} and {qwen['us']:.0f}"


def before_and_now():
    """Return rows of cards that stream layers, of runs 8 (prompts kernel by kernel) and 10 (captured prompts), both on an H200."""
    cases = (("e4b", 4, "full"), ("e4b", 3.2, "auto"), ("e2b", 2, "auto"))
    return [[card(gib, head, run, model=model) for run in (8, 10)] for model, gib, head in cases]


def first_tokens_beside_copies():
    full, small, e2b = ([one["ttft_ms"] for one in pair] for pair in before_and_now())
    yield f"takes {full[1]:.0f} ms instead of {full[0]:.0f} on 4 GiB with the full head"
    yield f"{small[1]:.0f} instead of {small[0]:.0f} on 3.2 GiB, and with E2B {e2b[1]:.0f} instead of {e2b[0]:.0f} on 2 GiB"
    full, small, e2b = ([one["tok_s"] for one in pair] for pair in before_and_now())
    yield (
        f"decode {full[1]} tokens per second instead of {full[0]}, {small[1]} instead of {small[0]}, and {e2b[1]} "
        f"instead of {e2b[0]}"
    )
    slow = card(4, "full", 10, copies=4)
    assert slow["prompt"] == "eager"
    yield f"the first token takes {slow['ttft_ms']} ms"
    yield f"(runs 1 and 2; {card(4, 'auto', 10)['ttft_ms']} in run 10)"


def first_tokens_decided():
    full, small, e2b = before_and_now()
    yield f"{card(4, 'full', 9)['ttft_ms']:.0f} ms instead of {full[0]['ttft_ms']:.0f} on 4 GiB"
    yield (
        f"{full[1]['ttft_ms']:.0f} ms on 4 GiB with the full head, {small[1]['ttft_ms']:.0f} on 3.2 GiB, "
        f"{card(3.7, 'auto', 10)['ttft_ms']:.0f} on 3.7 GiB; E2B on 2 GiB {e2b[1]['ttft_ms']:.0f} ({e2b[0]['ttft_ms']:.0f} before)"
    )
    spare = spare_mib(most_gib=6)
    yield f"took {min(spare)} to {max(spare)} MiB less than their plans"
    yield f"{full[1]['tok_s']} tokens per second instead of {full[0]['tok_s']} on 4 GiB"
    yield f"{e2b[1]['tok_s']} instead of {e2b[0]['tok_s']} with E2B"
    rows = [row for row in results_of("cards")["rows"] if row["run"] == 10]
    assert not any((row["captured"]["room_mib"] or (0, 0, 0))[2] for row in rows)


def spare_mib(most_gib):
    """Return by how many MiB each process of run 10 on a small card stayed below its plan."""
    return [
        round((row["planned_gib"] - row["process_gib"]) * 1024)
        for row in results_of("cards")["rows"] if row["run"] == 10 and 0 < row["card_gib"] <= most_gib
    ]  # fmt: skip


def link_shares():
    e2b, full = card(2, "auto", 10, model="e2b"), card(4, "full", 10)
    yield f"E2B on 2 GiB reached {e2b['link_share']} of the link's limit"
    for gib in (3.2, 3.5):
        yield f"E4B on 3.2 and 3.5 GiB {card(gib, 'auto', 10)['link_share']:.2f}"
    yield (
        f"{full['tok_s']} tokens per second, {full['link_share']:.2f} of the limit, where {full['predicted_tok_s']} were predicted"
    )
    h100, later = card(4, "full", 9), card(4, "full", 11)
    yield f"made {h100['tok_s']:.1f} with another plan in run 9"
    yield f"and {later['tok_s']:.1f} with this one in run 11"
    assert round(later["copied_gib"], 2) == round(full["copied_gib"], 2)
    assert h100["prompt_chunks"] == [256]
    yield f"copies {h100['copied_gib']:.2f} GiB in a step instead of {full['copied_gib']:.2f}"
    high = [100 * (row["predicted_tok_s"] / row["tok_s"] - 1) for row in (card(4, "full", run) for run in (7, 8, 10))]
    yield f"{min(high):.0f} to {max(high):.0f} % too high in runs 7, 8 and 10"
    first, second = (100 * (row["predicted_tok_s"] / row["tok_s"] - 1) for row in (h100, later))
    yield f"on the H100 {first:.0f} % in run 9 and {second:.0f} % in run 11"
    mended = [card(4, "full", run) for run in (13, 15)]
    yield f"made {mended[0]['tok_s']} in run 13 and {mended[1]['tok_s']} in run 15"
    shares = " and ".join(f"{row['link_share']:.2f}" for row in mended)
    yield f"{shares} of the limit, where {mended[1]['predicted_tok_s']:.0f} are predicted"
    before, last = card(4, "full", 17), card(4, "full", 19)
    yield (
        f"In run 19 it made {last['tok_s']}, {last['link_share']:.2f} of the limit of a link that measured "
        f"{100 * (1 - last['link_gb_s'] / before['link_gb_s']):.0f} % less"
    )


def whole_decoder():
    some, whole = card(3.7, "auto", 10), card(3.8, "auto", 10)
    assert some["streamed_gib"] and not whole["streamed_gib"]
    yield (
        f"on 3.8 nothing is streamed ({whole['tok_s']:.0f} tokens per second), "
        f"on 3.7 {some['streamed_gib']} GiB ({some['tok_s']:.0f})"
    )
    eager, copied = card(3.75, "auto", 20), card(3.75, "auto", 21)
    assert eager["prompt"] == "eager" and not eager["streamed_gib"] and copied["prompt"] == "graph"
    yield f"(H100, {eager['tok_s']:.0f} tokens/s, first token {eager['ttft_ms']:.0f} ms)"
    yield f"copies {copied['copied_gib']} GiB of it in a step instead: {copied['tok_s']:.0f} tokens/s, first token"
    yield f"request takes less time so: {copied['tok_s']:.0f} tokens per second, and {copied['ttft_ms']:.0f} ms"
    counted = whole["planned_measured_mib"]
    yield (
        f"context and kernels {counted['context and kernels'][0]} MiB, activations {whole['items_mib']['activations']}, "
        f"torch's slack {counted['allocator slack'][0]} (planned)"
    )


def small_card_goals():
    full, small, head8 = card(4, "full", 10), card(3.2, "auto", 23), card(4, "auto", 10)
    h100, copied = card(4, "full", 17), card(4, "full", 17, copies=4)
    last, last_copied = card(4, "full", 20), card(4, "full", 20, copies=4)
    share = f"{100 * last['link_share']:.0f} %; with every copy four times {100 * last_copied['link_share']:.0f} %"
    yield f"| H100 {share}, as the link is measured before | - |"
    yield f"in run 17 {h100['tok_s']}, {h100['link_share']:.2f} of the limit"
    yield f"and in run 20 {last['tok_s']}."
    yield f"it made {copied['tok_s']} in run 17, {copied['link_share']:.2f} of the limit"
    yield f"| 3.2 GiB, tokens/s of the link's limit | 90 % | {100 * small['link_share']:.0f} %; "
    yield f"H100 {100 * card(3.2, 'auto', 20)['link_share']:.0f} % | - |"
    yield f"{head8['tok_s']:.0f}; H100 {card(4, 'auto', 20)['tok_s']:.0f} |"
    qwen = card(5, "auto", 17, model="qwen3-8b")
    yield f"| H100 {100 * qwen['link_share']:.0f} % ({qwen['tok_s']:.0f} tokens/s) |"
    whole, e2b = card(0, "full", 20), card(0, "full", 20, model="e2b")
    first = f"{head8['ttft_ms']} / {full['ttft_ms']}; H100 {card(4, 'auto', 20)['ttft_ms']} / {last['ttft_ms']}"
    yield f"15 / {15 + 1000 / full['link_limit_tok_s']:.1f} | {first} |"
    between = [card(gib, "auto", 20)["ttft_ms"] for gib in (3.2, 3.5)]
    yield f"({min(between):.0f} to {max(between):.0f} ms)"
    below, wide = spare_mib(most_gib=4), card(6, "full", 10)
    (spare,) = set(spare_mib(most_gib=6)) - set(below)
    shares = [100 * (1 - row["process_gib"] / row["planned_gib"]) for row in (wide, whole, e2b)]
    yield f"{min(below)} to {max(below)} MiB up to 4 GiB, {spare} MiB ({shares[0]:.1f} %) on 6 GiB"
    yield f"whole GPU {shares[1]:.1f} % (E4B) and {shares[2]:.1f} % (E2B)"
    yield f"with {whole['planned_gib']:.2f} GiB, of which {whole['process_gib']:.2f} were measured ({shares[1]:.1f} %)"
    yield f"with {e2b['planned_gib']:.2f}, of which {e2b['process_gib']:.2f} were ({shares[2]:.1f} %"


def on_a_cpu():
    titles = {
        "llama-300m, none": "Llama 310 M | none", "llama-300m, nf4-dq": "Llama 310 M | nf4-dq",
        "llama-300m, nf4-dq, without AVX512-BF16": "Llama 310 M | nf4-dq, stock without AVX512-BF16",
        "demo, nf4-dq": "demo | nf4-dq", "demo, nf4-dq, without AVX512-BF16": "demo | nf4-dq, stock without AVX512-BF16",
    }  # fmt: skip
    reports = results_of("bench_cpu")["reports"]
    assert set(reports) == set(titles)
    for name, title in titles.items():
        ratios = [reports[name]["ratios"][key] for key in ("decode_tok_s", "cpu_ms")]
        cells = [f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ratios]
        yield f"| {title} | {' | '.join(cells)} |"


def second_turns():
    cached, whole = results_of("turns")["rows"]
    before = [row["ms"] for row in results_of("turns")["before"]["rows"]]
    yield f"faster: {before[0]:.1f} ms, and {before[1]:.1f} without the\ncache"
    yield f"an H100 takes {cached['ms']:.1f} ms, and {whole['ms']:.1f} without the cache"


def server_load():
    eight, many = (row["between_ms"] for row in results_of("load_text")["rows"][1:3])
    times = [f"{math.ceil(10 * one['p99'] / one['p50']) / 10:.1f}" for one in (eight, many)]
    yield f"are below {times[0]} and {times[1]} times the median at 8 and 32 clients"
    adapters, base = (row["tok_s"] for row in results_of("load_many")["rows"])
    yield f"makes {100 * adapters / base:.1f} % of what it makes for the base model alone, both measured in one call"


def steps():
    rows = {
        (row["batch"], row["adapter_rank"], row["adapters"]): row["ms"]
        for row in results_of("decode")["rows"]
        if row["model"] == "e4b" and row.get("run") == 4 and "ms" in row and row["decode"] == "auto"
    }
    yield (f"A step of eight rows takes {rows[8, 8, 8]:.2f} ms with eight adapters of rank 8 and {rows[8, 0, 0]:.2f} ms without")
    yield f"{rows[1, 8, 1]:.2f} ms with rank 8 and {rows[1, 64, 1]:.2f} ms with rank 64"


def kv8():
    demo = results_of("kv8")["runs"][0]["demo"]
    forms = {"4 bits, bf16": ("nf4-dq", "bfloat16"), "bf16": ("none", "bfloat16"), "float32": ("none", "float32")}
    for title, form in forms.items():
        rows = [row["token"] for row in demo if (row["quant"], row["dtype"]) == form]
        positions = sum(row["positions"] for row in rows)
        mean, same = (sum(row["positions"] * row[key] for row in rows) / positions for key in ("kl_mean", "top1_agreement"))
        kl, largest = short(mean), short(max(row["kl_max"] for row in rows))
        yield f"| {title} | {positions:,} | {kl} | {largest} | {100 * same:.1f} % |"
    yield f"All {sum(row['same_answers'] for row in demo)} greedy answers"


def kv_pages():
    rows = [row for row in results_of("kv_pages")["rows"] if row.get("mode") == "fused"]
    held = {row["layout"]: row["held"] for row in rows if row["what"] == "bytes"}
    yield f"| keys and values | {held['whole'] / 1e9:.2f} GB | {held['pages'] / 1e9:.2f} GB |"
    for count in (32, 8):
        ms = {row["layout"]: row["ms"] for row in rows if row["what"] == "step" and row["rows"] == count}
        yield f"| step of {count} rows | {ms['whole']:.2f} ms | {ms['pages']:.2f} ms |"


def head8():
    runs = results_of("head8")["runs"]
    (products,) = [run["products"] for run in runs if "products" in run]
    found = {(row["model"], row["rows"]): row for row in products}
    for model, title in {"e2b": "E2B", "e4b": "E4B", "26b-a4b": "26B-A4B", "12b": "12B"}.items():
        one, eight = found[model, 1], found[model, 8]
        yield f"| {title} | {one['whole_us']:.0f} | {one['us']:.0f} | {eight['us']:.0f} |"
    (demo,) = [run["demo"] for run in runs if "demo" in run]
    assert {row["same_texts"] for row in demo} == {18}
    yield f"All {sum(row['same_texts'] for row in demo)} greedy answers"
    positions = sum(row["positions"] for row in demo)
    mean, same = (sum(row["positions"] * row[key] for row in demo) / positions for key in ("kl_mean", "top1_agreement"))
    yield f"the mean KL divergence was {short(mean)} and the largest {max(row['kl_max'] for row in demo):.4f}"
    yield f"at {100 * same:.1f} % of them"
    worst = max(demo, key=lambda row: row["kl_mean"])
    assert (worst["adapter"], worst["quant"], len(demo)) == ("specialist", "nf4-dq", 8)
    yield f"names the largest of the eight means: {short(worst['kl_mean'])}, with the adapter `specialist` in 4 bits"
    packed, whole = (row["kl_mean"] for row in demo if row["adapter"] is None)
    yield f"Without an adapter it is {short(packed)} in 4 bits and {short(whole)} in bf16"


def head8_in_a_plan():
    (demo,) = [run["demo"] for run in results_of("head8")["runs"] if "demo" in run]
    yield f"from the full head is at most {short(max(row['kl_mean'] for row in demo))}"


def merging():
    copy, ours, peft = results_of("merge_cpu")["rows"]
    yield f"| a plain copy of the files | {copy['seconds']:.0f} | - |"
    yield f"| `trimtab merge` | {ours['seconds']:.0f} | {rounded(ours['peak_gib'], 2)} GiB |"
    yield f"| PEFT, `merge_and_unload` and `save_pretrained` | {peft['seconds']:.0f} | {peft['peak_gib']:.2f} GiB |"
    yield f"All {peft['equal']:,} tensors equal PEFT's"
    copy, ours, peft, quantized = results_of("merge")["rows"]
    yield (f"copy {copy['seconds']:.0f} s, merge {ours['seconds']:.0f} s with")
    yield f"PEFT {peft['seconds']:.0f} s with {peft['peak_gib']:.1f} GiB, {peft['equal']:,} tensors equal"
    yield f"`--requantize nf4-dq` {quantized['seconds']:.0f} s"


def first_tokens():
    cases = results_of("cpu_first_token")["cases"]
    for title, (name, case) in zip(("demo, bfloat16", "Llama 310 M, bfloat16", "Llama 310 M, float32"), cases.items(), strict=True):
        assert name.startswith(title.split(",")[0].split()[0].lower()) and case["dtype"] == title.split(", ")[1], name
        ratios = case["ratios"]
        yield f"| {title} | {case['prompt_tokens']} tokens | {ratios['first_cpu_ms']:.2f} | {ratios['step_cpu_ms']:.2f} |"

    titles = {
        "demo, nf4-dq": "demo, nf4-dq", "llama-300m, nf4-dq": "Llama 310 M, nf4-dq",
        "llama-300m, nf4-dq, float32": "Llama 310 M, nf4-dq, float32", "llama-300m, none": "Llama 310 M, not quantized",
    }  # fmt: skip
    found = results_of("cpu_first_token_avx512")["cases"]
    for name, title in titles.items():
        ratios = found[name]["ratios"]
        yield f"| {title} | {ratios['first_cpu_ms']:.2f} | {ratios['step_cpu_ms']:.2f} |"


def threads():
    medians = results_of("threads")["medians"]
    chosen, every = medians["chosen"], medians["all_cores"]
    yield f"decodes {chosen['tokens_per_s']:.1f} tokens per second with the default number of threads"
    yield f"and {every['tokens_per_s']:.1f} with one thread for each core"
    yield f"takes {chosen['process_s']:.1f} s and {every['process_s']:.1f} s"


def attackers():
    scenes = results_of("attackers")["scenes"]
    titles = {"first_s": "first token of a normal client", "whole_s": "its whole answer", "health_s": "`/health`"}
    for scene, digits in (("attacked", (3, 3, 3)), ("together", (1, 1, 3))):
        for (key, title), places in zip(titles.items(), digits, strict=True):
            pair = [scenes[scene][who][key] for who in ("quiet", "attacked")]
            cells = " | ".join(rounded(one[share], places) for one in pair for share in ("p50", "p99"))
            yield f"| {title} | {cells} | {scenes[scene]['p99_ratio'][key]:.1f} |"
    faults = scenes["together"]["faults"]
    yield f"{faults['requests']:,} requests: {faults['complete']:,} complete, {faults['error']} `WorkerDiedError`"
    cases = [results_of("fuzz")[name]["test_cases"]["generated"] for name in ("toy", "demo")]
    yield f"{cases[0]:,} requests generated from the API's description"
    yield f"and {cases[1]} more to the demo model"


def on_ray():
    ray = results_of("ray")
    one = ray["one_request"]
    yield f"{1000 * one['through_ray_s']:.0f} ms through Ray, {1000 * one['single_server_s']:.0f} ms on one server"
    yield f"two copies again after {ray['copy_killed']['back_s']:.0f} s"
    yield f"the second copy answers after {ray['autoscaling']['s']:.0f} s"


def holds():
    titles = {
        "nothing": "none", "image of 640 x 480": "an image of 640 x 480", "29 s of audio": "29 s of audio",
        "prompt of about 1,200 words": "a prompt of 1,200 words",
        "schema with 40 patterns": "the first answer to a schema with 40 patterns",
        "adapter that is loaded and used": "an adapter of 2.3 MB that is loaded, used and unloaded",
    }  # fmt: skip
    for name, case in results_of("holds")["cases"].items():
        yield f"| {titles[name]} | {rounded(case['longest_s'], 2)} |"


def holds_in_limits():
    cases = results_of("holds")["cases"]
    image, audio = (rounded(cases[name]["longest_s"], 2) for name in ("image of 640 x 480", "29 s of audio"))
    yield f"for {image} s beside an image of 640 x 480 and for {audio} s beside 29 s of audio"


def media_memory():
    found = results_of("media_memory")
    most = max(one["rise_bytes"] for one in found["requests"].values())
    planned, grew = (rounded(count / 2**30, 2) for count in (found["planned_bytes"], most))
    yield f"with 16 images the plan counts {planned} GiB, and the process grew by up to {grew} GiB"


def without_bfloat16():
    results = results_of("no_bfloat16")
    narrow, wide = results["rows"]["16bit"], results["rows"]["wide"]
    assert results["environment"]["gpu"] == "NVIDIA H200"
    assert narrow["eager"]["plan_gib"] == pytest.approx(6.5, rel=0.03) and results["t4_stock_gib"] == 6.507
    yield f"took {narrow['eager']['tensors_gib']:.2f} GiB"
    yield f"within {short(narrow['logits']['max_abs'])} of stock's"
    yield f"a step takes {100 * (1 - narrow['auto']['tok_s'] / wide['auto']['tok_s']):.0f} % less time"
    assert all(row["tensors_gib"] <= row["plan_gib"] for one in (narrow, wide) for row in one.values() if "plan_gib" in row)


def check_page(texts, name):
    """Assert that a page of docs/ has every text of a function that makes them of the results."""
    page = " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())
    assert not [text for text in texts() if " ".join(text.split()) not in page]


CASES = {
    without_bfloat16: "plan-for-another-card",
    holds: "operate", holds_in_limits: "limits", media_memory: "operate",
    staging: "benchmarks", predictions: "read-a-plan", prompts: "benchmarks",
    towers: "benchmarks", prompt_kernels: "benchmarks", adapters_inside: "benchmarks",
    adapters_inside_decided: "decisions/0026-adapters-inside-products", first_tokens_beside_copies: "benchmarks",
    small_card_goals: "benchmarks", link_shares: "benchmarks", whole_decoder: "benchmarks",
    same_first_tokens: "benchmarks", prompt_goals: "benchmarks", prompts_alone: "operate",
    prompts_with_adapters_decided: "decisions/0026-adapters-inside-products",
    last_layers_decided: "decisions/0027-last-layers-in-step-kernels",
    towers_decided: "decisions/0019-towers-layer-by-layer",
    first_tokens_decided: "decisions/0025-one-memory-for-prompts",
    second_turns: "decisions/0017-prefix-cache-by-size",
    on_a_cpu: "benchmarks", server_load: "server-under-load", attackers: "server-under-load",
    steps: "decisions/0007-adapters-by-table", kv8: "fit-a-model", kv_pages: "operate", head8: "8-bit-head",
    head8_in_a_plan: "read-a-plan",
    merging: "merge-in-little-memory", first_tokens: "run-on-a-cpu", threads: "run-on-a-cpu", on_ray: "on-a-cluster",
}  # fmt: skip


@each("texts", CASES, where=lambda texts: texts.__name__)
def test_figures_of_a_page_are_those_of_the_results(texts):
    check_page(texts, CASES[texts])


def test_the_divergence_that_a_plan_names_is_the_largest_of_the_demos_adapters_and_formats():
    (head,) = [run["demo"] for run in results_of("head8")["runs"] if "demo" in run]
    assert short(HEAD8_KL) == short(max(row["kl_mean"] for row in head))
    assert {(row["adapter"], row["quant"]) for row in head} == {
        (adapter, quant) for adapter in (None, *ADAPTERS) for quant in ("nf4-dq", "none")
    }
    kept = results_of("kv8")["runs"][0]["demo"]
    assert short(KV8_KL) == short(max(row["token"]["kl_mean"] for row in kept))


@each("page", sorted((ROOT / "docs").rglob("*.md")))
def test_files_of_results_that_a_page_names_exist(page):
    named = {
        part.split(".json")[0] for part in page.read_text(encoding="utf-8").split("bench/results/")[1:] if ".json" in part[:40]
    }
    assert named <= {Path(file).stem for file in RESULTS.glob("*.json")}
