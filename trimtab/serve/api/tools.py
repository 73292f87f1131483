"""Tools and tool calls of a request become those of a job, checked against the limits before anything waits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError
from trimtab.serve.api.body import BodyLimits, JsonCounter
from trimtab.serve.api.schemas import ChatRequest, ToolChosen
from trimtab.serve.contract.plain_values import check_values
from trimtab.serve.contract.settings import Limits
from trimtab.serve.grammar.call_grammar import NO_PARAMETERS
from trimtab.serve.grammar.schema import check_ends, check_options, check_patterns
from trimtab.serve.grammar.schema_cost import check_cost


def calls_of(body: ChatRequest, limits: Limits) -> dict[str, Any]:
    """Return a job's fields of tools and of the chat template. Errors: RequestError."""
    return {**_tools_of(body, limits), "template_kwargs": _template_kwargs(body)}


def _tools_of(body: ChatRequest, limits: Limits) -> dict[str, Any]:
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("none", "auto"):
            raise RequestError("has no effect without tools", field="tool_choice")
        return {}
    if len(body.tools) > limits.tools:
        raise RequestError(f"has more than {limits.tools} tools", field="tools")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    check_values(tools, field="tools")
    if len(json.dumps(tools)) > limits.tools_bytes:
        raise RequestError(f"is larger than {limits.tools_bytes} bytes", field="tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name", field="tools")
    if choice == "none":
        return {}
    must_call = "" if choice == "required" else choice.function.name if isinstance(choice, ToolChosen) else None
    if must_call and must_call not in names:
        near = near_names(must_call, names)
        raise RequestError("is not one of the tools", field="tool_choice.function.name", allowed=names[:8], near=near)
    # One strict tool constrains the calls of all tools: the tool of a call is unknown before it is written.
    is_strict = any(tool["function"].get("strict") for tool in tools)
    for place, tool in enumerate(tools):
        function, field = tool["function"], f"tools[{place}].function"
        function.setdefault("parameters", NO_PARAMETERS)
        if must_call is not None or is_strict:
            check_options(function["parameters"], field=f"{field}.parameters")
            check_ends(function["parameters"], field=f"{field}.parameters")
        function.pop("strict", None)
    if must_call is not None or is_strict:
        functions = [tool["function"] for tool in tools]
        compiled = [one["parameters"] for one in functions if must_call in (None, "", one["name"])]
        check_patterns(compiled, field="tools", are_tools=True)
        check_cost(compiled, field="tools")
    several = body.parallel_tool_calls is not False
    holds_calls = is_strict and must_call is None
    return {"tools": tools, "must_call": must_call, "holds_calls": holds_calls, "several_calls": several}


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    kwargs = {} if body.chat_template_kwargs is None else body.chat_template_kwargs.model_dump(exclude_none=True)
    if body.reasoning_effort is not None:
        if "reasoning_effort" in kwargs:
            raise RequestError("give it once", field="chat_template_kwargs.reasoning_effort")
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


def beside(message: Any, place: int, limits: Limits) -> dict[str, Any]:
    """Return the fields of a message other than its role and content. Errors: RequestError."""
    fields_of_job: dict[str, Any] = {}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name, None):
            fields_of_job[name] = getattr(message, name)
    if calls := getattr(message, "tool_calls", None):
        if len(calls) > limits.tools:
            raise RequestError(f"has more than {limits.tools} calls", field=f"messages[{place}].tool_calls")
        fields_of_job["tool_calls"] = [
            {
                "id": call.id, "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments, f"messages[{place}].tool_calls[{number}].function.arguments", limits
                    ),
                },
            }
            for number, call in enumerate(calls)
        ]  # fmt: skip
    elif message.content is None:
        raise RequestError("is missing", field=f"messages[{place}].content")
    return fields_of_job


def arguments_of(text: str, field: str, limits: Limits) -> dict[str, Any]:
    """Return a call's arguments, which are sent as the text of a JSON object. Errors: RequestError."""
    data = text.encode("utf-8", "replace")
    try:
        JsonCounter(BodyLimits(len(data) + 1, len(data) + 1, limits.json_values, limits.json_depth)).feed(data)
        arguments = json.loads(text or "{}")
    except RequestError as exc:
        raise RequestError(exc.reason, field=field) from exc
    except ValueError as exc:
        raise RequestError("is not JSON", field=field) from exc
    if not isinstance(arguments, dict):
        raise RequestError("is not a JSON object", field=field)
    check_values(arguments, field=field)
    return arguments


def with_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the function's name added to each tool's answer, because some templates write it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def check_results(messages: Sequence[Mapping[str, Any]], ignored: list[str] | None = None) -> None:
    """Check that each tool message has a call, and that each call's tool messages directly follow it, as in OpenAI's
    API.

    ignored: set for the names of fields that break the rule (None: the first one is refused). Errors: RequestError.
    """
    made: list[str] = []
    waiting: set[str] = set()
    caller = ""  # the field of the calls
    for place, message in enumerate([*messages, {"role": ""}]):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in made:
                reason = "is not the id of a call" if made else "no tool_calls come before this message"
                hint = "A tool message follows the assistant message whose tool_calls have its id"
                error = RequestError(
                    reason, field=f"messages[{place}].tool_call_id", value=message.get("tool_call_id"), allowed=made[:8],
                    hint=hint,
                )  # fmt: skip
                _refuse(error, ignored)
            waiting.discard(message.get("tool_call_id", ""))
            continue
        if waiting:
            names = ", ".join(one for one in made if one in waiting)
            hint = "Send a tool message for each call before the next message"
            _refuse(RequestError(f"no tool message answers {names[:400]}", field=caller, hint=hint), ignored)
        made = [call["id"] for call in message.get("tool_calls", ())]
        waiting, caller = set(made), f"messages[{place}].tool_calls"


def _refuse(error: RequestError, ignored: list[str] | None) -> None:
    if ignored is None:
        raise error
    ignored.append(error.field)
