"""A model folder's tokenizer and chat template as rollout uses them: tools build the very token ids that training sees."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat


def load_chat(model_dir: Path) -> tuple[Tokenizer, ChatFormat]:
    """Read a model folder (Transformers format)."""
    auto = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    ends = {auto.eos_token_id}
    if (model_dir / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model_dir).eos_token_id
        ends |= set(eos) if isinstance(eos, list) else {eos}
    meta = {
        "bos_token": auto.bos_token,
        "eos_token": auto.eos_token,
        "pad_token": auto.pad_token,
        "eos_token_ids": sorted(ends - {None}),
        "add_bos": False,
    }
    tokenizer = Tokenizer(auto.backend_tokenizer, auto.chat_template, meta)
    return tokenizer, ChatFormat.probe(tokenizer)
