"""Where a reply ends, as token ids: vLLM gets ids only, so the stop text is looked up in the vocabulary once, at the start."""

import json
import logging
from pathlib import Path

from tokenizers import Tokenizer

_log = logging.getLogger(__name__)


def find_stop_ids(tokenizer_folder: Path, stop_text: str) -> list[int]:
    """Ids that end a reply (and stay in it): the model's end-of-turn tokens, and every token whose text contains `stop_text`.

    `stop_text` is the flag's value, where \\n stands for a newline; empty: only the end-of-turn tokens.
    """
    meta = json.loads((tokenizer_folder / "meta.json").read_text())
    stop_ids = set(meta["eos_token_ids"])
    if text := stop_text.replace("\\n", "\n").replace("\\t", "\t"):
        found = _tokens_with(Tokenizer.from_buffer((tokenizer_folder / "tokenizer.json").read_bytes()), text)
        if not found:
            _log.warning("--infer-stop %r is in no token of this vocabulary: only the end-of-turn token ends a reply", stop_text)
        stop_ids |= found
    return sorted(stop_ids)


def _tokens_with(tokenizer: Tokenizer, text: str) -> set[int]:
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    return {token_id for token_id, token_text in zip(ids, texts, strict=True) if text in token_text}
