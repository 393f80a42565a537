"""Chat templates with the habits of five families of models, written for these tests: what each shows, and where.

Only what makes the text of a message depend on other messages is kept in full; descriptions of tools are shorter.
"""

# tool results that follow each other share one user message; a default system message where there is none
QWEN2 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% else %}{% if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% else %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# replies after the last query of the user show their thinking, older ones do not; a tool response is no query
QWEN3 = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set state = namespace(searching=true, query=messages | length - 1) %}
{%- for m in messages[::-1] %}
{%- if state.searching and m.role == 'user' and
   not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set state.searching = false %}{% set state.query = messages | length - 1 - loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content, thought = m.content, '' %}
{%- if '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > state.query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# a beginning of text; a system message always, with a date; tools with the first question; results of role ipython
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + (date or '26 Jul 2024') + '\\n\\n' + system }}<|eot_id|>
{%- if tools %}{% set first, rest = rest[0], rest[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}{{ first.content | trim }}<|eot_id|>
{%- endif %}
{%- for m in rest %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) }}<|eot_id|>
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# a default system message before the first message
SMOLLM2 = """\
{%- for m in messages %}
{%- if loop.first and messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# user and assistant alternate; tools stand before the last user message, the system message in it if it is the last
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(number=0) %}
{%- for m in rest if m.role != 'tool' %}
{%- if (m.role == 'user') != (turn.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set turn.number = turn.number + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system %}{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ ' ' + (m.content | trim) + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""

# a state that a tool result changes and the next reply ends
DEEPSEEK = """\
{%- set state = namespace(results=false) %}{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set state.results = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- if state.results %}{{ '<|results_end|>' }}{% endif %}
{%- set state.results = false %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- elif m.role == 'tool' %}{% if not state.results %}{{ '<|results_begin|>' }}{% endif %}
{%- set state.results = true %}{{ '<|result|>' + m.content }}{% endif %}
{%- endfor %}
{%- if state.results %}{{ '<|results_end|>' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "smollm2": SMOLLM2,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
}
CONTROL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]"),
    *("[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|User|>"),
    *("<|Assistant|>", "<|results_begin|>", "<|results_end|>", "<|result|>"),
]
