"""A model folder's tokenizer and chat template as rollout uses them: tools build the very token ids that training sees."""

import tempfile
from pathlib import Path

from accerl_mp.config import ConfigError, ModelConfig
from accerl_mp.launcher.tokenizer import export_tokenizer
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat


def load_chat(model_dir: Path) -> tuple[Tokenizer, ChatFormat]:
    """Read a model folder (Transformers format). ConfigError: why its tokenizer or template cannot carry an episode."""
    with tempfile.TemporaryDirectory(prefix="accerl-tokenizer-") as name:
        if problems := export_tokenizer(ModelConfig(model_path=str(model_dir)), Path(name)):
            raise ConfigError(problems)
        tokenizer = Tokenizer.load(Path(name))
    return tokenizer, ChatFormat.probe(tokenizer)
