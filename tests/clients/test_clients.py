"""Official clients against a served demo model: the examples that each package brings in its own readme, run as they stand.

`make test-clients` makes the environments; TRIMTAB_CLIENTS_PYTHON names the interpreter, node_modules lies beside this file.
A readme's example is run if it stands alone and asks for what this API has; nothing in it is changed. The models that it names are
adapters of the server, and the address comes from the environment, as the clients read it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.http.test_app_openai import ENVIRONMENT, is_ready
from trimtab.demo.demo import FOLDER as DEMO

VARIABLE = "TRIMTAB_CLIENTS_PYTHON"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULES = HERE / "node_modules"
TIMEOUT_S = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no environment with the clients (make test-clients)"),
]
node = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(), reason="no node, or no node_modules (make test-clients)"
)
# What an example needs beyond the client and this API: other services, files, packages of their own.
BEYOND = re.compile(
    r"workload|azure|bedrock|provider|realtime|fine_tuning|fineTuning|files\.|https?://|flask|open\(|Aio|a2a|mcp|webhook|zod|next/",
    re.IGNORECASE,
)
ASKS = re.compile(r"(responses|chat\.completions|messages)(\.\w+)?\.create\(|completion\(")
# The fewest examples that each readme has to have: a readme that changed its form would otherwise test nothing.
FEWEST = {"openai": 8, "anthropic": 1, "litellm": 1, "js openai": 3}


def readme(package: str) -> str:
    """Return the readme of a Python package of the clients' environment."""
    code = f"from importlib.metadata import metadata as m; x = m({package!r}); print(x.get_payload() or x['description'])"
    return subprocess.run(
        [os.environ[VARIABLE], "-c", code], capture_output=True, text=True, check=True, encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    ).stdout  # fmt: skip


def examples(text: str, language: str, stands_alone: str) -> list[str]:
    blocks = re.findall(rf"```(?:{language})\n(.*?)```", text, re.DOTALL)
    found = [block for block in blocks if ASKS.search(block) and re.search(stands_alone, block) and not BEYOND.search(block)]
    return found if language != "python" else [block for block in found if compiles(block)]


def compiles(block: str) -> bool:
    try:
        compile(block, "example", "exec")
    except SyntaxError:  # an `await` outside of a function: a part of a program
        return False
    return True


def all_examples() -> dict[str, list[str]]:
    found = {
        name: examples(readme(name), "python", stands)
        for name, stands in (("openai", r"OpenAI\("), ("anthropic", r"Anthropic\("), ("litellm", "import completion"))
    }
    if MODULES.is_dir():
        found["js openai"] = examples(
            (MODULES / "openai" / "README.md").read_text("utf-8"), "ts|js", r"import OpenAI from 'openai'"
        )
    return found


@pytest.fixture(scope="module")
def readmes():
    return all_examples()


@pytest.fixture(scope="module")
def address(readmes):
    named = {
        name for blocks in readmes.values() for block in blocks for name in re.findall(r"""model[=:] ?["']([^"']+)["']""", block)
    }
    names = sorted({name.rpartition("/")[2] for name in named})
    command = [
        sys.executable, "-m", "trimtab", "serve", str(DEMO / "base"), "--name", "demo", "--quant", "none", "--dtype", "float32",
        "--context", "1152", "--device", "cpu", "--port", "0", "--rows", "4", "--resident-adapters", "2", "--grace", "1",
        *(word for name in names for word in ("--adapter", f"{name}={DEMO / 'adapters' / 'style'}")),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(line.split()[0] for line in process.stderr if line.startswith("http"))
        while not is_ready(found):
            assert process.poll() is None
        yield found
    finally:
        process.terminate()
        process.communicate(timeout=30)


def environment(address: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONIOENCODING": "utf-8",
        "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_BASE": f"{address}/v1", "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_BASE": address, "ANTHROPIC_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false",
    }  # fmt: skip


def run(command: list[str], address: str) -> str:
    done = subprocess.run(
        command, cwd=HERE, env=environment(address), capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("package", ["openai", "anthropic", "litellm"])
def test_the_examples_of_a_readme_run_as_they_stand(package, readmes, address, tmp_path):
    blocks = readmes[package]
    assert len(blocks) >= FEWEST[package], f"{package}: {len(blocks)} examples"
    for number, block in enumerate(blocks):
        file = tmp_path / f"{package}_{number}.py"
        file.write_text(block, encoding="utf-8")
        run([os.environ[VARIABLE], str(file)], address)


@node
def test_the_examples_of_openais_javascript_readme_run_as_they_stand(readmes, address, tmp_path):
    blocks = readmes["js openai"]
    assert len(blocks) >= FEWEST["js openai"], len(blocks)
    (tmp_path / "node_modules").symlink_to(MODULES)
    for number, block in enumerate(blocks):
        file = tmp_path / f"example_{number}.mjs"
        file.write_text(block, encoding="utf-8")
        run(["node", str(file)], address)


@node
def test_javascript_clients_call_tools_and_stream(address):
    said = json.loads(run(["node", "examples.mjs"], address))
    assert said["tool"] == ["tool_calls", "get_weather", ["city"]] and said["after"] == "string"
    assert said["response"] == ["function_call"] and said["embedding"] > 100
    assert said["anthropic"] == [True, True] and said["used"] == ["tool_use", "tool_use", ["city"]] and said["counted"]
    assert said["error"] == ["NotFoundError", 404, "not_found_error"]


def test_langchain_invokes_streams_calls_tools_and_embeds(address):
    said = json.loads(run([os.environ[VARIABLE], "langchain_examples.py"], address).splitlines()[-1])
    assert said["invoke"] == said["stream"] == said["responses"] == said["anthropic"] == said["anthropic stream"] != ""
    assert said["tool"] == said["anthropic tool"] == ["GetWeather", ["location"]]
    assert said["structured"] == "GetWeather" and said["after"] and said["tokens"] > 10 and said["embedding"] > 100
