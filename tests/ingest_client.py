"""A rollout without games for ingest's tests: `python tests/ingest_client.py --run-dir DIR --index N`. Real process, real protocol.

Every group's samples are a function of its id (`group_of`). Behaviour comes from DIR/client.json.
"""

import json
import time
from pathlib import Path
from typing import Any

import zmq
from sample_factory import make_sample

from accerl_mp.samples import RLSample
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.codec import Frame
from accerl_mp.transport.outbox import Outbox
from accerl_mp.transport.process import Process, run_process

ASK_AGAIN_S, RESEND_S = 0.2, 0.3


def is_zero_std(group_id: int) -> bool:
    return group_id % 5 == 4


def group_of(message: dict[str, Any], version: int) -> list[RLSample]:
    return [
        make_sample(episode_id, num_tokens=30 + 40 * (episode_id % 9), group_id=message["group_id"], version=version)
        for episode_id in message["episode_ids"]
    ]


def record_of(message: dict[str, Any], episode_id: int, worker: int) -> dict[str, Any]:
    numbers = ("num_turns", "num_env_steps", "num_invalid", "num_tokens", "num_trained", "seconds", "oldest_version", "newest_version")
    keys = {"episode_id": episode_id, "group_id": message["group_id"], "game_id": message["game_id"], "kind": message["kind"]}
    won = message["game_id"] % 2 == 0
    scores = {"won": won, "lost": not won, "truncated": False, "score": 2.0 * won, "max_score": 2.0, "episode_return": 1.0, "reward": 1.0}
    return keys | scores | dict.fromkeys(numbers, 2) | {"game": Path(message["game_path"]).stem, "worker": worker}


class Client:
    def __init__(self, process: Process) -> None:
        self._process, self._options = process, json.loads((process.paths.run_dir / "client.json").read_text())
        context = sockets.new_context()
        self._work = sockets.connect_dealer(context, process.paths, channels.WORK, identity=process.name)
        self._samples = sockets.connect_dealer(context, process.paths, channels.SAMPLES, identity=process.name)
        self._poller = zmq.Poller()
        self._poller.register(self._work, zmq.POLLIN)
        self._poller.register(self._samples, zmq.POLLIN)
        self._outbox = Outbox(process.paths, process.index)
        self._playing: dict[int, tuple[float, dict]] = {}
        self._sent: dict[int, tuple[float, list[Frame]]] = {}
        self._asked_at = 0.0
        self._acks = (process.paths.run_dir / "acks.txt").open("a", buffering=1)

    def run(self) -> None:
        self._process.health.set_state("running")
        with self._process.health.waiting("the test to end it", timeout_s=0) as wait:
            while True:
                wait.check()
                self._ask()
                self._poller.poll(10)
                self._receive()
                self._end_games()
                self._resend()

    def _ask(self) -> None:
        has_room = len(self._playing) < self._options.get("groups", 1) and len(self._sent) < channels.MAX_UNACKED
        if has_room and time.monotonic() - self._asked_at > ASK_AGAIN_S:
            self._asked_at = time.monotonic()
            self._work.send(channels.pack_ask(self._process.index, [*self._playing, *self._sent]))

    def _receive(self) -> None:
        while self._work.poll(0):
            message = channels.unpack_any(self._work.recv())
            if message["op"] == "group" and message["group_id"] not in self._playing | self._sent:
                self._playing[message["group_id"]] = (time.monotonic(), message)
                self._asked_at = 0.0
        while self._samples.poll(0):
            group_id = channels.unpack("ack", self._samples.recv())["group_id"]
            self._sent.pop(group_id, None)
            self._outbox.free(group_id)
            self._acks.write(f"{group_id}\n")

    def _end_games(self) -> None:
        for group_id, (started, message) in list(self._playing.items()):
            if time.monotonic() - started < self._options.get("seconds", 0.02):
                continue
            del self._playing[group_id]
            if message["kind"] == "train" and message["game_id"] in self._options.get("broken_games", []):
                failed = {"op": "failed", "group_id": group_id, "game_id": message["game_id"], "reason": "the game is broken"}
                self._work.send(channels.pack("failed", failed))
            else:
                self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        group_id, is_train = message["group_id"], message["kind"] == "train"
        outcome = "zero_std" if is_train and is_zero_std(group_id) else "samples"
        samples = group_of(message, max(0, self._process.board.get("policy_version"))) if is_train and outcome == "samples" else []
        header = {"op": "group", "group_id": group_id, "kind": message["kind"], "eval_id": message["eval_id"], "outcome": outcome}
        header["episodes"] = [record_of(message, episode_id, self._process.index) for episode_id in message["episode_ids"]]
        frames = self._outbox.pack(header, samples)
        self._sent[group_id] = (time.monotonic(), frames)
        self._samples.send_multipart(frames)

    def _resend(self) -> None:
        for group_id, (sent, frames) in list(self._sent.items()):
            if time.monotonic() - sent > RESEND_S:
                self._sent[group_id] = (time.monotonic(), frames)
                self._samples.send_multipart(frames)


def main(process: Process) -> None:
    Client(process).run()


if __name__ == "__main__":
    run_process("rollout", main)
