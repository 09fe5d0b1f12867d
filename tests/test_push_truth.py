"""Faults planted on the wire and after it, each named; salts; several inference processes."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixture import (
    InferenceRun,
    RequestClient,
    client,  # noqa: F401
    engine,  # noqa: F401
    greedy_of,
    logprobs_of,
    start_inference,
    wait_until,
)
from push_load import Load, logprobs_of_replies, prompt_of, train_only

from accerl_mp.models.names import manifest
from accerl_mp.models.units import Whole, iter_units, iter_weights
from accerl_mp.weight_sync import sender
from accerl_mp.weight_sync.buckets import BucketSender
from accerl_mp.weight_sync.layout import checksum, plan_layout
from accerl_mp.weight_sync.protocol import SyncError, WrongWeights
from accerl_mp.weight_sync.truth import PROBE_BOUNDS, Bound, compare_logprobs, compare_sums, relative_distance

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("arrived", "problem"),
    [
        ({"weight": "1", "buffer": "2"}, None),
        ({"weight": "1", "buffer": "3"}, "worker 1: tensor buffer arrived damaged"),
        ({"weight": "1"}, "worker 1: tensor buffer arrived damaged"),
        ({"weight": "9", "buffer": "9"}, "tensor weight and 1 more arrived damaged"),
        ({"weight": "1", "buffer": "2", "other": "3"}, "tensors that were not sent"),
    ],
)
def test_checksums_name_worker_and_tensor(arrived: dict[str, str], problem: str | None) -> None:
    answers = [{"checksums": [{"weight": "1", "buffer": "2"}, arrived]}]
    if problem is None:
        compare_sums(3, {"weight": "1", "buffer": "2"}, answers)
        return
    with pytest.raises(WrongWeights, match=rf"push 3 at inference/0, {problem}" if problem.startswith("worker") else problem):
        compare_sums(3, {"weight": "1", "buffer": "2"}, answers)


@pytest.mark.parametrize("off", [0.02, float("nan"), -float("inf")])
def test_the_probe_names_the_process(off: float) -> None:
    expected = np.zeros(8)
    compare_logprobs(3, expected, [{"logprobs": [1e-5] * 8}], Bound(1e-3, 0.0))
    with pytest.raises(WrongWeights, match="push 3: the probe of inference/1 is off"):
        compare_logprobs(3, expected, [{"logprobs": [1e-5] * 8}, {"logprobs": [0.0, off, *[0.0] * 6]}], Bound(1e-3, 0.0))


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_the_probe_knows_noise_from_wrong_weights(sharpness: float) -> None:
    """However sharp the model, and though one token is nats off: seen on a GPU, where it ended a run whose weights were right."""
    rng = np.random.default_rng(1)
    expected = np.concatenate([[0.0], rng.normal(-14, 2.8, 255)])
    noise = rng.normal(0, 0.1, 256)
    noise[77] = 7.1

    def answers(errors: np.ndarray) -> list[dict[str, object]]:
        return [{"logprobs": (sharpness * (expected + errors)).tolist()}]

    compare_logprobs(1, sharpness * expected, answers(noise), PROBE_BOUNDS[torch.bfloat16])
    with pytest.raises(WrongWeights, match="of their spread"):
        compare_logprobs(1, sharpness * expected, answers(4 * noise), PROBE_BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("left_out", [0.0, 0.02])
def test_the_distance_of_a_probe_is_the_mean_in_units_of_the_spread(left_out: float) -> None:
    rng = np.random.default_rng(2)
    expected = rng.normal(-9, 2, 255)
    got = expected + rng.normal(0, 0.1, 255)
    nats = np.sort(np.abs(got - expected))[: 255 - int(255 * left_out)]
    assert relative_distance(got, expected, left_out) == pytest.approx(nats.mean() / expected.std(), rel=1e-9)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0), (torch.bfloat16, 20)])
def test_the_probe_bears_few_tokens_that_are_off_and_in_float32_none(dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(3)
    expected = np.concatenate([[0.0], rng.normal(-14, 2.8, 255)])
    got = expected + 1e-5 * rng.normal(0, 1, 256)
    compare_logprobs(1, expected, [{"logprobs": got}], PROBE_BOUNDS[dtype])
    got[5 : 6 + most] += 5.0
    with pytest.raises(WrongWeights):
        compare_logprobs(1, expected, [{"logprobs": got}], PROBE_BOUNDS[dtype])


@pytest.mark.parametrize(("dtype", "is_borne"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_two_percent_of_a_probe_that_are_worst_count_in_float32_alone(dtype: torch.dtype, is_borne: bool) -> None:
    rng = np.random.default_rng(4)
    expected = np.concatenate([[0.0], rng.normal(-14, 2.8, 255)])
    got = expected.copy()
    got[5:10] -= 30.0
    with contextlib.nullcontext() if is_borne else pytest.raises(WrongWeights):
        compare_logprobs(1, expected, [{"logprobs": got}], PROBE_BOUNDS[dtype])


def test_a_window_of_one_token_has_nothing_to_probe() -> None:
    compare_logprobs(1, np.zeros(1), [{"logprobs": [0.0]}], PROBE_BOUNDS[torch.bfloat16])


def test_a_buffer_is_sent_and_summed() -> None:
    """What `--verify-sync` compares holds buffers too, and a layer goes whole where a part of it trains."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.layers[1].weight.requires_grad_(True)
    names = [name for name, _, _ in manifest(model, trainable_only=True, dtype=torch.float32)]
    assert names == [f"layers.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    sums = {name: checksum(tensor) for name, tensor in iter_weights(model, trainable_only=True, dtype=torch.float32)}
    assert list(sums) == names
    model.layers[1].running_mean += 1
    assert sums["layers.1.running_mean"] != checksum(model.layers[1].running_mean)


@pytest.fixture
def mended(engine: InferenceRun) -> Iterator[None]:  # noqa: F811
    """After a failed push: a new group, and the weights and version numbers that the tests after it count on."""
    yield
    version = engine.sync._version + 1
    engine.sync.close()
    engine.restore()
    engine.connect()
    engine.push(version)


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share the engine: each leaves the weights that it has found."""
    yield
    if "engine" in request.fixturenames and "mended" not in request.fixturenames:
        run: InferenceRun = request.getfixturevalue("engine")
        run.restore()
        run.push(run.sync._version + 1)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged.view(torch.uint8)[5] ^= 4
    return damaged


def _skipped(tensor: torch.Tensor) -> torch.Tensor:
    """Its room stays as the push before has left it."""
    return torch.zeros_like(tensor)


@pytest.mark.vllm
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("fault", [_flipped, _skipped])
def test_damage_on_the_wire_is_named_by_its_tensor(
    engine: InferenceRun,  # noqa: F811
    client: RequestClient,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    slots, _ = plan_layout(manifest(engine.model, trainable_only=False, dtype=torch.float32))
    victim = next(index for index, slot in enumerate(slots) if slot.name == "model.layers.1.mlp.up_proj.weight")
    put, count = BucketSender.put, iter(range(10_000))

    def put_damaged(buckets: BucketSender, pieces: list[torch.Tensor], dtype: torch.dtype) -> None:
        put(buckets, [fault(piece) for piece in pieces] if next(count) == victim else pieces, dtype)

    monkeypatch.setattr(BucketSender, "put", put_damaged)
    before = engine.sync._version
    with pytest.raises(SyncError, match=r"inference/0, worker 0: tensor model\.layers\.1\.mlp\.up_proj\.weight arrived damaged"):
        engine.push(before + 1)
    assert set(client.ask(prompt_of(4711))["versions"].tolist()) == {before}, "nothing was loaded, and vLLM answers on"


def _stale(name: str, tensor: torch.Tensor, old: dict[str, torch.Tensor]) -> torch.Tensor:
    return old[name]


def _transposed(name: str, tensor: torch.Tensor, old: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensor.T.reshape(tensor.shape) if name.endswith("layers.0.self_attn.o_proj.weight") else tensor


@pytest.mark.vllm
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("fault", [_stale, _transposed])
def test_wrong_tensors_are_caught_by_the_probe(
    engine: InferenceRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., torch.Tensor],
) -> None:
    old = {name: tensor.clone() for name, tensor in iter_weights(engine.model, trainable_only=False, dtype=torch.float32)}
    train_only(engine.model, "layers.0.self_attn.v_proj")

    def wrong(*arguments: Any, **options: Any) -> Iterator[list[Whole]]:
        for unit in iter_units(*arguments, **options):
            yield [dataclasses.replace(whole, pieces=[fault(whole.name, whole.tensor(), old).flatten()]) for whole in unit]

    monkeypatch.setattr(sender, "iter_units", wrong)
    with pytest.raises(SyncError, match="the probe of inference/0 is off"):
        engine.push(engine.sync._version + 1)


@pytest.mark.vllm
def test_the_salt_keeps_old_weights_out_of_new_episodes(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """A prompt whose KV is cached, then a push. Without the version in the salt the second reply would be of both weights."""
    prompt = prompt_of(77, 120)
    old = client.ask(prompt, max_tokens=8)
    train_only(engine.model, "layers")
    engine.push(engine.sync._version + 1, trainable_only=True)
    fresh, kept = client.ask(prompt, max_tokens=8), client.ask(prompt, max_tokens=8, salt_version=old["salt_version"])
    distances = []
    for reply in (fresh, kept):
        ids = reply["ids"].tolist()
        distances.append(np.abs(reply["logprobs"] - logprobs_of(engine.model, prompt + ids)[-len(ids) :]).max())
    assert distances[0] < 2e-4, "a new episode sees the new weights alone"
    assert distances[1] > 1e-2, "an open one keeps its KV: the price of --prefix-cache-scope episode"


@pytest.mark.vllm
def test_half_of_a_fused_layer_is_pushed_with_the_other_half(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """q without k and v: vLLM has one tensor of the three, which a reload makes anew."""
    train_only(engine.model, "layers.1.self_attn.q_proj")
    report = engine.push(engine.sync._version + 1, trainable_only=True)
    assert report.verified
    prompt = prompt_of(78)
    assert client.ask(prompt, max_tokens=12, temperature=0.0)["ids"].tolist() == greedy_of(engine.model, prompt, 12)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tied_head_that_is_not_packed_again_is_caught_by_the_probe(tmp_path: Path) -> None:
    with start_inference(tmp_path, program=Path(__file__).parent / "faulty_inference.py") as run:
        run.connect()
        with pytest.raises(SyncError, match="the probe of inference/0 is off"):
            run.push(0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_push_reaches_two_inference_processes_at_one_version_and_outlives_one(tmp_path: Path) -> None:
    with start_inference(tmp_path, infer_size=2, inference_start_timeout_s=240.0) as run:
        run.connect()
        run.push(0)
        loads = [Load(run, num_in_flight=6, index=index) for index in range(2)]
        weights = {0: {name: tensor.clone() for name, tensor in run.model.state_dict().items()}}
        for version in (1, 2, 3):
            time.sleep(0.3)
            train_only(run.model, "model.norm")
            weights[version] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
            run.push(version, trainable_only=True)
        for load in loads:
            _check_replies(run, weights, *load.stop())
        run.popens[1].kill()
        run.popens[1].wait()
        train_only(run.model, "model.norm")
        run.popens[1] = run.start_process(1)
        assert run.push(4, trainable_only=True).verified
        for index in range(2):
            client = RequestClient(run, index=index)
            wait_until(lambda client=client: _is_right(run, client), 60)
            client.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_push_reaches_every_worker_of_one_engine(tmp_path: Path) -> None:
    """--infer-tp-size 2: each worker is a member of the weight group, gets the whole model and keeps its part of it."""
    with start_inference(tmp_path, infer_tp_size=2, inference_start_timeout_s=240.0) as run:
        run.connect()
        assert run.push(0).verified
        load = Load(run, num_in_flight=6)
        weights = {0: {name: tensor.clone() for name, tensor in run.model.state_dict().items()}}
        for version in (1, 2, 3):
            time.sleep(0.3)
            train_only(run.model, "model.norm")
            weights[version] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
            assert run.push(version, trainable_only=True).verified
        _check_replies(run, weights, *load.stop())
        train_only(run.model, "")  # all of it: what each worker keeps a part of too
        assert run.push(4, trainable_only=True).verified
        client = RequestClient(run)
        assert _is_right(run, client)
        client.close()
        assert "worker 1: weights are swapped" in run.log


def _is_right(run: InferenceRun, client: RequestClient) -> bool:  # noqa: F811
    reply = client.ask(prompt_of(79), max_tokens=12, temperature=0.0)
    assert set(reply["versions"].tolist()) == {4}
    return reply["ids"].tolist() == greedy_of(run.model, prompt_of(79), 12)


def _check_replies(
    run: InferenceRun, weights: dict[int, dict[str, torch.Tensor]], prompts: dict[int, list[int]], replies: list[dict[str, Any]]
) -> None:
    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert {version for reply in replies for version in reply["versions"].tolist()} >= {1, 2, 3}
    for version, state in weights.items():
        run.model.load_state_dict(state)
        for reply, expected in logprobs_of_replies(run.model, prompts, [r for r in replies if version in r["versions"]]):
            mine = reply["versions"] == version
            np.testing.assert_allclose(reply["logprobs"][mine], expected[mine], atol=2e-4)
    run.model.load_state_dict(kept)
