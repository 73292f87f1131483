"""Chat templates: the text that transformers renders, within a budget, and errors that name the template and its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers.utils import chat_template_utils

import trimtab
from tests import talking, talking_families, tool_templates
from tests.raised import raised
from trimtab.engine.chat.answer_forms import form_of
from trimtab.engine.templates import costs
from trimtab.engine.templates.budget import render
from trimtab.engine.templates.costs import MAX_DEPTH, MAX_TEMPLATE_CHARS
from trimtab.errors import CheckpointError

DEMO = Path(trimtab.__file__).parent / "demo" / "base" / "chat_template.jinja"
PUBLISHED = {
    **tool_templates.TEMPLATES,
    **{name: value for name, value in vars(talking_families).items() if name.endswith("_TEMPLATE")},
    "demo": DEMO.read_text(encoding="utf-8"),
}
CALL = {"type": "function", "function": {"name": "now", "arguments": {"town": "Łódź", "n": [1, 2.5, None, True]}}}
CHAT = [
    {"role": "user", "content": " How is it <b>here</b>? "},
    {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "abcdefghi"}]},
    {"role": "tool", "content": "21", "name": "now", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "<think>\nno\n</think>\n\nwarm", "reasoning_content": "no"},
    {"role": "user", "content": "thanks"},
]
PARTS = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
# Every operation that has a rule, with the text that plain jinja2 makes of it.
OPERATIONS = """
{%- set ns = namespace(found=false, text='a') -%}
{%- macro twice(x, sep='-') -%}{{ x }}{{ sep }}{{ x }}{%- if varargs %}{{ varargs }}{% endif -%}{%- endmacro -%}
{%- for m in messages if m.role != 'tool' -%}
[{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}
{{ loop.cycle('o', 'e') }} {{ loop.previtem.role if loop.previtem }}]
{%- set ns.found = ns.found or 'tool_calls' in m -%}
{{- m['content'].split('</think>')[-1].lstrip('\\n') | trim | upper }}{{ m.get('name', '?') ~ 1 ~ none }}
{%- endfor -%}
{{ ns.found }}{{ twice('<b>', sep=2) }}{{ twice('x', '', 1, 2) }}{{ messages[::-1][0].content[1:-1] }}
{{ messages[0] == messages[-1] }}
{{ tools | tojson(indent=2) if tools else 'none' }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{{ messages | map(attribute='role') | unique | join(', ') }}{{ range(5) | sum }}{{ [3, 1, 2] | sort | join }}
{{ {'b': 1, 'a': 2} | dictsort }}
{{ 'a%sb%03d' % ('x', 7) }}{{ '%s-%s' | format(1, 'y') }}{{ '{:>5}|{a[0]!r}'.format('q', a=[1]) }}{{ 'x'.center(7) }}
{{ 'ab' | center(6) }}
{{ 'a\\nb' | indent(2, true) }}{{ 'aXbX'.replace('X', '__') }}{{ 'aXbX' | replace('X', '', 1) }}{{ '<&>' | e }}
{{ '<&>' | escape | upper }}
{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ 3 * 'ab' }}{{ [1] * 2 + [3] }}{{ 1.5 + 2 }}{{ -3 | abs }}{{ 2.567 | round(1) }}
{{ '12' | int + 1 }}
{{ 'a b c'.split() }}{{ 'a,b'.partition(',') }}{{ ', '.join(['x', 'y']) }}{{ 'Ab'.swapcase() }}
{{ 'abc'.startswith(('a', 'x')) }}{{ 'x' in 'xyz' }}
{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 'a b' | title }}
{{ 'a b c d e f' | truncate(5) }}{{ 'x y' | wordcount }}
{{ dict(a=1, b=2).items() | list }}{{ dict.fromkeys(['k'], 1) }}{{ {'a': 1}.keys() | first }}{{ ('a', 'b') | last }}
{{ 'abc' | reverse }}
{%- for k, v in {'z': 1, 'y': [2]} | items %}{{ k }}={{ v }};{% else %}no{% endfor -%}
{%- macro framed() %}[{{ caller(1) }}]{% endmacro -%}{%- call(x) framed() %}n{{ x }}
{% endcall -%}{%- filter upper %}low{% endfilter -%}{%- set block %}<i>{{ 1 }}</i>{% endset -%}{{ block | length }}
{%- autoescape true %}{{ '<' }}{{ '<' ~ '>' }}{{ '<' | safe }}{% endautoescape -%}{%- generation %}mine{% endgeneration -%}
{%- for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor -%}
{%- for node in [[1, [2]], 3] recursive %}{{ loop(node) if node is iterable else node }}{% endfor -%}
{{ nope | default('d') }}{{ nope is defined }}
{{ messages | groupby('role') | map(attribute='grouper') | join('/') }}{{ [1, 2] | max }}{{ 'ß'.upper() }}
{{ 'x' if 1 < 2 <= 2 and not 3 in [1, 2] }}
"""


@pytest.fixture
def tokenizer():
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token="<s>", eos_token="</s>"
    )


def stock(template: str, messages: list, tools: list | None) -> str:
    """Return what transformers' own environment renders, without anything of this package."""
    compiled = chat_template_utils._cached_compile_jinja_template(template)
    return compiled.render(
        messages=messages, tools=tools, documents=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("tools", [None, [tool_templates.WEATHER, tool_templates.NOW]], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", [CHAT, PARTS, CHAT[:1]], ids=["texts", "parts", "one"])
@pytest.mark.parametrize("name", [*PUBLISHED, "operations"])
def test_a_template_writes_what_transformers_writes(tokenizer, tmp_path, name, messages, tools):
    template = tokenizer.chat_template = PUBLISHED.get(name, OPERATIONS)
    if name == "operations" and messages is PARTS:
        pytest.skip("texts only")
    try:
        expected = stock(template, messages, tools)
    except (TemplateError, TypeError) as exc:
        error = raised(type(exc), render, tokenizer, messages, tmp_path, tools=tools, add_generation_prompt=True)
        assert str(error) == str(exc)
    else:
        assert render(tokenizer, messages, tmp_path, tools=tools, add_generation_prompt=True) == expected


def test_the_text_of_every_operation_is_no_error():
    assert len(stock(OPERATIONS, CHAT, None)) > 400


def test_a_long_chat_adds_to_the_budget_of_a_template_that_looks_at_every_pair(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "MAX_STEPS", 100)
    monkeypatch.setattr(costs, "MAX_CHARS", 100)
    tokenizer.chat_template = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for o in messages[loop.index:] %}"
        "{% if o.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ m.content | trim }}{{ ns.n }}{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * 500} for _ in range(120)]
    assert render(tokenizer, long, tmp_path) == "".join("x" * 500 + str(119 - place) for place in range(120))


# A chat that is written into one text, whose parts are added in two ways, and what else is done with texts of it.
GATHERS = {
    "sum": "ns.t + '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'",
    "concatenation": "ns.t ~ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n'",
}


@pytest.mark.parametrize("how", GATHERS)
def test_a_chat_of_thousands_of_turns_may_be_added_to_one_text(tokenizer, tmp_path, how):
    tokenizer.chat_template = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = " + GATHERS[how] + " %}{% endfor %}{{ ns.t }}"
    )
    long = [{"role": ("user", "assistant")[place % 2], "content": "x" * 100} for place in range(4000)]
    expected = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in long)
    assert render(tokenizer, long, tmp_path) == expected


@pytest.mark.parametrize("again", [
    "{% set ns.t = ns.t + 'x' %}", "{% set ns.l = ns.l + [ns.t] %}{% set ns.t = ns.t + 'x' %}",
    "{% set ns.u = ns.t %}{% set ns.t = ns.t + 'x' %}", "{% set ns.t = '' + ns.t + '' + '' + '' + '' + 'x' %}",
], ids=["one", "kept", "two", "empty"])  # fmt: skip
def test_a_text_that_is_written_again_for_ever_is_bounded_by_the_size_of_the_chat(tokenizer, tmp_path, again):
    tokenizer.chat_template = (
        "{% set ns = namespace(t='x' * 4000000, u='', l=[]) %}{% for i in range(99999) %}" + again + "{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * 100}] * 200
    with pytest.raises(CheckpointError, match="than a chat template may"):
        render(tokenizer, long, tmp_path)


def test_texts_are_translated_as_python_does(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ 'banana'.translate({97: 'oo', 98: none, 110: 120}) }}{{ 'ab'.translate('x' * 98) }}"
    assert render(tokenizer, CHAT[:1], tmp_path) == "ooxooxooxb"


GROW = "{% set ns = namespace(a=START) %}{% for i in range(60) %}{% set ns.a = STEP %}{% endfor %}{{ END }}"


def grow(start: str, step: str, end: str) -> str:
    return GROW.replace("START", start).replace("STEP", step).replace("END", end)


ATTACKS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "conditions": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "filters in loops": "{% for i in range(99999) %}{{ range(99999) | select('gt', 100000) | list | length }}{% endfor %}",
    "two calls each": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "literals": "{% for i in range(99999) %}{% autoescape true %}" + "x" * 9_999 + "{% endautoescape %}{% endfor %}",
    "times": "{{ 'a' * 10**9 }}", "times a list": "{{ ([1] * 10**9) | length }}", "power": "{{ (2 ** (10**9)) % 7 }}",
    "concatenation": grow("'aaaa'", "ns.a ~ ns.a", "ns.a | length"), "sum": grow("'aaaa'", "ns.a + ns.a", "ns.a | length"),
    "products": grow("3", "ns.a * ns.a", "ns.a % 7"), "shared lists": grow("[1]", "[ns.a, ns.a]", "ns.a"),
    "shared lists as JSON": grow("[1]", "[ns.a, ns.a]", "ns.a | tojson"),
    "compared": grow("[1]", "[ns.a, ns.a]", "ns.a == [ns.a]"), "hashed": grow("(1, 2)", "(ns.a, ns.a)", "{ns.a: 1}"),
    "looked up": grow("(1, 2)", "(ns.a, ns.a)", "{}[ns.a]"), "got": grow("(1, 2)", "(ns.a, ns.a)", "{}.get(ns.a)"),
    "in a dict": grow("(1, 2)", "(ns.a, ns.a)", "dict([(ns.a, 1)])"),
    "mapped": grow("(1,)", "(ns.a, ns.a)", "[{}] | map(attribute=ns.a) | list"),
    "attribute": grow("(1,)", "(ns.a, ns.a)", "[1] | attr(ns.a)"),
    "is a filter": grow("(1,)", "(ns.a, ns.a)", "1 if ns.a is filter"),
    "is a test": grow("(1,)", "(ns.a, ns.a)", "1 if ns.a is test"),
    "center": "{{ 'a'.center(10**9) }}", "center filter": "{{ 'a' | center(10**9) }}", "zfill": "{{ '1'.zfill(10**9) }}",
    "replace": "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 10000) | replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(range(100000) | map('string')) }}", "join filter": "{{ range(100000) | join('b' * 100000) }}",
    "width": "{{ '%1000000000d' % 1 }}", "star": "{{ '%*d' % (1000000000, 1) }}", "format": "{{ '{:1000000000}'.format('x') }}",
    "format inside": "{{ '{:{w}}'.format('x', w=10**9) }}", "format filter": "{{ '%.1000000000f' | format(1.5) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}", "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "translated": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "tabs": "{{ ('\t' * 999).expandtabs(10**9) }}",
    "round": "{{ 5 | round(-(10**9)) }}", "lipsum": "{{ lipsum(10**9) }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "JSON indent": "{{ [1] | tojson(indent=10**9) }}", "wrap": "{{ ('a' * 100000) | wordwrap(1, true, 'b' * 10000) }}",
    "slices": "{% set a = 'x' * 9999999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "comparisons": "{% set a = 'x' * 999999 %}{% set b = 'x' * 999999 %}{% for i in range(99999) %}{{ 1 if a == b }}{% endfor %}",
    "searches": "{% set a = 'x' * 999999 %}{% for i in range(99999) %}{{ 1 if 'y' in a }}{% endfor %}",
    "arguments": "{% macro m() %}{{ varargs | length }}{% endmacro %}{% for i in range(99999) %}{{ m(*range(99999)) }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_template_may_use_is_bounded(tokenizer, tmp_path, name):
    (tmp_path / "chat_template.jinja").write_text("kept in a file")
    tokenizer.chat_template = "first line\n" + ATTACKS[name]
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: its chat template fails in line \d+ \(it ") as caught:
        render(tokenizer, CHAT[:1], tmp_path)
    assert caught.value.path == str(tmp_path / "chat_template.jinja") and "than a chat template may" in str(caught.value)


@pytest.mark.parametrize("template, line, reason", [
    ("a\n{{ 1 / 0 }}", 2, "ZeroDivision: division by zero"),
    ("\n\n{% for i in range(200000) %}x{% endfor %}", 3, "Overflow: Range too big"),
    ("{% macro m() %}\n{{ m() }}{% endmacro %}\n{{ m() }}", 2, f"more than {MAX_DEPTH} deep"),
    ("{% block a %}\n{{ self.a() }}{% endblock %}", 2, f"more than {MAX_DEPTH} deep"),
    (grow("(1,)", "(ns.a,)", "{ns.a: 1}").replace("range(60)", "range(2000)"), 1, "nests more than 100 values"),
    ("ok\n{% for %}", 2, "Expected an expression"),
    ("\n\n{{ 'a' | nofilter }}", 3, "No filter named 'nofilter'"),
    ("\n{{ ''.__class__.__mro__ }}", 2, "unsafe"),
    ("\n{{ (1).to_bytes(1, 'big') }}", 2, "may not call 'to_bytes' of 'int'"),
], ids=range(9))  # fmt: skip
def test_an_error_names_the_template_and_its_line(tokenizer, tmp_path, template, line, reason):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: its chat template fails in line {line} \(.*{reason}"):
        render(tokenizer, CHAT[:1], tmp_path)


@pytest.mark.parametrize("template, reason", [
    ("x" * (MAX_TEMPLATE_CHARS + 1), "characters, a chat template may have"),
    ("{{ " + "1+" * 30_000 + "1 }}", "more than 24000 words and signs"),
    ("{% if a %}" * 2_000 + "{% endif %}" * 2_000, "Recursion"),
    ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "Recursion"),
    ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
], ids=["long", "words", "ifs", "brackets", "loops"])  # fmt: skip
def test_what_a_template_may_take_to_compile_is_bounded(tokenizer, tmp_path, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=reason):
        render(tokenizer, CHAT[:1], tmp_path)
    assert form_of(template).calls is None  # looked at when the model is opened


def test_constants_are_not_computed_while_a_templates_names_are_read():
    assert form_of("{{ tools }}{{ 'a' * 10**10 }}{{ 'a' | center(10**10) }}").reads == {"tools"}


@pytest.mark.parametrize("template, error, text", [
    ("{{ raise_exception('only users') }}", TemplateError, "only users"), ("{{ 1 + 'a' }}", TypeError, "unsupported operand"),
    ("{{ nope.x }}", TemplateError, "'nope' is undefined"),
], ids=["on purpose", "type", "undefined"])  # fmt: skip
def test_refusals_of_messages_stay_what_they_are(tokenizer, tmp_path, template, error, text):
    tokenizer.chat_template = template
    with pytest.raises(error, match=text):
        render(tokenizer, CHAT[:1], tmp_path)


def test_stock_transformers_in_the_same_process_stays_stock(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ (1).to_bytes(1, 'big') }}"
    with pytest.raises(CheckpointError):
        render(tokenizer, CHAT[:1], tmp_path)
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False) == r"b'\x01'"


def test_a_failure_is_not_compiled_again(tokenizer, tmp_path, monkeypatch):
    from trimtab.engine.templates import budget

    tokenizer.chat_template = "{{ 'once' | nofilter }}"
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No filter named 'nofilter'"):
            render(tokenizer, CHAT[:1], tmp_path)
        monkeypatch.setattr(budget._Metered, "compile", lambda *args, **kwargs: pytest.fail("compiled again"))


def test_run_reports_a_template_that_fails(tmp_path, capsys):
    from trimtab.cli.main import main

    folder = talking.build_llama(tmp_path / "llama", chat_template="{{ bos_token }}\n{{ 1 / 0 }}")
    assert main(["run", str(folder), "--context", "64", "--device", "cpu", "hello"]) == 3
    said = capsys.readouterr()
    assert f"{folder / 'chat_template.jinja'}: its chat template fails in line 2 (ZeroDivision: division by zero)" in said.err
    assert "Traceback" not in said.err and json.dumps(said.out) == '""'
