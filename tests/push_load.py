"""Weights that change a lot, and requests in flight meanwhile whose every token is computed again."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from engine_fixture import InferenceRun, RequestClient, greedy_of


def prompt_of(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(10, 500, length).tolist()


def train_only(model: torch.nn.Module, part: str) -> None:
    """Change only what `part` names, a lot, and leave only that trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
        if part in name:
            with torch.no_grad():
                parameter.normal_(std=1.0 if "norm" in name else 0.15)


def assert_greedy_equal(run: InferenceRun, client: RequestClient, seed: int) -> None:
    """Prompts that were not asked before: the prefix cache of an episode may hold older KV by design."""
    for offset in range(4):
        prompt = prompt_of(1000 * seed + offset)
        assert client.ask(prompt, max_tokens=12, temperature=0.0)["ids"].tolist() == greedy_of(run.model, prompt, 12)


def push_under_load(run: InferenceRun, part: str, num_pushes: int) -> None:
    """Push at random moments with 24 requests in flight, then compute each token's logprob under its own version's weights."""
    weights: dict[int, dict[str, torch.Tensor]] = {}
    load, random = None, np.random.default_rng(0)
    for version in range(run.sync._version + 1, run.sync._version + 1 + num_pushes):
        train_only(run.model, part)
        weights[version] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        run.push(version, trainable_only=True)
        load = load or Load(run, num_in_flight=24)
        time.sleep(random.uniform(0.02, 0.3))
    prompts, replies = load.stop()
    assert sorted(reply["id"] for reply in replies) == sorted(prompts), "each request is answered once"
    for reply in replies:
        assert reply["error"] is None
        assert len(reply["ids"]) == len(reply["versions"]) == len(reply["logprobs"])
        assert (np.diff(reply["versions"]) >= 0).all()
    for version in weights:
        run.model.load_state_dict(weights[version])
        for reply, expected in logprobs_of_replies(run.model, prompts, [r for r in replies if version in r["versions"]]):
            mine = reply["versions"] == version
            np.testing.assert_allclose(reply["logprobs"][mine], expected[mine], atol=2e-4)
    num_mixed = sum(len(set(reply["versions"].tolist())) > 1 for reply in replies)
    assert num_mixed >= 8, "pushes must hit replies in the middle"


@torch.no_grad()
def logprobs_of_replies(
    model: torch.nn.Module, prompts: dict[int, list[int]], replies: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """(reply, logprob of each of its tokens), computed in one padded batch."""
    if not replies:
        return
    rows = [prompts[reply["id"]] + reply["ids"].tolist() for reply in replies]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    for reply, row, values in zip(replies, rows, logprobs, strict=True):
        yield reply, values[len(row) - 1 - len(reply["ids"]) : len(row) - 1]


class Load(threading.Thread):
    """Keeps requests of random lengths in flight."""

    def __init__(self, run: InferenceRun, num_in_flight: int, index: int = 0) -> None:
        super().__init__(daemon=True)
        self._client = RequestClient(run, index=index)
        self._num_in_flight = num_in_flight
        self._stopping = threading.Event()
        self._prompts: dict[int, list[int]] = {}
        self._replies: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        random = np.random.default_rng(1)
        while len(self._replies) < len(self._prompts) or not self._stopping.is_set():
            while len(self._prompts) - len(self._replies) < self._num_in_flight and not self._stopping.is_set():
                prompt = random.integers(10, 500, random.integers(5, 60)).tolist()
                self._prompts[self._client.send(prompt, max_tokens=int(random.integers(4, 90)))] = prompt
            if (reply := self._client.receive(10)) is None:
                return
            self._replies.append(reply)

    def stop(self) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
        self._stopping.set()
        self.join(60)
        assert self._client.receive(0.2) is None, "a reply came twice"
        self._client.close()
        return self._prompts, self._replies
