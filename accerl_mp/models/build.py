"""Builds the trainer's model: float32 masters, what trains, and the weights of a HuggingFace folder.

Order for a sharded model, so that no rank ever holds a whole one: `load_model(meta=True)`, `fsdp.shard`, `load_weights`.
"""

from inspect import signature
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from accerl_mp.config import Config
from accerl_mp.models.attention import choose
from accerl_mp.models.fsdp import decoder_layers, reshard
from accerl_mp.models.names import persistent_buffers, remember_conversion
from accerl_mp.models.rotation import fuse_rotations
from accerl_mp.models.sources import open_source


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Of forward, backward and vLLM alike (`--dtype`); masters are float32 whatever it is."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(config: Config, device: torch.device, *, meta: bool = False) -> nn.Module:
    """The model of `--model-path` with float32 parameters, its trainable ones marked.

    `meta`: parameters have shapes but no memory yet (buffers are real, on the CPU); shard it, then call `load_weights`.
    """
    folder = Path(config.model.model_path)
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, local_files_only=True)
    dtype = compute_dtype(config, device)
    attention = choose(config.model.attn_implementation, device=device, dtype=dtype, config=hf_config)
    model = build_empty(hf_config, attention=attention, trust_remote_code=config.model.trust_remote_code)
    fuse_rotations(model, device, dtype)
    remember_conversion(model)
    select_trainable(model, config.model.train_mode)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not meta:
        load_weights(model, folder, device, trust_remote_code=config.model.trust_remote_code)
    return model


def build_empty(hf_config: PretrainedConfig, *, attention: str, trust_remote_code: bool = False) -> nn.Module:
    """The architecture with parameters on the meta device and real buffers, without dropout."""
    original = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        on_meta = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, on_meta)

    # Only parameters go to meta: buffers such as rotary frequencies are computed while the model is built and stand in no file.
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
    model.tie_weights()
    _disable_dropout(model)
    model.config.use_cache = False
    return model.train()  # gradient checkpointing works in training mode only


def select_trainable(model: nn.Module, train_mode: str) -> list[str]:
    """Mark what `--train-mode` trains and return its names.

    lm_head: the head (with tied embeddings: the matrix that both are). last_layer: the last decoder layer, the final norm and the head.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    chosen = {"full": [model], "lm_head": [head], "last_layer": [head, decoder_layers(model)[-1], *_final_norms(model)]}[train_mode]
    wanted = {id(parameter) for module in chosen if module is not None for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise ValueError(f"--train-mode {train_mode} leaves no trainable parameter in {type(model).__name__}")
    return names


def load_weights(model: nn.Module, folder: Path, device: torch.device, *, trust_remote_code: bool = False) -> None:
    """Give meta parameters memory on `device` and fill them, and the persistent buffers, from `folder`.

    Not collective: a sharded parameter reads its own rows only. Raises ValueError naming what the folder lacks.
    """
    shared = _shared_names(model)
    _materialise(model, device, shared)
    with open_source(folder, _entries(model, shared), trust_remote_code=trust_remote_code) as source, torch.no_grad():
        for name, parameter in model.named_parameters():
            source.fill(parameter, shared.get(name, [name]))
        for name, buffer in persistent_buffers(model):
            source.fill(buffer, [name])


def _entries(model: nn.Module, shared: dict[str, list[str]]) -> list[tuple[list[str], tuple[int, ...]]]:
    parameters = [(shared.get(name, [name]), tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return parameters + [([name], tuple(buffer.shape)) for name, buffer in persistent_buffers(model)]


def _shared_names(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each tied parameter, by the name that `named_parameters` gives it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values() if len(aliases) > 1}


def _materialise(model: nn.Module, device: torch.device, shared: dict[str, list[str]]) -> None:
    """Allocate meta parameters on `device`, move buffers there, and tie again what was tied (allocating unties)."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    for first, *others in shared.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = model.get_parameter(first)


def _final_norms(model: nn.Module) -> list[nn.Module]:
    """What stands beside the stack of decoder layers, embeddings left out."""
    last = decoder_layers(model)[-1]
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and any(layer is last for layer in module)]
    body = next(module for module in model.modules() if any(child is stacks[0] for child in module.children()))
    return [child for child in body.children() if child is not stacks[0] and not isinstance(child, nn.Embedding)]


def _disable_dropout(model: nn.Module) -> None:
    """vLLM samples without dropout: with it, new and old logprobs would be of two policies."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def load_or_refuse(config: Config, device: torch.device) -> tuple[nn.Module | None, str]:
    """(the model without its weights, or None; why there is none)."""
    try:
        return load_model(config, device, meta=True), ""
    except (ValueError, OSError, ImportError) as error:
        return None, f"--model-path {config.model.model_path}: {str(error).splitlines()[0]}"
    except Exception as error:  # whatever Transformers' code does with numbers and texts that no model has
        detail = (str(error).splitlines() or [""])[0]
        return None, f"--model-path {config.model.model_path}: no model can be built of its config.json ({type(error).__name__}: {detail})"


def model_problems(config: Config, device: torch.device) -> list[str]:
    """What the trainer would refuse about the model, found without reading a weight (for the launcher; takes a second)."""
    model, problem = load_or_refuse(config, device)
    if model is None:
        return [problem]
    problems = []
    if config.algorithm.router_aux_loss_coef and "output_router_logits" not in signature(model.forward).parameters:
        problems.append(
            f"--router-aux-loss-coef {config.algorithm.router_aux_loss_coef}: {type(model).__name__} has no router to balance; leave it out"
        )
    if config.batch.train_logprob_mode == "response_only_lm_head" and "logits_to_keep" not in signature(model.forward).parameters:
        problems.append(f"--train-logprob-mode response_only_lm_head: {type(model).__name__} has no logits_to_keep; use full_logits_ce")
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        problems.append(f"--model-path {config.model.model_path}: {type(model).__name__} caps its attention scores, which is not supported")
    return problems


@torch.no_grad()
def check_logits_to_keep(model: nn.Module, device: torch.device) -> None:
    """Compare the head at chosen positions with the head everywhere on a few tokens. Collective if sharded.

    Raises ValueError where the model takes `logits_to_keep` for something else than positions.
    """
    tokens, kept = torch.arange(8, device=device)[None], torch.tensor([1, 2, 5], device=device)
    with torch.compiler.set_stance("force_eager"):  # a forward without gradients would be compiled apart
        everywhere, chosen = (model(input_ids=tokens, use_cache=False, **arguments).logits for arguments in ({}, {"logits_to_keep": kept}))
    reshard(model)
    if chosen.shape != everywhere[:, kept].shape or not torch.allclose(chosen, everywhere[:, kept], atol=1e-2, rtol=1e-2):
        raise ValueError(f"{type(model).__name__} does not take positions as logits_to_keep: use --train-logprob-mode full_logits_ce")
