"""Turns a model's tokenizer into files that processes without torch can read. Imports Transformers: use it in short-lived processes.

Writes tokenizer.json (for `tokenizers`), chat_template.jinja and meta.json: bos_token, eos_token, pad_token (text or null),
eos_token_ids (whatever ends a reply), add_bos (the template does not write the BOS that the tokenizer would add).
"""

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from accerl_mp.config import ModelConfig
from accerl_mp.model_folder import read_facts
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat, TemplateError

BUILT_IN_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'user' %}User: {{ message['content'] }}\n"
    "{% else %}Assistant: {{ message['content'] }}{{ eos_token or '' }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For models without a template of their own."""


def export_tokenizer(model: ModelConfig, folder: Path) -> list[str]:
    """Write the three files to `folder`; returns problems, each with flag, value and consequence. OSError: no room for them."""
    try:
        return _export(model, folder)
    except OSError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower, and Transformers whatever its code does with what no tokenizer has
        detail = (str(error).splitlines() or [""])[0]
        return [f"--model-path {model.model_path}: its tokenizer*.json cannot be used ({type(error).__name__}: {detail})"]


def _export(model: ModelConfig, folder: Path) -> list[str]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        return [f"--model-path {model.model_path}: its tokenizer cannot be loaded ({type(error).__name__}: {error})"]
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return [
            f"--model-path {model.model_path}: {type(tokenizer).__name__} has no tokenizer.json form: games cannot be turned into tokens"
        ]
    try:
        eos_token_ids = _eos_token_ids(model, tokenizer)
    except (OSError, ValueError, KeyError) as error:
        return [f"--model-path {model.model_path}: its config cannot be read ({str(error).splitlines()[0]})"]
    if not eos_token_ids:
        return [f"--model-path {model.model_path}: neither its tokenizer nor its configs name an end-of-turn token: no reply would end"]
    template = _template(model, tokenizer)
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template)
    meta = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "eos_token_ids": eos_token_ids,
        "add_bos": _adds_bos(tokenizer),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return _probe(model, folder)


def _probe(model: ModelConfig, folder: Path) -> list[str]:
    """Whether the files just written carry an episode, as a rollout process will use them."""
    try:
        tokenizer = Tokenizer.load(folder)
        ChatFormat.probe(tokenizer)
    except (TemplateError, jinja2.TemplateError) as error:
        whose = f"--chat-template {model.chat_template}" if model.chat_template else f"--model-path {model.model_path}"
        return [f"{whose}: {error}: no transcript could be trained (--chat-template FILE gives another template)"]
    return _beyond_vocabulary(model, tokenizer)


def _beyond_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Control tokens that were added to the tokenizer and not to the model: a prompt with one would kill vLLM's worker."""
    vocab_size = read_facts(Path(model.model_path)).vocab_size
    conversation = [{"role": role, "content": "-"} for role in ("user", "assistant", "user")]
    ids = {*tokenizer.encode_start(tokenizer.render(conversation, add_generation_prompt=True)), *tokenizer.eos_token_ids}
    if vocab_size is None or max(ids) < vocab_size:
        return []
    return [
        f"--model-path {model.model_path}: its tokenizer has {tokenizer.text_of(max(ids))!r} as token {max(ids)}, its config only "
        f"{vocab_size} tokens: the model was not resized, or the tokenizer is another model's"
    ]


def _template(model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> str:
    if model.chat_template:
        return Path(model.chat_template).read_text()
    if not tokenizer.chat_template:
        print(
            f"launch.sh: warning: {model.model_path} has no chat template: the built-in User/Assistant one is used (--chat-template FILE)",
            file=sys.stderr,
        )
        return BUILT_IN_TEMPLATE
    return tokenizer.get_chat_template()


def _eos_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Of the generation config, the tokenizer and the model config: models name more than one."""
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, _from_generation_config(model), _from_model_config(model)):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)


def _from_generation_config(model: ModelConfig) -> Any:
    if not (Path(model.model_path) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(model.model_path, local_files_only=True).eos_token_id


def _from_model_config(model: ModelConfig) -> Any:
    config = AutoConfig.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code, local_files_only=True)
    return getattr(config, "eos_token_id", None)


def _adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether plain encoding begins with the BOS, as the model was then trained; the reader adds it where a template does not."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
