"""Norm and rotation of queries and keys in one operator, by its real kernels."""

import pytest
import torch
from rotation_cases import check_kernels, made, values_and_gradients

from accerl_mp.models.rotation import norm_and_rotate

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (37, 2, 2, 64), (4099, 16, 8, 128), (2050, 3, 1, 256)], ids=str)
def test_kernels_give_what_the_formula_gives(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_kernels(shape, dtype, device="cuda")


def test_the_same_again_is_the_same_bit_by_bit() -> None:
    """The weights' gradients too: no addition in any order."""
    leaves, angles = made((20_000, 16, 8, 128), torch.bfloat16, device="cuda")
    grads = [torch.randn_like(leaf) for leaf in leaves[:2]]
    first, second = (values_and_gradients(norm_and_rotate, leaves, angles, grads) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
