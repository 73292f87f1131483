"""`trimtab plan`, `inspect`, `run` and `demo`: flags, a request, one library call, output."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab.adapter_names import MIX_FORM, parse_unweighted
from trimtab.adapters.file import DIVERGED
from trimtab.cli.commands.run_prompts import run_many
from trimtab.cli.flags.flags import (
    TEXT_FILE_BYTES,
    InPlaceOf,
    Number,
    add_answer_tokens,
    add_budgets,
    add_decode,
    add_device,
    add_dtype,
    add_placement,
    add_pull,
    add_sampling,
    answer_length,
    as_text,
    check_folder_of,
    check_media,
    chosen,
    decode_of,
    group_of,
    is_saved_plan,
    load_request,
    plan_or_request,
    read_text,
    sampling_options,
    system_of,
)
from trimtab.cli.flags.opening import end_text, opened, planned, say_beside, say_fallbacks
from trimtab.cli.flags.output import Command, Style, print_json, print_text, show
from trimtab.cli.flags.pull import pull_if_asked
from trimtab.cli.flags.wording import in_flags
from trimtab.errors import DoesNotFitError, RequestError, gib
from trimtab.planning.options import Option
from trimtab.planning.plan.plan import check_is_plan
from trimtab.planning.request.overrides import NO_GPU
from trimtab.process import phases
from trimtab.report.document import Block, Document, Facts, Items, Table, Text
from trimtab.request import LoadRequest

if TYPE_CHECKING:
    from trimtab.engine.batch.generate import Answer
    from trimtab.engine.decode.step_choice import Fallback
    from trimtab.planning import Plan

# `plan --card list`.
LIST = "list"
# For an unusable adapter: the code of AdapterError (`exit_codes.EXIT_CODES`).
SPOILED = 5


class ListOrCard(InPlaceOf):
    """--card: a card's name, or `list`, which needs no model."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values == LIST:
            super().__call__(parser, namespace, values, option_string)
        else:
            setattr(namespace, self.dest, values)


def add(command: Command) -> None:
    """Add the four commands."""
    planned = command("plan", run_plan, "plan the placement of every block of a model, without loading it")
    add_placement(planned, model_help="a checkpoint folder, or a hub id in the local cache", takes_plan=False)
    planned.add_argument(
        "--card", metavar="CARD", action=ListOrCard, other=next(action for action in planned._actions if action.dest == "model"),
        help='plan for another GPU, from estimates: "RTX 4060 8GB", or a size: 8GiB; `list` prints every profile',
    )  # fmt: skip
    request, output = group_of(planned, "largest request"), group_of(planned, "output")
    request.add_argument("--batch", type=int, metavar="N", help="rows decoded together (default: 1)")
    request.add_argument("--images", type=int, metavar="N", help="images of one prompt (default: 1)")
    request.add_argument("--audio-s", type=Number, metavar="S", help="seconds of audio of one prompt (default: 30)")
    add_answer_tokens(request)
    output.add_argument("--save", metavar="FILE", help="write the plan as JSON; `trimtab run FILE` loads it")
    output.add_argument("--picture", metavar="FILE", help="draw the plan as .svg")
    output.add_argument("--wide", action="store_true", help="print in 200 columns, independent of the terminal")
    output.add_argument("--options", action="store_true", help="also plan possible changes: memory and tokens per second of each")
    add_decode(planned, eager=False)

    inspected = command("inspect", run_inspect, "list the modules that an adapter targets, and those that a model has")
    inspected.add_argument("adapter", metavar="ADAPTER", help="an adapter folder in PEFT's format: [NAME=]PATH")
    inspected.add_argument("--model", metavar="MODEL", help="match every tensor of the adapter with this model")
    inspected.add_argument(
        "--patched", metavar="OUT", help="write a copy for stock PEFT, whose config names the inner linear layers of MODEL"
    )

    ran = command("run", run_run, "answer one prompt, or a file of prompts")
    add_placement(ran, model_help="a checkpoint folder, a hub id in the local cache, or a saved plan", weights=True)
    prompt = ran.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads standard input")
    asks, many = group_of(ran, "prompt"), group_of(ran, "many prompts")
    asks.add_argument("--prompt-file", metavar="FILE", action=InPlaceOf, other=prompt, help="read the prompt from a file")
    many.add_argument("--prompts", metavar="FILE", action=InPlaceOf, other=prompt, help="answer every prompt of a JSONL file")
    many.add_argument("--out", metavar="FILE", help="append the answers to this JSONL file; an interrupted run resumes")
    many.add_argument("--rows", type=int, metavar="N", help="prompts decoded together (default: 4)")
    asks.add_argument(
        "--use", metavar="NAME",
        help=f"the adapter, `base` for none, or a mix: {MIX_FORM} (default: the only one, or all if they have weights)",
    )  # fmt: skip
    group_of(ran, "output").add_argument(
        "--memory", action="store_true", help="print each share of the device's memory, planned and measured"
    )
    asks.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; repeatable")
    asks.add_argument("--audio", action="append", default=[], metavar="FILE", help="an audio file; repeatable")
    asks.add_argument("--system", metavar="TEXT", help="the system message")
    asks.add_argument("--system-file", metavar="FILE", help="read the system message from a file")
    add_pull(ran)
    add_decode(ran)
    add_sampling(ran)

    shown = command("demo", run_demo, "try trimtab on a small model: plan, load, answer, verify")
    add_budgets(shown, "budget of the split model")
    add_dtype(shown, "bfloat16")
    add_device(shown)


def run_plan(options: argparse.Namespace) -> int:
    from trimtab.api import PlanInputs, device_budget_bytes, plan_options, plan_request
    from trimtab.checkpoint.end_tokens import unlisted_end
    from trimtab.checkpoint.folder import GENERATION, find_folder, unapplied_rules
    from trimtab.planning.options import options_document
    from trimtab.planning.values.cards import find_card
    from trimtab.process.json_file import read_object
    from trimtab.report.charts import check_path
    from trimtab.report.render import WIDEST

    if options.card == LIST:
        return _print_cards(options)
    if is_saved_plan(options):
        check_is_plan(options.model)
        raise RequestError(
            "is a saved plan", field="MODEL", value=options.model,
            hint="Give the model to plan again, or load the plan: trimtab run",
        )  # fmt: skip
    request = load_request(options, head="auto", dtype="auto", decode=options.decode or "auto")
    if options.picture:
        check_path(options.picture)
    for flag, path in (("--picture", options.picture), ("--save", options.save)):
        check_folder_of(path, flag)
    inputs = PlanInputs()

    def changes(budget_bytes: int) -> list[Option]:
        return [replace(one, what=_as_flags(one.what)) for one in plan_options(request, budget_bytes, inputs=inputs)]

    try:
        plan = plan_request(request, inputs=inputs)
    except DoesNotFitError as exc:
        if options.options:
            is_of_gpu = exc.device.startswith("cuda")
            helpful = changes(exc.budget_bytes if is_of_gpu else device_budget_bytes(request, inputs))
            if options.json:
                exc.options = tuple(asdict(one) for one in helpful)
            else:
                card = None if request.card is None else find_card(request.card)
                show(options_document(helpful, card=card))
                print_text()
        raise
    helpful = changes(plan.gpu_budget_bytes) if options.options else []
    if options.save:
        plan.save(options.save)
    if options.picture:
        from trimtab.planning.plan.chart import draw

        draw(plan, options.picture)
    if options.json:
        print_json(plan.to_json() | ({"options": [asdict(one) for one in helpful]} if options.options else {}))
        return 0
    show(plan.document(), width=WIDEST if options.wide else None)
    say_beside(plan.request.adapters)
    if helpful:
        print_text()
        show(options_document(helpful, card=plan.card))
    if (token := unlisted_end(find_folder(request.model))) is not None:
        print_text(
            f"the tokenizer's end token {token} is not among the end tokens of the checkpoint: `run`, `chat` and `serve` end "
            "answers there if the chat template ends turns with it; transformers' generate goes on", file=sys.stderr,
        )  # fmt: skip
    file = find_folder(request.model) / GENERATION
    for name, rules in (unapplied_rules(read_object(file, GENERATION)) if file.is_file() else {}).items():
        print_text(f"{name}: {rules}", file=sys.stderr)
    if plan.execution_device == "cpu" and request.device == "auto" and request.gpu_memory_bytes is not None:
        print_text(f"this plan is for the CPU. {in_flags(NO_GPU, None, {'card': '--card'})}", file=sys.stderr)
    for path in (options.save, options.picture):
        if path:
            print_text(f"written: {path}", file=sys.stderr)
    return 0


def _print_cards(options: argparse.Namespace) -> int:
    """Print the cards that have profiles. Errors: RequestError for a model, which would not be planned."""
    from trimtab.planning.values.cards import cards_document, known_cards

    if options.model is not None:
        raise RequestError("prints the profiles and plans nothing", field="--card", value=LIST, hint="Omit MODEL")
    if options.json:
        print_json({"cards": [asdict(card) | {"title": card.title} for card in known_cards()]})
    else:
        show(cards_document())
    return 0


def _as_flags(change: str) -> str:
    """Return a changed argument in its command-line form."""
    if change.startswith("place="):
        return " ".join(f"--place {part}={tier}" for part, tier in ast.literal_eval(change[6:]).items())
    if change.startswith("card="):
        return f'--card "{ast.literal_eval(change[5:])}"'
    names = ("head", "kv", "kv_tokens", "context", "batch", "images", "audio_s", "gpu_memory")
    return in_flags(change, None, {name: f"--{name.replace('_', '-')}" for name in names})


def run_inspect(options: argparse.Namespace) -> int:
    if options.patched is not None and options.model is None:
        raise RequestError("has no effect without --model", field="--patched", value=options.patched)
    if not os.path.exists(options.adapter):  # pathlib raises for a folder that cannot be entered
        options.adapter = next(iter(parse_unweighted([options.adapter], field="ADAPTER").values()))
    report = trimtab.inspect(options.adapter, model=options.model)
    if options.patched is not None:
        report |= {"patched": _patch(options)}
    if options.json:
        print_json(report)
    elif options.patched is not None:
        written = report["patched"]
        print_text(
            f"written: {written['written']}, {written['modules']} modules by\n  {written['target_modules']}\n"
            f"weights {'linked' if written['linked'] else 'copied'}, {written['renamed']} keys renamed; it does the same as "
            f"{options.adapter}"
        )
    else:
        show(adapter_document(report))
    return SPOILED if report["not_finite"] else 0


def _patch(options: argparse.Namespace) -> dict[str, Any]:
    from trimtab.adapters.patch import write_patched
    from trimtab.api import modules_of
    from trimtab.checkpoint.folder import read_checkpoint

    return write_patched(options.adapter, modules_of(read_checkpoint(options.model)), options.patched)


def run_run(options: argparse.Namespace) -> int:
    if options.pull or options.revision is not None:
        pull_if_asked(options)
    if options.prompts is not None:
        return run_many(options)
    for flag, value in (("--out", options.out), ("--rows", options.rows)):
        if value is not None:
            raise RequestError("has no effect without --prompts", field=flag, value=value)
    answering, decode, prompt = sampling_options(options), decode_of(options), prompt_of(options)
    if not (prompt.strip() or options.image or options.audio):
        raise RequestError("is empty", field="PROMPT")
    question: dict[str, Any] = {
        "image": options.image or None, "audio": options.audio or None, "system": system_of(options),
    }  # fmt: skip
    plan, question["adapter"] = _plan_to_run(options, decode)
    with opened(plan, decode, stop_at_turn_end=options.stop_at_turn_end, is_told=not options.json) as model:
        if options.json:
            answer = model.answer(prompt, **question, **answering)
            shares = [one.to_json() for one in model.memory_shares()]
            shown = answer_json(answer, plan, model.memory(), question["adapter"], model.fallbacks)
            print_json(shown | {"memory_shares": shares})
            return 0
        phases.begin("answering")  # until the first piece of the answer takes the line's place
        answer = _stream(model, prompt, {**question, **answering})
        note = end_text(answer, plan.request.context_tokens, has_stop_texts=bool(options.stop))
        if note and (options.max_new_tokens is None or not answer.text.strip()):  # a limit that was set needs no note
            print_text(note, file=sys.stderr)
        say_fallbacks(model)
        if options.memory:
            from trimtab.engine.memory_shares import shares_document

            show(shares_document(model.memory_shares()), file=sys.stderr)
        return 0


def _stream(model: trimtab.LoadedModel, prompt: str, question: Mapping[str, Any]) -> Answer:
    """Print an answer as it is generated, and return it."""
    from trimtab.engine.batch.generate import Timed

    shown: Callable[[str], str] = Style(True).printable if sys.stdout.isatty() else str
    inputs, request, adapter = model.question(prompt, question)
    timed = Timed(model, inputs, request)
    try:
        with model.answering(adapter), closing(iter(timed)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(shown(piece.text), end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print()
    return timed.answer


def prompt_of(options: argparse.Namespace) -> str:
    """Return the question: PROMPT, standard input for "-", or a file. Errors: RequestError for none or two of them."""
    if options.prompt_file is not None:
        if options.prompt is not None:
            raise RequestError("cannot be combined with PROMPT", field="--prompt-file", value=options.prompt_file, hint="Give one")
        return read_text(options.prompt_file, "--prompt-file")
    if options.prompt == "-":
        phases.begin("")  # the user may type here
        return as_text(sys.stdin.buffer.read(TEXT_FILE_BYTES + 1), "PROMPT", "-")
    return str(options.prompt)


def _plan_to_run(options: argparse.Namespace, decode: str) -> tuple[trimtab.Plan, Any]:
    """Return the plan, and the active adapter or mix."""
    # Arguments first: a file is not opened for an invalid request.
    counted = {"images": len(options.image), "head": "auto", "dtype": "auto", "decode": decode}
    counted |= answer_length(options.max_new_tokens)
    source = plan_or_request(options, **counted, audio_s=0.0)
    adapter = chosen(options, source)
    sound_s = check_media(options.image, options.audio)
    if isinstance(source, LoadRequest) and sound_s:
        source = load_request(options, **counted, audio_s=sound_s)
    return planned(source), adapter


def run_demo(options: argparse.Namespace) -> int:
    from trimtab.demo import demo

    options.model = str(demo.FOLDER / "base")
    say: Callable[[str], None] = (lambda text: None) if options.json else (lambda text: print_text(text, flush=True))
    report = demo.run(say, load_request(options))
    if options.json:
        print_json(report)
    return 0


SHOWN_PATHS = 5


def adapter_document(report: Mapping[str, Any]) -> Document:
    """Return what `trimtab inspect` says: a table of parts, then the effect on a model."""
    dtypes = ", ".join(f"{count} in {dtype}" for dtype, count in report["dtypes"].items())
    targets = report["target_modules"]
    rows = [
        ("adapter", report["path"]),
        ("made for", f"{report['base_model'] or 'not said'}, with peft {report['peft_version'] or 'not said'}"),
        ("holds", f"{report['tensors']} tensors, {gib(report['bytes'])} ({dtypes})"),
        ("config", ", ".join(f"{name} {value}" for name, value in report["config"].items()) or "all defaults"),
        ("targets", ", ".join(map(str, targets)) if isinstance(targets, list) else str(targets)),
    ]
    parts = [(part, str(count)) for part, count in report["parts"].items()]
    blocks: list[Block] = [Facts(rows), Table(("part", "tensors"), parts)]
    spoiled = report.get("not_finite") or []
    if spoiled:
        blocks.append(Text(f"cannot be used: {len(spoiled)} tensors hold values that are not finite", "bad"))
        blocks += [Items(_some(spoiled)), Text(DIVERGED)]
    return Document("", blocks if "targets" not in report else [*blocks, Facts(_match_rows(report))])


def _match_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    targets = dict(report["targets"])
    total = targets.pop("total")
    kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in targets.items() if count)
    ranks = ", ".join(f"{rank} ({count})" for rank, count in report["ranks"].items())
    scales = ", ".join(f"{scale} ({count})" for scale, count in report["scales"].items())
    rows = [
        *(
            ("model" * (not number), f"holds {form['name']} ({form['bits_per_value']:.2f} bits a value); on a GPU {form['on_gpu']}")
            for number, form in enumerate(report.get("model_formats", ()))
        ),
        ("applied", f"to {total} modules: {kinds}; {gib(report['bytes_attached'])} on the device, in float32"),
        ("ranks", f"{ranks or '-'}; scales {scales or '-'}"),
        *((name, f"on {report[key]} modules") for name, key in (("dora", "dora"), ("bias", "lora_bias")) if report[key]),
    ]
    for reason, count in Counter(row["reason"] for row in report["dropped"]).items():
        rows.append(("no effect", f"{count} tensors: {reason}"))
        rows += [("", name) for name in _some([row["key"] for row in report["dropped"] if row["reason"] == reason])]
    if report["remapped"]:
        rows.append(("remapped", f"{len(report['remapped'])} modules"))
        rows += [("", name) for name in _some([f"{row['from']} -> {row['to']}" for row in report["remapped"]])]
    return rows + [("note", note) for note in report["notes"]]


_KINDS = {
    "linear": "linears", "wrapped": "linears inside a wrapper", "embedding": "embeddings", "router": "routers",
    "saved": "saved whole", "experts": "stacks of experts",
}  # fmt: skip


def _some(names: Sequence[str]) -> list[str]:
    rest = [f"and {len(names) - SHOWN_PATHS} more (--json has all)"] if len(names) > SHOWN_PATHS else []
    return [*names[:SHOWN_PATHS], *rest]


def answer_json(
    answer: Answer, plan: Plan, memory: Mapping[str, int], adapter: str | None, fallbacks: Sequence[Fallback] = ()
) -> dict[str, Any]:
    """Return the output of `trimtab run --json`: the answer, its timings, measured and planned peaks, and the fallbacks."""
    return {
        "text": answer.text, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason,
        "max_new_tokens": answer.max_new_tokens,
        "adapter": adapter, "prompt_tokens": answer.prompt_tokens, "ttft_s": answer.ttft_s, "decode_s": answer.decode_s,
        "tokens_per_s": answer.tokens_per_s, "memory": dict(memory),
        "fallbacks": [{"what": one.what, "why": one.why} for one in fallbacks],
        "planned": {
            "gpu_peak_bytes": max(plan.gpu_peak_bytes, plan.gpu_load_peak_bytes),
            "gpu_budget_bytes": plan.gpu_budget_bytes, "host_peak_bytes": plan.host_peak_bytes,
            "host_budget_bytes": plan.host_budget_bytes,
        },
    }  # fmt: skip
