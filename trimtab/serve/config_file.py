"""Which settings does the TOML file of `trimtab serve --config FILE` give?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trimtab.adapter_names import without_demo_name
from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError, choices_text
from trimtab.request import token_count
from trimtab.serve.contract.plain_values import is_number
from trimtab.serve.contract.quotas import KeyLimits
from trimtab.serve.contract.settings import Limits
from trimtab.serve.worker.registry import read_toml, refuse

# Keys of a file that are no flags.
TABLES = ("models", "limits", "keys", "adapters")
# Flags that make no sense in a file, or have a separate table.
NOT_HERE = ("help", "config", "json", "limit", "adapter", "print_config")
KEY_FIELDS = ("key", "key_file", "concurrent", "requests_per_minute", "tokens_per_day")
# Values that are paths.
PATHS = ("api_key_file", "admin_key_file", "adapter_root", "offload_dir", "device_map", "max_memory", "plan")


def apply_config(options: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options, with the file's values for flags that were not given. `named_keys` holds the file's keys: key ->
    limits.

    Errors: RequestError, CheckpointError with every problem of the file. A key is a flag's name with underscores. A flag on the
    command line overrides the file. Relative paths are relative to the file.
    """
    path = Path(options.config)
    table, folder = read_toml(path, "--config"), path.parent
    actions = {one.dest: one for one in parser._actions if one.dest not in NOT_HERE and one.dest != argparse.SUPPRESS}
    made, problems = dict(vars(options)), list[str]()
    for name, value in table.items():
        if name in TABLES:
            continue
        action = actions.get(name)
        if action is None:
            near = near_names(name, [*actions, *TABLES])
            listed = choices_text((), near) or " (`trimtab serve --help` lists the flags; a key is a flag's name with _ for -)"
            problems.append(f"unknown key {name!r}{listed}")
            continue
        try:
            read = _value(action, value, folder)
        except ValueError as exc:
            problems.append(f"{name}: {exc}")
            continue
        if getattr(options, name) == action.default:
            made[name] = read
    problems += _limits(made, options, table.get("limits", {}))
    problems += _adapters(made, options, table.get("adapters", {}), folder)
    made["named_keys"], wrong_keys = _keys(table.get("keys", {}), folder)
    problems += wrong_keys
    if made["plan"] is not None and options.plan is None:
        if made["model"] is not None:
            problems.append("plan: cannot be combined with a model: both name the model")
        made["model"] = made["plan"]
    if "models" in table:
        if made["model"] is not None:
            problems.append("models: give either [models.NAME] tables or a model")
        made["model"] = str(path)
    elif made["model"] is None:
        problems.append("has no model: set model = or a [models.NAME] table")
    refuse(path, problems)
    return argparse.Namespace(**made)


def keys_of(options: argparse.Namespace) -> dict[str, str]:
    """Return flag -> key of the --config file, including MODEL, for every flag that is not on the command line.

    Empty for a command without such a file.
    """
    if getattr(options, "config", None) is None:
        return {}
    tables = {"adapter": "adapters", "limit": "limits"}
    keys: dict[str, str] = {}
    for action in options.parser._actions:
        is_in_file = action.dest in tables or action.dest not in (*NOT_HERE, argparse.SUPPRESS)
        if is_in_file and getattr(options, action.dest, None) == action.default:
            names = [name for name in action.option_strings if name.startswith("--")] or [action.dest.upper()]
            keys |= dict.fromkeys(names, tables.get(action.dest, action.dest))
    return keys


def _value(action: argparse.Action, value: Any, folder: Path) -> Any:
    """Return a flag's value as from the command line. Errors: ValueError with the problem."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if type(action).__name__ == "_AppendAction":
        if isinstance(value, Mapping):
            return [f"{key}={one}" for key, one in value.items()]
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        has_names = "=" in str(action.metavar)
        raise ValueError("must be a list of texts or a table" if has_names else 'must be a list of texts, such as ["..."]')
    if isinstance(value, str) and action.type is token_count:
        try:
            return token_count(value)
        except RequestError as exc:
            raise ValueError(f"{exc.value!r} {exc.reason}") from exc
    kind: Any = action.type
    is_float = isinstance(kind, type) and issubclass(kind, float)
    if is_float or action.type in (int, token_count):
        if not is_number(value) or (not is_float and not isinstance(value, int)):
            raise ValueError("must be a number" if is_float else "must be an integer")
        return kind(value) if is_float else value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a text")
    text = str(value)
    if action.choices is not None and text not in action.choices:
        raise ValueError(f"must be {', '.join(action.choices)}")
    if action.dest == "model":  # may be a hub id
        return str(folder / text) if without_demo_name(text, folder) == text and (folder / text).exists() else text
    is_json = action.dest in ("device_map", "max_memory") and text.strip().startswith("{")
    return str(folder / text) if action.dest in PATHS and not is_json else text


def _limits(made: dict[str, Any], options: argparse.Namespace, table: Any) -> list[str]:
    if not isinstance(table, Mapping):
        return ["limits: must be a table"]
    wrong = [f"limits.{name}: must be a number" for name, one in table.items() if not is_number(one)]
    known = [item.name for item in fields(Limits)]
    for name in table:
        if name not in known:
            wrong.append(f"limits.{name}: unknown limit{choices_text(known, near_names(name, known))}")
    made["limit"] = _beside(table, options.limit)
    return wrong


def _adapters(made: dict[str, Any], options: argparse.Namespace, table: Any, folder: Path) -> list[str]:
    if not isinstance(table, Mapping) or not all(isinstance(one, str) for one in table.values()):
        return ["adapters: must be a table of folders"]
    made["adapter"] = _beside({name: _full(one, folder) for name, one in table.items()}, options.adapter)
    return []


def _full(text: str, folder: Path) -> str:
    """Return PATH[:WEIGHT] with its path from the file's folder, or a name of the demo's with its folder."""
    name, colon, weight = text.partition(":")
    bundled = without_demo_name(name, folder)
    return str(folder / text) if bundled == name else f"{bundled}{colon}{weight}"


def _beside(table: Mapping[str, Any], flags: Sequence[str] | None) -> list[str] | None:
    """Return NAME=VALUE of a table, without names that a flag sets, followed by the flags."""
    flag_names = {flag.partition("=")[0] for flag in flags or ()}
    return [*(f"{name}={one}" for name, one in table.items() if name not in flag_names), *(flags or ())] or None


def _keys(tables: Any, folder: Path) -> tuple[dict[str, KeyLimits], list[str]]:
    """Return key -> limits, and all problems; a message never contains a key."""
    if not isinstance(tables, Mapping):
        return {}, ["keys: must be tables, as [keys.NAME]"]
    keys: dict[str, KeyLimits] = {}
    problems: list[str] = []
    for name, table in tables.items():
        try:
            key, limits = _key(name, table, folder)
        except RequestError as exc:
            problems.append(f"keys.{name}: {exc}")
            continue
        if key in keys:
            problems.append(f"keys.{name}: has the key of {keys[key].name}")
        keys[key] = limits
    return keys, problems


def _key(name: str, table: Any, folder: Path) -> tuple[str, KeyLimits]:
    if not isinstance(table, Mapping):
        raise RequestError("must be a table", field="keys")
    for item in table:
        if item not in KEY_FIELDS:
            raise RequestError("is not known", field=item, allowed=tuple(KEY_FIELDS), near=near_names(item, KEY_FIELDS))
    if ("key" in table) == ("key_file" in table):
        raise RequestError("give either key or key_file", field="key")
    if "key" in table:
        key = table["key"]
    else:
        try:
            key = (folder / str(table["key_file"])).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise RequestError("cannot be read", field="key_file", value=str(table["key_file"])) from exc
    if not isinstance(key, str) or not key:
        raise RequestError("holds no key", field="key")
    return key, KeyLimits(name=name, **{item: table[item] for item in KEY_FIELDS[2:] if item in table})
