"""Records in, rounds out: sums up what arrives and, when trainer/0 closes a round, writes and says it."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from accerl_mp.config import Config
from accerl_mp.stats.bottleneck import FREE_CORES, ROUND_SECONDS, Doctor
from accerl_mp.stats.no_signal import SignalWatch
from accerl_mp.stats.status import Status
from accerl_mp.stats.tags import TAGS, X_AXES, lookup
from accerl_mp.stats.window_file import WindowFile
from accerl_mp.stats.windows import EPISODE_HISTOGRAMS, EpisodeWindow, GroupRewards, Histograms, RoundSums
from accerl_mp.stats.writer import MetricFiles

SETTLE_S = 0.1
"""After trainer/0 closes a round, records of other processes that are still on their way may come this late."""

_log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class Collector:
    """Everything that the stats process knows; one thread, no waiting. Clocks come in as arguments (`time.monotonic`).

    Records (see `transport/channels.py`):
        values   added to the round; with a "step" of its own (an evaluation) it is written at once, at that step
        numbers  into the round's histograms
        text     written at once, at the step of the last round
        episode  into the window and the round
        round    from trainer/0: closes the round, `SETTLE_S` later
    """

    def __init__(
        self,
        config: Config,
        files: MetricFiles,
        status: Status,
        *,
        say: Callable[[str], None],
        num_restarts: Callable[[], int] = lambda: 0,
        free_cores: Callable[[], float | None] = lambda: None,
    ) -> None:
        """free_cores: since its last call (`CpuMeter.free_cores`)."""
        metrics = config.metrics
        self._config, self._files, self._status = config, files, status
        self._say, self._num_restarts, self._free_cores = say, num_restarts, free_cores
        self._doctor, self._signal = Doctor(config), SignalWatch(config)
        self._window = EpisodeWindow(metrics.metrics_window_size, metrics.metrics_active_timeout_seconds)
        self._window_file = WindowFile(files.run_dir, group_size=config.group_size)
        self._window_file.load_into(self._window)
        self._sums = RoundSums()
        self._histograms = Histograms()
        self._groups = GroupRewards(config, self._sums)
        self._num_episodes = 0
        self._round_started_s: float | None = None
        self._open_round: Record | None = None
        self._close_at_s = 0.0
        self._undeclared: set[str] = set()
        self._said_bound = ""

    def start_clock(self, now_s: float) -> None:
        """The first weights are in vLLM: the first round's time starts here. Later calls change nothing."""
        if self._round_started_s is None:
            self._round_started_s = now_s
            self._sums.begin()
            self._free_cores()

    def take(self, record: Record, now_s: float) -> None:
        """One record off the socket."""
        match record["kind"]:
            case "values" if record.get("step") is not None:
                self._write_point(record)
            case "values":
                self._add(record["values"], record["source"], now_s)
            case "numbers":
                self._histograms.add_all(record["numbers"])
            case "text":
                self._files.write_text(record["tag"], record["text"], step=self._status.step)
            case "episode":
                self._take_episode(record["episode"], now_s)
            case "round":
                self._take_round(record, now_s)
            case other:
                _log.warning("%s sent a record of unknown kind %r", record.get("source"), other)

    def seconds_to_next(self, now_s: float) -> float | None:
        """Until `close_due` has something to do; None: nothing is due."""
        return None if self._open_round is None else max(0.0, self._close_at_s - now_s)

    def close_due(self, now_s: float, *, force: bool = False) -> None:
        """Close the round if its last records have had their time."""
        if self._open_round is not None and (force or now_s >= self._close_at_s):
            self._close(self._open_round, now_s)

    def speak_up(self, now_s: float, starved_s: float) -> None:
        """Of a step that does not come for want of signal. starved_s: how long the trainer has waited for samples, 0 where it does not."""
        if self._signal.is_due(now_s, starved_s):
            self._say(self._signal.line(starved_s, self._window.values(now_s).get("TextWorld/WinRate", 0.0)))

    def finish(self, now_s: float) -> None:
        """At the end: the open round, and what the trainer has sent since (of the last push)."""
        self.close_due(now_s, force=True)
        values = self._sums.reduce(0.0)
        last = {tag: value for tag, value in values.items() if (row := lookup(tag)) and row.source == "trainer/0"}
        self._window_file.save(self._window, math.inf)
        if last:
            self._files.write(step=self._status.step, version=self._status.version, time_s=time.time(), values=last)

    def _take_episode(self, episode: Record, now_s: float) -> None:
        self._window.add(episode, now_s)
        if episode["kind"] == "train":
            self._groups.add(episode)
            self._histograms.add_all({tag: [episode[field]] for tag, field in EPISODE_HISTOGRAMS.items()})
            self._num_episodes += 1
            self._status.count_episode()

    def _take_round(self, record: Record, now_s: float) -> None:
        self.close_due(now_s, force=True)  # rounds shorter than SETTLE_S
        self._open_round, self._close_at_s = record, now_s + SETTLE_S
        self._add(record.get("values", {}), record["source"], now_s)

    def _add(self, values: Mapping[str, Any], source: str, now_s: float) -> None:
        self._warn_of_undeclared(values)
        self._sums.add_all(values, source, now_s)
        self._signal.add(values)

    def _close(self, record: Record, now_s: float) -> None:
        closed_s = self._close_at_s - SETTLE_S
        round_s = closed_s - self._round_started_s if self._round_started_s is not None else 0.0
        self._open_round, self._round_started_s = None, closed_s
        values = self._values(now_s, round_s) | {"Stats/Restarts": float(self._num_restarts())}
        if (free := self._free_cores()) is not None:
            values[FREE_CORES] = free
        bound = self._doctor.say(values)
        number = record.get("round") or self._status.round + 1
        # The line last: who has seen it finds the rest of its round.
        self._files.write_histograms(step=record["step"], time_s=record["time"], counted=self._histograms.take())
        self._files.write(step=record["step"], version=record["version"], time_s=record["time"], values=values)
        where = {"number": number, "step": record["step"], "version": record["version"]}
        self._status.close_round(**where, round_s=round_s, values=values, sentence=bound, alike=self._doctor.alike)
        self._status.save()
        self._window_file.save(self._window, now_s)
        if number % self._config.metrics.log_every == 0:
            self._say(round_lines(number, record["step"], values, bound if self._is_news(bound) else ""))

    def _is_news(self, bound: str) -> bool:
        """Whether the run is bound by something else than when it was said last: its numbers are in status.json, `top` and the report."""
        before, self._said_bound = self._said_bound, bound.partition(":")[0]
        return self._said_bound != before

    def _values(self, now_s: float, round_s: float) -> dict[str, float]:
        """Every number of the round."""
        if round_s > 0:
            self._sums.add(ROUND_SECONDS, "stats", round_s)
            self._sums.add("Rollout/EpisodesPerSec", "stats", self._num_episodes, round_s)
        self._num_episodes = 0
        values = self._sums.reduce(round_s) | self._window.values(now_s)
        if (score := values.get("TextWorld/NormalizedScore")) is not None:
            values |= {tag.name: score for tag in TAGS.values() if tag.x_axis != "step" and X_AXES[tag.x_axis] in values}
        return values

    def _write_point(self, record: Record) -> None:
        """An evaluation: its own step, not the current round's."""
        self._warn_of_undeclared(record["values"])
        point = RoundSums()
        point.add_all(record["values"], record["source"], 0.0)
        values = point.reduce(0.0)
        step, version = record["step"], record.get("version", self._status.version)
        self._files.write(step=step, version=version, time_s=record["time"], values=values)
        if "Eval/WinRate" in values:
            self._status.add_evaluation(step=step, version=version, time_s=record["time"], values=values)
            self._say(evaluation_line(step, version, values))
        self._status.save()

    def _warn_of_undeclared(self, values: Mapping[str, Any]) -> None:
        for tag in values:
            if tag not in self._undeclared and lookup(tag) is None:
                self._undeclared.add(tag)
                _log.warning("tag %r is not in stats/tags.py: it is written as a mean", tag)


def round_lines(number: int, step: int, values: Mapping[str, float], bound: str) -> str:
    """Numbers, then what bounds the run, where there is news of it. Example of the first line, which fits 80 columns:

    `round 12  step 24  win 0.61 (last 1000)  12.3 samples/s  3,210 tok/s  lag 1.2`
    """
    parts = [f"round {number}", f"step {step}"]
    formats = {
        "TextWorld/WinRate": f"win {{:.2f}} (last {values.get('Rollout/WindowEpisodes', 0):.0f})",
        "Train/SamplesPerSec": "{:.1f} samples/s",
        "Train/TokensPerSec": "{:,.0f} tok/s",
        "Replay/TrainSampleTrainerVersionLagMean": "lag {:.1f}",
    }
    parts += [text.format(values[tag]) for tag, text in formats.items() if tag in values]
    return "  ".join(parts) + (f"\n  {bound}" if bound else "")


def evaluation_line(step: int, version: int, values: Mapping[str, float]) -> str:
    """Example: `evaluation at step 24, version 12: win 0.75, score 0.80 (60 episodes)`."""
    score = f", score {values['Eval/NormalizedScore']:.2f}" if "Eval/NormalizedScore" in values else ""
    episodes = f" ({values['Eval/Episodes']:.0f} episodes)" if "Eval/Episodes" in values else ""
    return f"evaluation at step {step}, version {version}: win {values['Eval/WinRate']:.2f}{score}{episodes}"
