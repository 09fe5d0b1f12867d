"""`make_model --tiny`: Qwen3's architecture at the demo's size, with a tokenizer that is trained on the prompts of walks."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from accerl_mp.rollout.prompt import SYSTEM, invalid_notice, turn_message
from accerl_mp.tools.renaming import draw_renaming, made_up_words, name_words, renamer
from accerl_mp.tools.walks import Walk, load_walks

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention takes multiples of 32
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def prompt_texts(walks: list[Walk], seed: int) -> Iterator[str]:
    """Messages and replies of the walks, half of them with their things renamed."""
    rng = random.Random(seed)
    others = made_up_words() + name_words(name for walk in walks for name in walk.names)
    yield SYSTEM
    for walk in walks:
        renaming = draw_renaming(walk.names, others, rng) if rng.random() < 0.5 else {}
        rename = renamer(renaming)
        for turn, observation in zip(walk.turns, walk.observations(), strict=True):
            yield rename(turn_message(observation))
            yield rename(turn.reply)
            if turn.kind == "invalid":
                yield rename(invalid_notice(turn.reply))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> FastTokenizer:
    """A byte-level BPE: any text can be written, what the games say takes few tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    return fast


def save_tokenizer(fast: FastTokenizer, out: Path) -> None:
    fast.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY["max_position_embeddings"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def build_model(fast: FastTokenizer, *, seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """Random float32 weights."""
    torch.manual_seed(seed)
    ids = {"pad_token_id": fast.token_to_id(PAD), "eos_token_id": fast.token_to_id(END), "bos_token_id": None}
    vocab_size = -(-fast.get_vocab_size() // 32) * 32
    model = Qwen3ForCausalLM(Qwen3Config(**(TINY | sizes), **ids, vocab_size=vocab_size))
    model.generation_config.eos_token_id = ids["eos_token_id"]
    model.generation_config.pad_token_id = ids["pad_token_id"]
    return model


def make_tiny(walks: Path, out: Path, *, seed: int, vocab_size: int, num_layers: int) -> int:
    """Tokenizer and random weights; returns the number of parameters."""
    fast = train_tokenizer(prompt_texts(load_walks(walks), seed), vocab_size)
    model = build_model(fast, seed=seed, num_hidden_layers=num_layers)
    model.save_pretrained(out)
    save_tokenizer(fast, out)
    return model.num_parameters()
