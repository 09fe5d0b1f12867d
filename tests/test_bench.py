"""The scripts in bench/ still run, and their last line is what it should be. Nothing here looks at a speed."""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, compare, end_to_end, packing, push_report, token_times  # noqa: E402
from bench.episodes import Shape, draw_shapes, make_sample, recorded_shapes  # noqa: E402


def run_script(*words: object, timeout_s: float = 100.0) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def run_bench(name: str, out: Path, *flags: object, timeout_s: float = 100.0) -> dict[str, Any]:
    """The result in the last line, which is also in `--out`."""
    output = run_script(f"bench/{name}.py", "--quick", "--out", out, *flags, timeout_s=timeout_s)
    result = json.loads(output.strip().splitlines()[-1])
    common.check_result(result, name)
    assert result["bench"] == name
    assert result == common.read_result(out)
    assert "load average" in output
    return result


def test_a_script_without_its_packages_says_so_in_a_sentence() -> None:
    """Python without them, as a machine's own is: -S leaves them out. The Ray actor's script has an environment of its own."""
    others = ("ray_buffer", "episodes", "models")  # the last two are parts of it too
    files = (ROOT / "bench").glob("*.py")
    scripts = [path for path in files if path.stem not in others and "sys.path.insert(" in path.read_text()]
    assert len(scripts) > 10
    program = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    sys.modules.pop("accerl_mp.tools.set_up", None)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(end)
"""
    words = [sys.executable, "-S", "-c", program, *map(str, scripts)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert len(said) == len(scripts)
    assert all(line.startswith("this environment is not complete (numpy and ") for line in said), said


def named(result: dict[str, Any], name: str, **labels: object) -> list[dict[str, Any]]:
    return [one for one in result["measures"] if one["name"] == name and labels.items() <= one["labels"].items()]


@pytest.mark.timeout(260)
def test_packing_runs_and_plots_and_compares_with_itself(tmp_path: Path) -> None:
    result = run_bench("packing", tmp_path / "packing.json", "--samples", 400, timeout_s=120)
    for one in result["measures"]:
        assert not one["unit"].startswith("%") or 0 < one["median"] <= 100, one
    assert run_script("bench/compare.py", tmp_path / "packing.json", tmp_path / "packing.json").count("WORSE") == 0
    run_script("bench/plots.py", tmp_path / "packing.json", "--out", tmp_path)
    assert (tmp_path / "packing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(260)
def test_transport_runs_and_leaves_nothing(tmp_path: Path) -> None:
    result = run_bench("transport", tmp_path / "transport.json", "--workers", 2, timeout_s=240)
    rate, size = named(result, "samples")[0], named(result, "bytes")[0]
    assert size["median"] > rate["median"] * 500 * 25 / 1e6, "a token takes at least 25 bytes"
    assert named(result, "limit: memcpy, one core")[0]["median"] > 0
    p50, p95 = named(result, "latency p50")[0], named(result, "latency p95")[0]
    assert 0 < p50["median"] <= p95["median"]


@pytest.mark.timeout(260)
def test_a_result_of_what_a_run_has_learned(tmp_path: Path) -> None:
    """Of a small recorded run: the win rates are those that it wrote, and the picture is small enough for the repository."""
    run, out = ROOT / "tests/finished_run", tmp_path / "learning.json"
    run_script("bench/learning.py", run, "--prepared", "made by hand", "--out", out)
    result = common.read_result(out)
    evaluations = [line["Eval/WinRate"] for line in map(json.loads, (run / "metrics.jsonl").open()) if "Eval/WinRate" in line]
    for when, expected in (("before", evaluations[0]), ("after", evaluations[-1])):
        assert [one["median"] for one in named(result, f"held-out win rate {when} RL")] == [expected]
    (curve,) = [one for one in result["series"] if one["labels"].get("games") == "held out"]
    assert [value for _, value in curve["points"]] == evaluations
    assert all(a <= b for (a, _), (b, _) in pairwise(curve["points"]))
    assert result["notes"][0] == "made by hand"
    assert "launch.sh" in result["notes"][1]
    run_script("bench/plots.py", out, "--curves", "--out", tmp_path)
    assert 0 < (tmp_path / "learning.png").stat().st_size < 200 << 10


def test_a_plot_of_many_points_is_as_coarse_as_it_must_be(tmp_path: Path) -> None:
    run_script(
        "bench/plots.py", ROOT / "bench" / "results" / "2026-11-30-learning-whole-graphs-smollm2-1-h200.json", "--curves", "--out", tmp_path
    )
    (file,) = tmp_path.glob("*.png")
    assert file.stat().st_size <= 200 << 10
    assert all(file.stat().st_size <= 200 << 10 for file in (ROOT / "bench" / "results").glob("*.png"))


def test_a_run_that_fails_costs_one_row_of_a_scaling_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have taken minutes: what they measured is kept, and the knee is among them. Rows alternate: a machine drifts."""
    order = []

    def measure(_: object, value: int) -> dict[str, Any]:
        order.append(value)
        if value == 1:
            raise RuntimeError("launch.sh ended with exit code 2:\n- --num-rollout-workers 1 is too few")
        return {"samples_per_s": min(value, 4) / (1 if len(order) <= 4 else 2), "tokens_per_s": 1.0, "shares": {}}

    monkeypatch.setattr(end_to_end, "measure", measure)
    result = common.Result("end_to_end", argparse.Namespace())
    end_to_end.scale(result, "workers", [1, 2, 4, 8], lambda value: (value,), argparse.Namespace(repeats=2))
    assert order == [1, 2, 4, 8, 8, 4, 2, 1]
    content = {"measures": result._measures}
    rows = {one["labels"]["workers"]: one["median"] for one in named(content, "trained samples")}
    assert rows == {2: 1.5, 4: 3.0, 8: 3.0}
    assert [note for note in result._notes[:2] if "--num-rollout-workers 1 is too few" not in note] == []
    assert "the knee is at 4" in result._notes[2]


def test_rows_of_a_scaling_table_that_is_ended_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_: object, value: int) -> dict[str, Any]:
        if value == 4:
            raise SystemExit(143)
        return {"samples_per_s": value, "tokens_per_s": 1.0, "shares": {}}

    monkeypatch.setattr(end_to_end, "measure", measure)
    result = common.Result("end_to_end", argparse.Namespace())
    with pytest.raises(SystemExit):
        end_to_end.scale(result, "workers", [1, 2, 4], lambda value: (value,), argparse.Namespace(repeats=2))
    assert [one["labels"]["workers"] for one in named({"measures": result._measures}, "trained samples")] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_transport_runs_beside_ray(tmp_path: Path) -> None:
    result = run_bench("transport", tmp_path / "transport.json", "--vs", "ray", timeout_s=380)
    assert {one["labels"]["side"] for one in named(result, "samples")} == {"accerl_mp", "ray, lists", "ray, arrays"}
    assert any("ray, lists" in ratio["name"] for ratio in result["ratios"])


@pytest.mark.timeout(240)
def test_trainer_runs(tmp_path: Path) -> None:
    result = run_bench("trainer", tmp_path / "trainer.json", timeout_s=230)
    assert {one["labels"]["setting"] for one in named(result, "MFU")} == {"base", "full_logits", "padded"}
    assert all(one["median"] > 0 for one in named(result, "memory, a step's peak beside the rest"))


@pytest.mark.parametrize(("num_runs", "num_pairs"), [(1, 0), (2, 1), (5, 2), (6, 3)])
def test_what_was_measured_before_the_end_to_end_script_was_ended_is_kept(
    num_runs: int, num_pairs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[dict[str, Any]] = []

    def measure(_: object, *flags: str, **__: object) -> dict[str, Any]:
        if len(runs) == num_runs:
            raise SystemExit(143)
        values = {"samples_per_s": 1.0 if flags else 2.0, "tokens_per_s": 1.0, "samples": 8, "last_wins": 0.5}
        runs.append(values | {"wins": [], "held_out": [], "shares": {}})
        return runs[-1]

    out = tmp_path / "result.json"
    monkeypatch.setattr(end_to_end, "measure", measure)
    monkeypatch.setattr(common.signal, "signal", lambda *_: None)  # this process keeps its own handlers
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--repeats", "4", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        end_to_end.main()
    assert stopped.value.code == 143
    result = json.loads(out.read_text())
    assert [len(one["samples"]) for one in result["ratios"]] == [num_pairs] * bool(num_pairs)
    assert all(one["median"] == 2.0 for one in result["ratios"])
    assert "ended before it was done" in result["notes"][0]


SIDE_BY_SIDE = [("startup", "rollout"), ("end_to_end", "weight_sync")]
SLOW = [("sync_modes", "engine_loop"), ("four_gpus", "engines")]
"""One looks into a question, the other is for four GPUs: a change that breaks them shows in those above, nearly always."""


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [*SIDE_BY_SIDE, *(pytest.param(names, marks=pytest.mark.slow) for names in SLOW)], ids="+".join)
def test_scripts_that_start_vllm_run(names: tuple[str, str], tmp_path: Path) -> None:
    """Two at a time: whether they run is the question, and while one waits for its vLLM the other has the core."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_bench, name, tmp_path / f"{name}.json", timeout_s=580) for name in names]
    for run in runs:
        run.result()


def test_pairs_alternate_and_warm_ups_do_not_count() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    values = common.alternate(sides, repeats=3, warmup=1)
    assert "".join(calls) == "baabbaab"
    assert values == {"a": [3, 6, 7], "b": [4, 5, 8]}
    assert all(first == second or {first, second} == {"a", "b"} for first, second in pairwise(calls))


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result.pop("hardware"),
        lambda result: result["measures"].clear(),
        lambda result: result["measures"][0]["samples"].clear(),
        lambda result: result["measures"][0].update(median=float("nan")),
    ],
)
def test_a_result_that_is_none_is_refused(damage: Any) -> None:
    measure = {"name": "x", "unit": "s", "better": "lower", "labels": {}, "samples": [1.0], "median": 1.0, "p95": 1.0}
    result = dict.fromkeys(common.RESULT_FIELDS, "") | {"measures": [measure]}
    common.check_result(result, "it")
    damage(result)
    with pytest.raises(common.ResultError):
        common.check_result(result, "it")


def test_compare_tells_better_from_worse_and_noise_from_both() -> None:
    def result(*samples: float) -> dict[str, Any]:
        one = {"name": "rate", "unit": "/s", "better": "higher", "labels": {"side": "a"}, "samples": list(samples)}
        return {"measures": [one | {"median": float(np.median(samples)), "p95": 0.0}]}

    verdicts = [compare.changes(result(10, 11, 12), result(*after))[0] for after in ((13, 14, 15), (7, 8, 9), (9, 10, 12.5))]
    assert [(one["better"], one["apart"]) for one in verdicts] == [(True, True), (False, True), (False, False)]
    assert verdicts[0]["ratio"] == pytest.approx(14 / 11)


@pytest.mark.parametrize("name", packing.PACKERS)
def test_every_packer_packs_each_sample_once_within_the_budget(name: str) -> None:
    shapes = draw_shapes(np.random.default_rng(1), "long")
    lengths = [next(shapes).num_tokens for _ in range(300)]
    packs = packing.PACKERS[name](lengths, 8192, 16)
    assert sorted(index for pack in packs for index in pack) == list(range(300))
    assert all(sum(lengths[index] for index in pack) <= 8192 and 0 < len(pack) <= 16 for pack in packs)


def test_the_reference_packs_its_documented_example() -> None:
    lengths = [100, 3000, 8000, 9, 7000, 50]
    packs = packing.reference(lengths, 16384, 2)
    assert [[lengths[index] for index in pack] for pack in packs] == [[8000, 7000], [3000, 100], [50, 9]]


def test_made_samples_have_the_recorded_shape() -> None:
    for shape in recorded_shapes("long")[:50]:
        sample = make_sample(np.random.default_rng(0), shape)
        assert Shape(len(sample), sample.num_trained, sample.num_turns) == shape


def test_a_push_is_told_from_a_prompt_by_the_steps_around_it() -> None:
    """Steps of 4 ms; 9 ms longer after a swap at 1.03, 20 ms longer before the first token of a new prompt at 1.5."""
    ends = [*np.arange(0.0, 1.03, 0.004), *np.arange(1.041, 1.5, 0.004), *np.arange(1.524, 3.0, 0.004)]
    gaps = np.diff(ends, prepend=-0.004)
    rows = np.array([[end, 8, gap, 0] for end, gap in zip(ends, gaps, strict=True)])
    prompt = int(np.searchsorted(ends, 1.524)) + 1
    rows[prompt, 3] = 1
    fields = dict.fromkeys(("begin_s", "gather_s", "pause_s", "resume_s", "load_s", "standstill_s"), 0.001)
    report = SimpleNamespace(seconds=0.03, swap_s=0.005, send_s=0.01, num_bytes=2 * 10**9, path="captured", **fields)
    result = common.Result("weight_sync", argparse.Namespace(out=None))
    labels = {"staging": "on", "swap": "auto", "pause": "auto"}
    push_report.report_variant(result, labels, rows, (1.4, 2.9), [(1.005, report)], reference_s=0.1)
    found = {one["name"]: one["samples"] for one in result._measures}
    assert found["gap between tokens, longest around a push"] == [pytest.approx(13, abs=1.1)]
    calm = [name for name in found if "in as much time without a push" in name]
    assert [round(max(found[name])) for name in calm] == [pytest.approx(28, abs=1.1), pytest.approx(4)]
    assert found["rate on the wire / before the push"] == [pytest.approx(1, abs=0.2)]
    assert found["on the wire"] == [pytest.approx(200)]


def test_token_times_are_noted_step_by_step_in_whole_rows(tmp_path: Path) -> None:
    """Also by a process that is killed in the middle of a row."""
    file = tmp_path / "tokens.f64"
    notes = token_times._Notes(file)
    steps = [[("a", 1, False), ("b", 1, False)], [], [("a", 2, True), ("b", 0, False)], [("a", 1, False), ("b", 1, True)]]
    for step in steps:
        for key, count, is_over in step:
            reason = "stop" if is_over else None
            notes.see(SimpleNamespace(request_id=key, new_token_ids=[0] * count, finish_reason=reason))
        notes.end_step()
    with file.open("ab") as added:
        added.write(bytes(13))
    rows = token_times.read_tokens(file)
    assert rows.shape == (3, 4)
    times, counts, gaps, firsts = rows.T
    assert list(counts) == [2, 2, 2]
    assert list(firsts) == [2, 0, 1], "the second request of one name begins anew"
    assert gaps == pytest.approx([0, times[1] - times[0], times[2] - times[0]])
