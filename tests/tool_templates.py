"""Chat templates with tools, in our own words, of the forms that published ones have; and what a call looks like in each."""

_HEAD = """{{ bos_token }}
{%- if tools %}{{ '<|turn>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<turn|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|turn>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ THOUGHT }}{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ CALL }}{% endfor %}
{{- '<turn|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
_THOUGHT = "'<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n'"
_JSON = '{"name": "\' + call.function.name + \'", "KEY": \' + (call.function.arguments | tojson) + \'}'
_CALLS = {
    "hermes": f"'<tool_call>\\n{_JSON}\\n</tool_call>'".replace("KEY", "arguments"),
    "llama": f"('<|python_tag|>' if false else '') + '{_JSON}'".replace("KEY", "parameters"),
    "mistral": f"'[TOOL_CALLS][{_JSON}]'".replace("KEY", "arguments"),
    "mistral-args": "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson)",
    "qwen-xml": "'<tool_call>\\n<function=' + call.function.name + '>\\n</function>\\n</tool_call>'",
}
TEMPLATES = {form: _HEAD.replace("CALL", call).replace("THOUGHT", _THOUGHT) for form, call in _CALLS.items()}

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a town",
    "parameters": {"type": "object", "required": ["city"], "additionalProperties": False,
                   "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}}}}  # fmt: skip
NOW = {"type": "function", "function": {
    "name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}  # fmt: skip
