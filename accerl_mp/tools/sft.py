"""Supervised training on one machine: a warm start from played games, or a smoke test of the trainer's parts.

    python -m accerl_mp.tools.sft --model-path DIR --train-mode lm_head --max-steps 20        (built-in chat pairs)
    python -m accerl_mp.tools.sft --model-path DIR --walks walks.jsonl.gz --out DIR ...       (warm start, as in make_demo_model)

The loss is the mean over reply tokens plus `--prompt-weight` times the mean over prompt tokens. `--mistake-weight` 0 imitates
the best commands alone; 1 imitates the player of the walks with its mistakes. Steps are micro-steps, as in the reference's local
trainer: an update comes every `--grad-accum-steps` of them, and a rest at the end is dropped.
"""

import argparse
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from accerl_mp.bounds import out_of_bounds
from accerl_mp.checks import cannot_be_made
from accerl_mp.config import Config, ConfigError
from accerl_mp.export_place import taken_by
from accerl_mp.model_folder import folder_problems
from accerl_mp.models.build import select_trainable
from accerl_mp.models.fsdp import shard
from accerl_mp.models.names import remember_conversion
from accerl_mp.tools.chat import load_chat
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.walks import load_walks
from accerl_mp.tools.warm_start import MISTAKE, PROMPT, REPLY, Batches, PairExamples, WalkExamples, batch_loader
from accerl_mp.trainer.checkpoint import export
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.schedule import learning_rate
from accerl_mp.transport.health import Health
from accerl_mp.transport.process import die_with_parent, exit_now

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

_STOP_S = 10.0
"""A rank that was told to end is killed after this."""


def build_parser() -> argparse.ArgumentParser:
    """The reference's flags and ours."""
    parser = tool_parser("sft", "--model-path DIR [--walks FILE --out DIR] [FLAGS ...]", __doc__)
    _add_what(parser.add_argument_group("model and examples"))
    _add_training(parser.add_argument_group("training"))
    _add_ranks(parser.add_argument_group("processes and output"))
    return parser


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-path", type=Path, required=True, help="local HuggingFace directory")
    add("--trust-remote-code", action="store_true", help="let Transformers run the model folder's code")
    add("--walks", type=Path, help="file of accerl_mp.tools.walks, instead of the chat pairs")
    add("--dataset-repeat", type=int, default=4, help="times the 8 built-in chat pairs are listed")
    add("--max-length", type=int, default=128, help="tokens of an example; longer ones are cut at the end")
    add("--prompt-weight", type=float, default=0.1, help="weight of the loss on prompt tokens (walks)")
    add("--mistake-weight", type=float, default=0.0, help="weight of replies that are not the best command (walks)")
    add("--seed", type=int, default=42, help="of the order of examples")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--train-mode", choices=("lm_head", "last_layer", "full"), default="lm_head", help="what trains")
    add("--max-steps", type=int, default=1000, help="micro-steps")
    add("--batch-size", type=int, default=2, help="examples of a micro-step")
    add("--grad-accum-steps", type=int, default=2, help="micro-steps of an update")
    add("--learning-rate", type=float, default=1e-5, help="peak learning rate")
    add("--lr-warmup-steps", type=int, default=0, help="updates of linear warm-up")
    add("--min-lr-ratio", type=float, default=1.0, help="the cosine ends at this share of the peak (1: constant)")
    add("--weight-decay", type=float, default=0.0, help="AdamW weight decay, on matrices")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--device", default="auto", help="cuda:0, cpu, ...; auto: the first GPU, else the CPU")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the compute; auto: bfloat16 on GPU")


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", type=Path, help="folder to save the model to; without it nothing is saved")
    add("--save-steps", type=int, nargs="*", default=[], help="also save to OUT-step-N after so many micro-steps")
    add("--log-every", type=int, default=1, help="micro-steps between two lines")
    add("--num-workers", type=int, default=0, help="processes that build batches")
    add("--use-fsdp", action="store_true", help="shard over several processes of this machine")
    add("--fsdp-world-size", type=int, default=4, help="processes of --use-fsdp, one a GPU where there are GPUs")
    add("--fsdp-master-addr", default="127.0.0.1", help="where they meet")
    add("--fsdp-master-port", type=int, help="likewise; without it a free port")
    for hidden in ("--fsdp-rank", "--parent-pid"):
        add(hidden, type=int, help=argparse.SUPPRESS)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    if args.device == "auto":
        args.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return args


def problems_of(args: argparse.Namespace) -> list[str]:
    """Every flag that cannot work."""
    found = list(folder_problems(args.model_path))
    for name in ("max_length", "max_steps", "batch_size", "grad_accum_steps", "dataset_repeat", "log_every", "fsdp_world_size"):
        if getattr(args, name) < 1:
            found.append(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("num_workers", "prompt_weight", "mistake_weight"):
        if not 0 <= getattr(args, name) < math.inf:
            found.append(f"--{name.replace('_', '-')} must be at least 0, got {getattr(args, name)}")
    for name in ("seed", "learning_rate", "lr_warmup_steps", "min_lr_ratio", "weight_decay"):
        found += out_of_bounds(name, getattr(args, name), f"--{name.replace('_', '-')}")
    if args.walks and not args.walks.is_file():
        found.append(f"--walks {args.walks}: no such file")
    if args.out:
        found += cannot_be_made("--out", args.out)
        saves = [args.out, *(snapshot_folder(args.out, step) for step in args.save_steps)]
        lost = [f"{folder} {what}" for folder in saves if (what := taken_by(folder))]
        found += [f"--out {args.out}: {what}, which would be deleted; name another folder" for what in lost]
        model = Path(os.path.realpath(args.model_path))  # `resolve` raises at a link to itself
        if any(model.is_relative_to(os.path.realpath(folder)) for folder in saves):
            found.append(f"--out {args.out}: --model-path {args.model_path} would be replaced; name another folder")
    elif args.save_steps:
        found.append("--save-steps needs --out: there is no folder to save to")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # no such device, or a torch without CUDA
        found.append(f"--device {args.device}: {str(error).splitlines()[0]}")
    return found


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
    """After each step: prints the loss (rank 0's), saves a snapshot where one is due."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self._model, self._args, self._started = model, args, time.monotonic()
        self._losses: list[torch.Tensor] = []

    def __call__(self, step: int, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        if step % self._args.log_every == 0:
            mean = torch.stack(self._losses).mean().item()
            self._losses.clear()
            if not self._args.fsdp_rank:
                print(f"step {step}  loss {mean:.4f}  {time.monotonic() - self._started:.1f} s", flush=True)
        if step in self._args.save_steps:
            save(self._model, self._args, snapshot_folder(self._args.out, step), step)


def snapshot_folder(out: Path, step: int) -> Path:
    """Beside `--out`, not in it: the last save replaces the whole folder."""
    return out.with_name(f"{out.name}-step-{step}")


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
        print(f"{args.out}: saved after {args.max_steps} micro-steps" if args.out else "nothing is saved without --out", flush=True)
    if ranks is not None:
        ranks.leave()


def run_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    """Start one process a rank and wait for all; the first that fails ends the others. Returns its exit code."""
    port = args.fsdp_master_port or free_port()
    meeting = [f"MASTER_ADDR={args.fsdp_master_addr}", f"MASTER_PORT={port}", f"WORLD_SIZE={args.fsdp_world_size}"]
    command = [sys.executable, "-m", "accerl_mp.tools.sft", *argv, "--parent-pid", str(os.getpid()), "--fsdp-rank"]
    # Process groups of their own: Ctrl+C is for this process alone.
    ranks = [
        subprocess.Popen(["env", *meeting, f"RANK={rank}", *command, str(rank)], process_group=0) for rank in range(args.fsdp_world_size)
    ]
    try:
        while (codes := [rank.poll() for rank in ranks]).count(None) and not any(codes):
            time.sleep(0.1)
        return next((code for code in codes if code), 0)
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            try:
                rank.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.fsdp_rank is not None:
        die_with_parent(args.parent_pid)
    elif problems := problems_of(args):
        return _said(f"this cannot be trained:\n{ConfigError(problems)}", 2)
    try:
        if args.use_fsdp and args.fsdp_rank is None:
            return run_ranks(args, sys.argv[1:] if argv is None else argv)
        run(args)
    except (ConfigError, OSError) as error:  # walks that are damaged, a template that cannot carry an episode, a full disk
        return _said(str(error), 1)
    except KeyboardInterrupt:
        return _said("stopped; nothing but what --save-steps asked for was saved", 130)
    if args.fsdp_rank is not None:
        exit_now(0)
    return 0


def _said(text: str, code: int) -> int:
    print(f"sft: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
