"""`trimtab run --prompts`: prompts of a file are decoded together, and answers are appended to a file as they finish."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import Any

from trimtab.cli.commands.prompts_file import AnswersFile, Doubts, PromptLine, check_answers_file, read_prompts
from trimtab.cli.flags.flags import answer_length, check_folder_of, chosen, decode_of, plan_or_request, sampling_options, system_of
from trimtab.cli.flags.opening import opened, planned, say_fallbacks
from trimtab.cli.flags.output import print_json, print_text
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning import Plan
from trimtab.process import phases

ROWS = 4


def run_many(options: argparse.Namespace) -> int:
    """Answer a file of prompts. Returns the exit code: that of RequestError if a prompt could not be answered."""
    answering, decode, system = sampling_options(options), decode_of(options), system_of(options)
    for flag, value in (("PROMPT", options.prompt), ("--prompt-file", options.prompt_file), ("--image", options.image),
                        ("--audio", options.audio)):  # fmt: skip
        if value:
            raise RequestError("has no effect with --prompts", field=flag, hint="Set it in the file")
    if options.out is None:
        raise RequestError("--prompts needs a file for the answers", field="--out")
    check_folder_of(options.out, "--out")
    check_answers_file(options.out)
    lines = images = 0
    has_unnamed = False  # a prompt without its own adapter
    doubts = Doubts()
    phases.begin("reading the prompts")
    for line in read_prompts(options.prompts):
        lines, images = lines + 1, max(images, line.images)
        doubts.add(line)
        has_unnamed = has_unnamed or not (isinstance(line.request, RequestError) or "adapter" in line.request)
    if not lines:
        raise RequestError("holds no prompt", field="--prompts", value=options.prompts)
    counted = {"images": max(images, 1), "batch": ROWS if options.rows is None else options.rows}
    counted |= answer_length(options.max_new_tokens)
    source = plan_or_request(options, **counted, head="auto", dtype="auto", decode=decode)
    adapter = chosen(options, source, base_of_several=not has_unnamed)
    _say_wrong(options, doubts, lines, (source.request if isinstance(source, Plan) else source).adapters)
    plan = planned(source)
    defaults = {"system": system, "adapter": adapter, **answering}
    answers = AnswersFile(options.out, _header(plan, defaults, decode, options.stop_at_turn_end))
    with closing(answers):
        answers.open()
        left = [not isinstance(line.request, RequestError) for line in read_prompts(options.prompts) if not answers.check(line)]
        waiting = len(left)
        summary = {"prompts": lines, "answered_before": lines - waiting, "answered": 0, "errors": 0, "out": options.out}
        if any(left):
            try:
                _answer(options, plan, decode, defaults, answers, waiting, summary)
            except TrimtabError:
                if summary["answered"] and not options.json:  # these are valid, and the next run continues after them
                    print_text(_text(summary), file=sys.stderr)
                raise
        elif left:  # errors need no model
            for line in read_prompts(options.prompts):
                if isinstance(line.request, RequestError):
                    _add(answers, summary, line, line.request)
    if options.json:
        print_json(summary)
    else:
        print_text(_text(summary), file=sys.stderr)
    return 2 if summary["errors"] else 0


def _say_wrong(options: argparse.Namespace, doubts: Doubts, lines: int, names: Collection[str]) -> None:
    """Say on stderr how many prompts cannot be answered, and why the first cannot, before anything is loaded. Errors:
    RequestError where none can and no answers are there yet."""
    count, first = doubts.with_adapters(names)
    if first is None:
        return
    if count == lines and not os.path.exists(options.out):
        raise RequestError(
            f"no line can be answered; the first: {first}", field="--prompts", value=options.prompts,
            hint="Each line is one JSON object with a prompt, or messages",
        )  # fmt: skip
    if not options.json:
        print_text(f"{count} of {lines} prompts cannot be answered; the first: {first}", file=sys.stderr, flush=True)


def _header(plan: Plan, defaults: Mapping[str, Any], decode: str, stop_at_turn_end: bool | None) -> dict[str, Any]:
    """Return the settings that decide the answers. Budgets, rows and placements are omitted: they change answers only by
    rounding."""
    request = plan.request
    return {
        "model": request.model, "model_files": [list(stamp) for stamp in plan.checkpoint_stamps],
        "adapters": dict(request.adapters),
        "adapter_files": {name: [list(one) for one in stamps] for name, stamps in plan.adapter_stamps.items()},
        "quant": request.quant, "dtype": request.dtype, "head": plan.execution.head, "decode": decode,
        **({} if stop_at_turn_end is None else {"stop_at_turn_end": stop_at_turn_end}),
        "context": request.context_tokens, "options": dict(defaults), **({} if request.kv == "full" else {"kv": request.kv}),
    }  # fmt: skip


def _answer(
    options: argparse.Namespace, plan: Plan, decode: str, defaults: Mapping[str, Any], answers: AnswersFile,
    waiting: int, summary: dict[str, Any],
) -> None:  # fmt: skip
    """Answer the unanswered prompts, and count them."""
    lines: list[PromptLine] = []
    sampling = {name: value for name, value in defaults.items() if name not in ("system", "adapter")}
    question = {name: value for name, value in defaults.items() if name in ("system", "adapter") and value is not None}
    done, count = 0, phases.counting("answering prompts,")

    def add(line: PromptLine, result: Any) -> None:
        nonlocal done
        _add(answers, summary, line, result)
        done += 1
        count(done, waiting)

    def requests() -> Iterator[Mapping[str, Any]]:
        for line in read_prompts(options.prompts):
            if answers.check(line):
                continue
            if isinstance(line.request, RequestError):
                add(line, line.request)
                continue
            lines.append(line)
            yield {**question, **line.request}

    with opened(plan, decode, stop_at_turn_end=options.stop_at_turn_end, is_told=not options.json) as model:
        count(done, waiting)
        results = model.batch_as_finished(requests(), rows=plan.request.batch, errors="return", **sampling)
        with closing(results) as answer:  # type: ignore[type-var]
            for index, result in answer:
                add(lines[index], result)
        say_fallbacks(model)


def _add(answers: AnswersFile, summary: dict[str, Any], line: PromptLine, result: Any) -> None:
    """Write one answer or error, and count it."""
    if isinstance(result, RequestError):
        answers.add(line, {"error": {"class": "RequestError", "message": str(result), "field": result.field}})
        summary["errors"] += 1
        first = summary.get("first_error")
        if first is None or line.number < first["line"]:
            summary["first_error"] = {"line": line.number, "message": str(result)}
    else:
        answers.add(line, _values(result))
        summary["answered"] += 1


def _values(answer: Any) -> dict[str, Any]:
    values = {
        "text": answer.text, "finish_reason": answer.finish_reason, "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": len(answer.token_ids),
    }  # fmt: skip
    if answer.logprobs:
        values["logprobs"] = [{"token_id": one.token_id, "logprob": one.logprob, "top": one.top} for one in answer.logprobs]
    return values


def _text(summary: Mapping[str, Any]) -> str:
    text = f"{summary['out']}: {summary['answered']} answered"
    if summary["answered_before"]:
        text += f", {summary['answered_before']} were answered before"
    if summary["errors"]:
        where, message = f"line {summary['first_error']['line']}: ", summary["first_error"]["message"]
        text += f", {summary['errors']} failed (their lines have the error); the first: {where}{message.removeprefix(where)}"
    return text
