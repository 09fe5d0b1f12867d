"""`tools.sft` as the reference's local trainer: built-in chat pairs, response-only labels, one rank and two, its flags."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accerl_mp.tools import sft, supervised
from accerl_mp.tools.chat import load_chat
from accerl_mp.tools.warm_start import REPLY, UNTRAINED, PairExamples

DEMO = Path(__file__).parent.parent / "accerl_mp" / "presets" / "demo_model"
FLAGS = ["--model-path", str(DEMO), "--device", "cpu", "--learning-rate", "3e-3"]


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ of \d+  loss (\S+)", output, re.MULTILINE)]


@pytest.mark.parametrize("max_length", [128, 8])
def test_only_the_answer_is_trained(max_length: int) -> None:
    """Its tokens and the one that ends the turn; where the question leaves no room for it, the last token that is left."""
    tokenizer, chat = load_chat(DEMO)
    examples = PairExamples(supervised.PAIRS, tokenizer, chat, max_length=max_length)
    for index, (_, answer) in enumerate(supervised.PAIRS):
        example = examples.build(index, random.Random(0))
        trained = [token for token, role in zip(example.ids, example.roles, strict=True) if role == REPLY]
        assert set(example.roles) == {REPLY, UNTRAINED}
        assert len(example.ids) <= max_length
        if max_length == 8:
            assert example.roles == [UNTRAINED] * 7 + [REPLY]
        else:
            assert trained[-1] in tokenizer.eos_token_ids
            assert tokenizer.decode(trained[:-1]) == answer


def test_what_is_not_trained_has_no_gradient() -> None:
    """Of the loss that the chat pairs train on, with respect to the losses of single tokens: the mean over reply tokens."""
    losses = torch.ones(2, 4, requires_grad=True)
    roles = torch.tensor([[UNTRAINED, UNTRAINED, REPLY, REPLY], [UNTRAINED, REPLY, UNTRAINED, UNTRAINED]])
    supervised.weighted_loss(losses, roles, prompt_weight=0.1, mistake_weight=0.0).backward()
    torch.testing.assert_close(losses.grad, (roles == REPLY).float() / 3)


@pytest.mark.parametrize("train_mode", ["full", "last_layer", "lm_head"])
def test_the_loss_falls_in_every_train_mode(train_mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointing = ["--gradient-checkpointing"] if train_mode == "full" else []
    assert sft.main([*FLAGS, "--train-mode", train_mode, "--max-steps", "24", *checkpointing]) == 0
    losses = _losses(capsys.readouterr().out)
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])


def test_the_last_steps_have_a_line_though_they_are_fewer_than_log_every(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = supervised.Reporter(torch.nn.Linear(1, 1), sft.build_parser().parse_args([*FLAGS, "--max-steps", "5", "--log-every", "2"]))
    for step in range(1, 6):
        reporter(step, torch.tensor(float(step)))
    lines = [line.rpartition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 2 of 5  loss 1.5000", "step 4 of 5  loss 3.5000", "step 5 of 5  loss 5.0000"]


def test_snapshots_outlive_the_last_save(tmp_path: Path) -> None:
    """Each with the weights of its own step."""
    out = tmp_path / "made" / "model"
    flags = ["--train-mode", "lm_head", "--max-steps", "4", "--grad-accum-steps", "1", "--save-steps", "1", "3", "--out", str(out)]
    assert sft.main([*FLAGS, *flags]) == 0
    folders = [out.with_name("model-step-1"), out.with_name("model-step-3"), out]
    assert sorted(out.parent.iterdir()) == sorted(folders)
    heads = [load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in folders]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert all((folder / "tokenizer.json").is_file() for folder in folders)


@pytest.mark.timeout(300)
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    """Two micro-steps of one rank are one of two ranks: the same 4 updates, and a rest of one micro-step that is dropped.

    The masters agree to float32 rounding; saved in bfloat16, a value may still fall on the other side of a rounding border.
    """
    common = [*FLAGS, "--train-mode", "full", "--batch-size", "2", "--weight-decay", "0.1"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert sft.main([*common, "--max-steps", "9", "--grad-accum-steps", "2", "--out", str(one)]) == 0
    flags = [*common, "--max-steps", "4", "--grad-accum-steps", "1", "--use-fsdp", "--fsdp-world-size", "2", "--out", str(two)]
    done = subprocess.run([sys.executable, "-m", "accerl_mp.tools.sft", *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = _losses(done.stdout)
    assert losses[-1] < losses[0]
    weights, start = (load_file(folder / "model.safetensors") for folder in (one, DEMO))
    for name, got in load_file(two / "model.safetensors").items():
        torch.testing.assert_close(got, weights[name], atol=1e-4, rtol=1e-2, msg=name)
        assert not torch.equal(weights[name], start[name].to(weights[name].dtype)), name


def test_every_flag_of_the_references_local_trainer() -> None:
    flags = "--model-path m --device cpu --dtype float32 --train-mode full --max-length 64 --batch-size 2 --max-steps 3"
    flags += " --learning-rate 1e-4 --weight-decay 0.1 --grad-accum-steps 2 --dataset-repeat 1 --log-every 2 --seed 3"
    flags += " --trust-remote-code --gradient-checkpointing --use-fsdp --fsdp-world-size 2 --fsdp-master-addr 127.0.0.1"
    flags += " --fsdp-master-port 29511"
    args = sft.build_parser().parse_args(flags.split())
    assert (args.dataset_repeat, args.fsdp_master_port, args.gradient_checkpointing) == (1, 29511, True)
    defaults = sft.build_parser().parse_args(["--model-path", "m"])
    assert (defaults.train_mode, defaults.max_length, defaults.batch_size, defaults.max_steps) == ("lm_head", 128, 2, 1000)
    assert (defaults.learning_rate, defaults.weight_decay, defaults.grad_accum_steps, defaults.seed) == (1e-5, 0.0, 2, 42)


def test_all_that_cannot_be_trained_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-path", "nowhere", "--batch-size", "0", "--learning-rate", "nan", "--min-lr-ratio", "2", "--walks", "none"]
    words += ["--save-steps", "3", "--device", "quantum:0", "--seed", "-1"]
    assert sft.main(words) == 2
    shown = capsys.readouterr().err
    for part in (
        "--model-path nowhere",
        "--batch-size",
        "--learning-rate",
        "--min-lr-ratio",
        "--walks",
        "--save-steps",
        "--device",
        "--seed",
    ):
        assert f"- {part}" in shown


@pytest.mark.parametrize(("words", "saved"), [("", "nothing"), ("--out x --save-steps 3", "what --save-steps asked for until now")])
def test_a_stop_says_what_was_saved(words: str, saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervised, "run", stopped)
    assert sft.main(["--model-path", str(DEMO), "--device", "cpu", *words.split()]) == 130
    assert capsys.readouterr().err == f"sft: stopped; {saved} was saved\n"
