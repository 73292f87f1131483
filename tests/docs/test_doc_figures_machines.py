"""Figures of pages measured on an H100 or on a CPU's server, as test_doc_figures.py has them of the other results."""

from tests.docs.test_doc_figures import ROOT, check_page, images, results_of, rounded
from tests.rules import each


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
    with_adapter = {(row["model"], row["tokens"], row["way"]): row["ms"] for row in rows if row["adapter"] and "ms" in row}
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


def whole(row):
    """Return a row's tokens per second without decimals: 1,362."""
    return f"{float(rounded(row['tok_s'], 0)):,.0f}"


def load_on_an_h100():
    one, eight, many, mixed = results_of("load_h100")["rows"]
    yield f"An H100 makes {whole(one)}, {whole(eight)} and {whole(many)}"
    yield f"below {eight['between_ms']['p99']:.1f} and {many['between_ms']['p99']:.1f} ms at 8 and 32 clients"
    yield (
        f"the first token comes after {many['ttft_ms']['p50']:.0f} ms, in 99 of 100 cases after "
        f"{many['ttft_ms']['p99']:.0f} at most"
    )
    before = results_of("load_h100")["before"]["rows"][:3]
    yield f"In another call it made {whole(before[0])}, {whole(before[1])} and {whole(before[2])}"
    first = before[2]["ttft_ms"]
    yield f"came after {first['p50']:.0f} ms, in 99 of 100 cases after {first['p99']:.0f} at most"
    yield f"With images and audio among the requests it makes {whole(mixed)}"


def how_fast():
    h100 = [row for row in results_of("prompts_h100")["rows"] if row["model"] == "e4b"]
    now = {row["way"]: row["ms"] for row in h100 if row["what"] == "picture 640x480"}
    yield f"first token takes {now['captured']:.1f} ms on an H100, stock's {now['stock']:.0f}"
    _, eight, many, _ = results_of("load_h100")["rows"]
    yield f"makes {whole(eight)} tokens per second with 8 clients and {whole(many)} with 32"
    (graph,) = [
        row["tok_s"] for row in results_of("decode")["rows"]
        if (row["model"], row.get("decode"), row.get("batch"), row.get("adapter_rank"), row["placement"], row["run"])
        == ("e4b", "graph", 1, 8, "resident", 4) and "ms" in row
    ]  # fmt: skip
    yield f"in this form makes {graph:.1f} tokens per second with an adapter"


def load_goals():
    _, eight, many, mixed = results_of("load_h100")["rows"]
    yield f"| 8 clients, tokens/s | 1,500 | 1,316; H100 {whole(eight)} | - |"
    yield f"| 32 clients, tokens/s | 2,400 | 3,400; H100 {whole(many)} |"
    yield f"| 1,000 | H100 {whole(mixed)} |"
    yield f"| 80 % | H100 {of_the_base():.1f} % |"
    times = [row["between_ms"] for row in (eight, many)]
    assert all(one["p99"] < 3 * one["p50"] for one in times)
    yield " and ".join(f"{one['p99']:.1f} ms of {one['p50']:.1f}" for one in times)


def of_the_base():
    """Return the tokens per second with 32 adapters on 32 rows, in percent of those of the base alone."""
    adapters, base = results_of("load_many")["rows"]
    assert (adapters["adapters"], base["adapters"]) == (32, 0)
    return 100 * adapters["tok_s"] / base["tok_s"]


def many_adapters():
    yield f"makes {of_the_base():.0f} % of the tokens per second that it makes for the base model alone"


def many_adapters_decided():
    yield f"A later version makes {of_the_base():.1f} %"


def batch_times():
    """Return the milliseconds of a batch with prompts in common passes and one by one, by the tokens of a prompt."""
    rows = results_of("batch_prompts")["rows"]
    assert {(row["prompts"], row["answer"], row["rows"]) for row in rows} == {(64, 16, 32)}
    ms = {(row["tokens"], row["way"]): row["ms"] for row in rows}
    return {tokens: (ms[tokens, "together"], ms[tokens, "one by one"]) for tokens in (16, 64, 128)}


def saved_by_passes():
    return [100 * (1 - together / alone) for together, alone in batch_times().values()]


def batch_prompts():
    for (tokens, (together, alone)), saved in zip(batch_times().items(), saved_by_passes(), strict=True):
        yield f"| {tokens} | {together:,.0f} | {alone:,.0f} | {saved:.0f} % |"
    yield results_of("batch_prompts")["environment"]["gpu"]


def latest_cards(gpu):
    """Return the last row of each case that ran on such a GPU, by model, size, head, copies and engine."""
    cards = results_of("cards")
    return {
        (row["model"], row["card_gib"], row["head"], row.get("copies", 1), row.get("engine", "trimtab")): row
        for row in cards["rows"]
        if gpu in row.get("gpu", cards["environment"]["gpu"])
    }


def runs_of_cards():
    rows = latest_cards("H100")
    runs = {}
    for (model, gib, *_), row in rows.items():
        runs.setdefault(row["run"], set()).add((model, gib))
    assert runs.pop(17) == {("qwen3-8b", 5)} and runs.pop(21) == {("e4b", 3.75)} and runs.pop(11) == {("qwen3-8b", 0)}
    yield "Those of an H100 are of run 20, but for Qwen3-8B (run 17), E4B on 3.75 GiB (run 21) and stock (run 11)"
    assert set(runs) == {20}
    plain = {
        (gpu, *case[:4])
        for gpu in ("H100", "H200")
        for case, row in latest_cards(gpu).items()
        if case[4] == "trimtab" and not row.get("mixed")
    }
    assert plain == {("H200", "qwen3-8b", 5, "auto", 1)}
    yield "trimtab's are after 200 mixed requests, but for Qwen3-8B on an H200"


def spare_of_cards():
    spare = {
        case: (row["planned_gib"] - row["process_gib"]) * 1024
        for case, row in latest_cards("H100").items() if case[4] == "trimtab"
    }  # fmt: skip
    small = [one for (_, gib, *_), one in spare.items() if 0 < gib <= 5]
    (wide,) = [row for case, row in latest_cards("H100").items() if case[:2] == ("e4b", 6)]
    share = 100 * (1 - wide["process_gib"] / wide["planned_gib"])
    yield (
        f"H100 {min(small):.0f} to {max(small):.0f} MiB up to 5 GiB, {spare['e4b', 6, 'full', 1, 'trimtab']:.0f} MiB "
        f"({share:.1f} %) on 6 GiB"
    )


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
    pictures: "benchmarks", prompts_on_an_h100: "benchmarks", load_on_an_h100: "server-under-load", load_goals: "benchmarks",
    how_fast: "how-fast", many_adapters: "operate", many_adapters_decided: "decisions/0028-adapters-beside-products",
    batch_prompts: "many-prompts", runs_of_cards: "benchmarks", spare_of_cards: "benchmarks", together: "operate",
    second_turns: "decisions/0018-unpacked-weights",
}  # fmt: skip


@each("texts", CASES, where=lambda texts: texts.__name__)
def test_figures_of_a_page_are_those_of_the_results(texts):
    check_page(texts, CASES[texts])


def _range(values: list[float], form: str) -> str:
    ends = [form.format(value) for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def test_steps_between_tokens_on_a_cpu():
    rows = results_of("load_cpu_steps")["rows"]
    page = (ROOT / "docs" / "server-under-load.md").read_text(encoding="utf-8")
    figures = (("p99_steps", "{:.1f}"), ("tok_s", "{:.0f}"), ("ttft_ms", "{:.0f}"))
    for tokens, clients in sorted({(row["text_tokens"], row["clients"]) for row in rows}):
        cells = []
        for name, form in figures:
            found = [
                row[name]["p50"] if name == "ttft_ms" else row[name]
                for row in rows
                if (row["text_tokens"], row["clients"], row["version"]) == (tokens, clients, "behind")
            ]
            cells.append(_range(found, form))
        line = f"| {tokens} | {clients} | {' | '.join(cells)} |"
        assert line in page, line


def test_a_prediction_for_a_cpu_is_within_a_factor_of_two():
    parts = results_of("cpu_predictions")
    rows = [row for name in ("avx512", "avx2") for row in parts[name]["rows"].values()]
    ratios = [row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] for row in rows]
    assert "factor of two of the measured rate" in (ROOT / "docs" / "read-a-plan.md").read_text(encoding="utf-8")
    assert len(ratios) == 32 and 0.5 <= min(ratios) <= max(ratios) <= 2


def test_verify_and_a_checked_merge_of_the_demo_take_less_than_25_cpu_seconds():
    found = {row["what"]: row["cpu_median_s"] for row in results_of("start_cpu")["rows"] if row["tree"] == "now"}
    assert max(found["trimtab verify, ended"], found["trimtab merge --check, ended"]) < 25
