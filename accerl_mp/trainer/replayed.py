"""The trainer on recorded samples: no vLLM, no games, no supervisor.

    torchrun --nproc-per-node N -m accerl_mp.trainer --replay-samples RUN/samples [FLAGS ...]

Starts from the recorded run's settings; flags override them. Writes into `--log-dir`: args.json, metrics.jsonl (a line a round),
weights.sha256 (of the float32 masters), saved states (`--resume-every-rounds`) and, with `--save-checkpoint`, the export. With
`--deterministic` two runs give equal bits, also where one was killed and went on (`--resume auto`).
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from accerl_mp import checks, cli
from accerl_mp.config import Config, ConfigError, resolve
from accerl_mp.models.build import compute_dtype
from accerl_mp.models.units import iter_weights
from accerl_mp.recovery import SavedState, disagreements, games_of_state, newest_whole, resume_dir_of
from accerl_mp.topology import RunPaths, torchrun_rank
from accerl_mp.trainer.checkpoint import export, export_folder, trainer_state
from accerl_mp.trainer.metrics import RoundMetrics
from accerl_mp.trainer.random_state import random_state, set_random_state
from accerl_mp.trainer.ranks import Ranks, prepare_torch
from accerl_mp.trainer.recording import load_step, recorded_shape
from accerl_mp.trainer.replay import ReplayCounts
from accerl_mp.trainer.saving import Content, Saver
from accerl_mp.trainer.sharded import Reference, build_sharded
from accerl_mp.trainer.state import Progress, copied, load_tensors, tensors_of
from accerl_mp.trainer.step import LocalTotals, Stepper, StepResult
from accerl_mp.transport.health import Health
from accerl_mp.transport.saved_ring import RingCut, rank_fields


def main(argv: list[str]) -> int:
    """Exit code: 2 for settings that cannot work."""
    rank, world_size = torchrun_rank()
    try:
        config = replay_config(argv, world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    prepare_torch(config)
    health = Health.detached(f"trainer/{rank}")
    ranks = Ranks.join(rank=rank, size=world_size, on_gpu=config.run.placement != "cpu", health=health)
    try:
        ReplayedRun(config, ranks, health).run()
    finally:
        ranks.leave()
    return 0


def replay_config(argv: list[str], world_size: int) -> Config:
    """The recorded settings under those of `argv`, resolved and checked. ConfigError names all problems."""
    typed = cli.parse(argv, environ={})
    folder = Path(typed.run.replay_samples)
    if not typed.run.replay_samples or not (folder / "args.json").is_file():
        raise ConfigError([f"--replay-samples {folder}: no args.json in it: not a folder that --record-samples wrote"])
    recorded = Config.load(folder / "args.json").replace(log_dir=None, checkpoint_dir=None, record_samples=False, resume="")
    default_dir = f"runs/replayed/{time.strftime('%Y%m%d-%H%M%S')}"
    config = resolve(cli.parse(argv, environ={}, base=recorded), num_gpus=torch.cuda.device_count(), log_dir=default_dir)
    num_steps, num_ranks = recorded_shape(folder)
    if problems := checks.check_replayed(config, num_steps=num_steps, num_ranks=num_ranks, world_size=world_size):
        raise ConfigError(problems)
    saved_state(config)  # refused here, before the ranks meet
    return config


class ReplayedRun:
    """One rank. Methods are collective."""

    def __init__(self, config: Config, ranks: Ranks, health: Health) -> None:
        self._config, self._ranks = config, ranks
        self._dtype = compute_dtype(config, ranks.device)
        self._model, unsharded = build_sharded(config, ranks, self._dtype)
        reference = Reference.if_wanted(config, ranks, self._dtype)
        self._stepper = Stepper(self._model, config, ranks, unsharded=unsharded, reference=reference)
        self._metrics = RoundMetrics(config, ranks)
        self._folder = Path(config.metrics.log_dir or ".")
        self._saver = Saver(RunPaths(self._folder).resume, config, ranks, health)
        if ranks.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            config.save(self._folder / "args.json")

    def run(self) -> None:
        """All recorded steps, at most --max-steps, from where the saved state ends."""
        num_steps = min(recorded_shape(Path(self._config.run.replay_samples))[0], self._config.optimizer.max_steps)
        every = self._config.run.sync_every_optimizer_steps
        for step in range(self._resume(), num_steps):
            result = self._train(step)
            if self._ranks.rank == 0:
                print(f"step {step + 1}/{num_steps}  gradient norm {result.grad_norm:.6g}", flush=True)
            if (step + 1) % every == 0 or step + 1 == num_steps:
                self._close_round(step + 1)
                self._save_if_due(step + 1, is_last=step + 1 == num_steps)
        self._finish(num_steps)

    def _resume(self) -> int:
        """Steps that are done: 0 without `--resume`, or where `--resume auto` finds nothing."""
        saved = saved_state(self._config)
        if saved is None:
            return 0
        progress = Progress(**saved.content["trainer"])
        load_tensors(self._model, self._stepper.optimizer, saved.folder, self._saver.group)
        self._stepper.num_bad_in_a_row = progress.num_bad_in_a_row
        self._metrics.restore([], all_tokens=progress.all_tokens, all_samples=progress.all_samples)
        set_random_state(rank_fields(saved.rank_file(self._ranks.rank))["random"], self._ranks.device)
        self._saver.saved_step = progress.step
        return progress.step

    def _save_if_due(self, step: int, *, is_last: bool) -> None:
        every = self._config.run.sync_every_optimizer_steps * self._config.metrics.resume_every_rounds
        if not is_last and (every == 0 or step % every):
            return
        progress = Progress(
            step=step,
            num_bad_in_a_row=self._stepper.num_bad_in_a_row,
            all_tokens=self._metrics.all_tokens,
            all_samples=self._metrics.all_samples,
        )
        tensors = copied(tensors_of(self._model, self._stepper.optimizer), self._saver.mesh)
        self._saver.start(Content(progress, tensors, RingCut.empty(), {"random": random_state(self._ranks.device)}))

    def _train(self, step: int) -> StepResult:
        recorded = load_step(Path(self._config.run.replay_samples), step, self._ranks.rank)
        samples = [sample for batch in recorded.micro_batches for sample in batch]
        totals = LocalTotals(*self._ranks.sums(LocalTotals.of(samples).numbers()))
        result = self._stepper.run(recorded.micro_batches, totals, step=step, version=recorded.version)
        self._metrics.add_step(result, samples, choose_seconds=0.0)
        self._metrics.add_replay(ReplayCounts(consumed=len(samples)))
        self._stepper.check_bad_steps()
        return result

    def _close_round(self, step: int) -> None:
        values = {tag: total / count for tag, (total, count, _) in self._metrics.close_round().items() if count}
        if self._ranks.rank == 0:
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": time.time()} | values) + "\n")

    def _finish(self, num_steps: int) -> None:
        self._saver.finish()
        digest = weights_digest(self._model)
        if self._ranks.rank == 0:
            (self._folder / "weights.sha256").write_text(digest + "\n")
            print(f"weights {digest}", flush=True)
        if self._config.metrics.save_checkpoint:
            state = trainer_state(self._config, optimizer_step=num_steps, round_number=0, policy_version=-1)
            folder = export_folder(self._config, num_steps, is_final=True)
            export(self._model, folder, self._config, dtype=self._dtype, rank=self._ranks.rank, state=state)


def saved_state(config: Config) -> SavedState | None:
    """What `--resume` goes on from: auto or DIR, as for launch.sh. ConfigError where it cannot."""
    own = RunPaths(Path(config.metrics.log_dir or ".")).resume
    if not config.run.resume:
        return None
    folder = own if config.run.resume == "auto" else resume_dir_of(Path(config.run.resume))
    saved, damaged = newest_whole(folder)
    kept = games_of_state(saved, config) if saved else None
    problems = disagreements(saved, config, kept[0] if kept else None) if saved else []
    if saved is None and (damaged or config.run.resume != "auto"):
        problems.append(f"--resume {config.run.resume}: no saved state in {folder} can be used" + "".join(f"; {text}" for text in damaged))
    if saved and saved.num_ranks != config.run.fsdp_world_size:
        problems.append(f"--resume {config.run.resume}: it was saved by {saved.num_ranks} ranks, recorded samples belong to theirs")
    if problems:
        raise ConfigError(problems)
    return saved


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names and bits of the float32 masters. Collective; the same on all ranks that gather, rank 0 at least."""
    digest = hashlib.sha256()
    for name, tensor in iter_weights(model, trainable_only=False, dtype=None):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
