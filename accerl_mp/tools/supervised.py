"""The training of `tools.sft`, in one process or as one rank of several. `args` are its flags."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from accerl_mp.config import Config, ConfigError
from accerl_mp.export_place import snapshot_folder
from accerl_mp.models.build import select_trainable
from accerl_mp.models.fsdp import shard
from accerl_mp.models.names import remember_conversion
from accerl_mp.tools.chat import load_chat
from accerl_mp.tools.walks import load_walks
from accerl_mp.tools.warm_start import MISTAKE, PROMPT, REPLY, Batches, PairExamples, WalkExamples, batch_loader
from accerl_mp.trainer.checkpoint import export
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.schedule import learning_rate
from accerl_mp.transport.health import Health

PAIRS = [
    ("What is the capital of France?", "Paris."),
    ("Add 2 and 3.", "5"),
    ("Name a colour.", "Blue."),
    ("Say hello.", "Hello!"),
    ("What do bees make?", "Honey."),
    ("Which is larger, 7 or 4?", "7"),
    ("Finish: roses are", "red."),
    ("What opens a lock?", "A key."),
]


def find_device(args: argparse.Namespace) -> str | None:
    """Sets the device that `auto` stands for; returns what is wrong with one that was named.

    With --use-fsdp each process has a card of its own, which is not tried here: that would open a context on the first one in all.
    """
    if args.device == "auto":
        args.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if args.use_fsdp and args.device.startswith("cuda") and torch.cuda.is_available():
        return None
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # no such device, or a torch without CUDA
        return f"--device {args.device}: {str(error).splitlines()[0]}"
    return None


def load_model(args: argparse.Namespace) -> nn.Module:
    """Float32 masters on the device; sharded in a process of --use-fsdp."""
    model = AutoModelForCausalLM.from_pretrained(
        args.model_path, dtype=torch.float32, trust_remote_code=args.trust_remote_code, local_files_only=True, attn_implementation="sdpa"
    )
    remember_conversion(model)
    select_trainable(model, args.train_mode)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.to(args.device).train()
    if args.fsdp_rank is not None:
        dtype = torch.bfloat16 if uses_bfloat16(args) else torch.float32
        shard(model, compute_dtype=dtype, device=torch.device(args.device), unsharded=False)
    return model


def uses_bfloat16(args: argparse.Namespace) -> bool:
    return args.dtype == "bfloat16" or (args.dtype == "auto" and args.device != "cpu")


def token_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy (nats, float32) of every token but the first of each row, and the roles of those tokens; both [B, S - 1].

    No attention mask: rows are padded on the right, and what comes later is never attended to.
    """
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten(), reduction="none")
    return losses.view(logits.shape[:2]), batch["roles"][:, 1:]


def weighted_loss(losses: torch.Tensor, roles: torch.Tensor, *, prompt_weight: float, mistake_weight: float) -> torch.Tensor:
    """Mean over reply tokens plus `prompt_weight` times the mean over prompt tokens."""
    reply_weights = (roles == REPLY).float() + mistake_weight * (roles == MISTAKE)
    prompt_weights = (roles == PROMPT).float()
    reply_loss = (losses * reply_weights).sum() / reply_weights.sum().clamp(min=1.0)
    return reply_loss + prompt_weight * (losses * prompt_weights).sum() / prompt_weights.sum().clamp(min=1.0)


def train(
    model: nn.Module,
    batches: Iterator[dict[str, torch.Tensor]],
    args: argparse.Namespace,
    after_step: Callable[[int, torch.Tensor], None],
) -> None:
    """Run `--max-steps` micro-steps; calls `after_step(step, loss)` after each."""
    optimizer = build_optimizer(model, args)
    num_updates = args.max_steps // args.grad_accum_steps
    share = 1 / args.grad_accum_steps / num_ranks(args)  # FSDP sums gradients over ranks
    for step in range(1, args.max_steps + 1):
        batch = {name: tensor.to(args.device, non_blocking=True) for name, tensor in next(batches).items()}
        with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=uses_bfloat16(args)):
            losses, roles = token_losses(model, batch)
        loss = weighted_loss(losses, roles, prompt_weight=args.prompt_weight, mistake_weight=args.mistake_weight)
        (loss * share).backward()
        if step % args.grad_accum_steps == 0:
            update(model, optimizer, step // args.grad_accum_steps - 1, num_updates, args)
        after_step(step, loss.detach())


def num_ranks(args: argparse.Namespace) -> int:
    return 1 if args.fsdp_rank is None else args.fsdp_world_size


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, num_updates: int, args: argparse.Namespace) -> None:
    """One optimizer step; `number` counts from 0."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(
            number, peak=args.learning_rate, warmup_steps=args.lr_warmup_steps, max_steps=num_updates, min_lr_ratio=args.min_lr_ratio
        )
    optimizer.step()
    optimizer.zero_grad()


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=args.device != "cpu")


def build_examples(args: argparse.Namespace) -> WalkExamples | PairExamples:
    tokenizer, chat = load_chat(args.model_path)
    if args.walks:
        try:
            walks = load_walks(args.walks)
        except ValueError as error:
            raise ConfigError([f"--walks {error}"]) from error
        return WalkExamples(walks, tokenizer, chat, max_length=args.max_length)
    return PairExamples(PAIRS * args.dataset_repeat, tokenizer, chat, max_length=args.max_length)


class Reporter:
    """After each step: prints the mean loss since the line before (rank 0's), saves a snapshot where one is due."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self._model, self._args, self._started = model, args, time.monotonic()
        self._losses: list[torch.Tensor] = []

    def __call__(self, step: int, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        last = self._args.max_steps
        if step % self._args.log_every == 0 or step == last:
            mean = torch.stack(self._losses).mean().item()
            self._losses.clear()
            if not self._args.fsdp_rank:
                print(f"step {step} of {last}  loss {mean:.4f}  {time.monotonic() - self._started:.1f} s", flush=True)
        if step in self._args.save_steps:
            save(self._model, self._args, snapshot_folder(self._args.out, step), step)


def save(model: nn.Module, args: argparse.Namespace, folder: Path, step: int) -> None:
    """Write a model folder with bfloat16 weights. Collective with --use-fsdp. OSError on rank 0: it could not, and has said why."""
    config, rank = Config.from_flat({"model_path": str(args.model_path)}), args.fsdp_rank or 0
    if export(model, folder, config, dtype=torch.bfloat16, rank=rank, state={"step": step}) is None and rank == 0:
        raise OSError(f"step {step} is not saved")


def run(args: argparse.Namespace) -> None:
    """Train in this process, as the only one or as one of --fsdp-world-size."""
    ranks = None
    if args.fsdp_rank is not None:
        on_gpu = args.device.startswith("cuda")
        ranks = Ranks.join(rank=args.fsdp_rank, size=args.fsdp_world_size, on_gpu=on_gpu, health=Health.detached(f"sft/{args.fsdp_rank}"))
        args.device = str(ranks.device)
    logging.set_verbosity_error()
    if args.fsdp_rank or not sys.stderr.isatty():
        logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    examples = build_examples(args)
    model = load_model(args)
    batches = Batches(examples, batch_size=args.batch_size, seed=args.seed, rank=args.fsdp_rank or 0, world_size=num_ranks(args))
    train(model, batch_loader(batches, args.num_workers), args, Reporter(model, args))
    if args.out:
        save(model, args, args.out, args.max_steps)
    if not args.fsdp_rank:
        done = f"{args.max_steps} micro-steps, {args.max_steps // args.grad_accum_steps} updates"
        print(f"{args.out}: saved after {done}" if args.out else f"{done}; nothing is saved without --out", flush=True)
    if ranks is not None:
        ranks.leave()
