"""Chat templates and a small byte-level BPE tokenizer, made in memory, for tests without a model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from accerl_mp.rollout.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

# Reasoning is kept for the last turn only; with thinking off, the prompt holds an empty block that past turns do not show.
QWEN = """{%- set ns = namespace(last=messages | length - 1) %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 == ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")

# No system role, no end-of-turn token in prompts but after replies.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

PLAIN = (
    "{% for m in messages %}{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

# Renumbers turns from the end: a later turn changes earlier ones.
RENUMBERING = (
    "{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
_END = {CHATML: "<|im_end|>", QWEN: "<|im_end|>", THINKING: "<|im_end|>", RENUMBERING: "<|im_end|>", LLAMA3: "<|eot|>"}

_CORPUS = [
    "You play a text game. Reply with one listed command, nothing else.",
    "Objective: First, open the door. Then, take the key from the table and go east.\nObservation: -= Kitchen =-\nYou are in a kitchen.",
    "Inventory: You are carrying nothing.\nCommands:\n- go east\n- open door\n- take key from table\n- look\n- inventory\nYour command:",
    "system user assistant\n\n<think>\n\n</think>\n\n",
]


def build_fast(vocab_size: int = 400) -> FastTokenizer:
    """A byte-level BPE that knows the control tokens of every template above."""
    fast = FastTokenizer(models.BPE())
    # As Qwen and Llama 3 split: a run of newlines is one piece, whatever follows it.
    words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    fast.train_from_iterator(_CORPUS, trainer)
    return fast


def build_meta(fast: FastTokenizer, template: str = CHATML) -> dict[str, object]:
    end = _END.get(template, "</s>")
    return {
        "bos_token": "<s>",
        "eos_token": end,
        "pad_token": "<pad>",
        "eos_token_ids": sorted({fast.token_to_id(end), fast.token_to_id("</s>")}),
        "add_bos": False,
    }


def build_tokenizer(template: str = CHATML) -> Tokenizer:
    fast = build_fast()
    return Tokenizer(fast, template, build_meta(fast, template))


def save_tokenizer(folder: Path, template: str = CHATML) -> Tokenizer:
    """Write what the launcher writes to `<run-dir>/tokenizer/`."""
    fast = build_fast()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(fast.to_str(pretty=True), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template)
    (folder / "meta.json").write_text(json.dumps(build_meta(fast, template)))
    return Tokenizer.load(folder)
