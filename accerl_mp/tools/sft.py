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
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.bounds import out_of_bounds
from accerl_mp.checks import cannot_be_made
from accerl_mp.config import ConfigError
from accerl_mp.export_place import snapshot_folder, taken_by
from accerl_mp.model_folder import folder_problems
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.transport.process import die_with_parent, exit_now

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
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


def problems_of(args: argparse.Namespace) -> list[str]:
    """Every flag that cannot work, by numbers, names and files alone; `supervised.find_device` looks at the machine."""
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
    if not _DEVICE.fullmatch(args.device):
        found.append(f"--device {args.device}: expected auto, cpu, cuda or cuda:N")
    return found


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
    args = build_parser().parse_args(argv)
    if args.fsdp_rank is not None:
        die_with_parent(args.parent_pid)
    elif problems := problems_of(args):
        return _said(f"this cannot be trained:\n{ConfigError(problems)}", 2)
    from accerl_mp.tools.supervised import find_device, run  # after what needs no torch was refused

    try:
        if problem := find_device(args):
            return _said(f"this cannot be trained:\n{ConfigError([problem])}", 2)
        if args.use_fsdp and args.fsdp_rank is None:
            return run_ranks(args, sys.argv[1:] if argv is None else argv)
        run(args)
    except (ConfigError, OSError) as error:  # walks that are damaged, a template that cannot carry an episode, a full disk
        return _said(str(error), 1)
    except KeyboardInterrupt:
        return _said(f"stopped; {'what --save-steps asked for until now' if args.save_steps else 'nothing'} was saved", 130)
    if args.fsdp_rank is not None:
        exit_now(0)
    return 0


def _said(text: str, code: int) -> int:
    print(f"sft: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
