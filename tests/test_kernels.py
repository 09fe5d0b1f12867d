"""What Triton's compiler makes of the kernels for an H200, without one. The interpreter (test_copies, test_rotation) takes more than it."""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from accerl_mp.models import gradient_kernel, rotation_kernel  # noqa: E402
from accerl_mp.models.gradient_sums import BLOCK  # noqa: E402

pytestmark = pytest.mark.timeout(120)
H200 = (90, 32)
"""Compute capability, threads of a warp."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _assembly(kernel: "triton.JITFunction", types: dict[str, str], constants: dict[str, object], num_warps: int) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*")}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", *H200), options={"num_warps": num_warps}).asm["ptx"]


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("dtype", gradient_kernel._DTYPES.values(), ids=str)
def test_gradients_are_loaded_and_stored_16_bytes_at_a_time(dtype, has_sum: bool) -> None:
    """Of whole blocks: where a block ends with its tensor, a mask lets each element be loaded by itself."""
    types = {"addresses": "*i64", "tensor_of": "*i32", "block_of": "*i32", "counts": "*i64"}
    constants = {"NUM_PARTS": 4, "DTYPE": dtype, "HAS_SUM": has_sum, "BLOCK": BLOCK}
    assembly = _assembly(gradient_kernel._add_up, types, constants, gradient_kernel._NUM_WARPS)
    loads, stores = (re.findall(rf"{kind}\.global\.(\S+)", assembly) for kind in ("ld", "st"))
    of_a_block = BLOCK // (gradient_kernel._NUM_WARPS * 32)  # elements of a thread
    assert loads.count("v4.b32") == of_a_block * 2 // 16 * 4 + has_sum * of_a_block * 4 // 16
    assert stores.count("v4.b32") == of_a_block * 4 // 16


@pytest.mark.parametrize(("size", "dtype"), [(32, "bf16"), (128, "bf16"), (128, "fp16"), (256, "bf16")])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_heads_are_loaded_and_stored_at_least_8_bytes_at_a_time(way: str, size: int, dtype: str) -> None:
    kernel, num_warps = {
        "forward": (rotation_kernel._forward, rotation_kernel.FORWARD_WARPS),
        "backward": (rotation_kernel._backward, rotation_kernel.BACKWARD_WARPS),
    }[way]
    constants = {"HEADS": 16, "KEY_HEADS": 8, "HALF": size // 2, "TOKENS": rotation_kernel.TOKENS}
    types = {name: f"*{dtype}" for name in kernel.arg_names if name not in constants}
    types |= {"num_tokens": "i32", "eps": "fp32"} | ({"parts": "*fp32"} if way == "backward" else {})
    assembly = _assembly(kernel, types, constants, num_warps)
    loads, stores = (re.findall(rf"{kind}\.global\.(\S+)", assembly) for kind in ("ld", "st"))
    wide = [kind for kind in loads + stores if kind in ("v2.b32", "v4.b32")]
    assert loads
    assert stores
    assert size < 128 or len(wide) >= 12, "of heads and angles; weights lie in registers"
