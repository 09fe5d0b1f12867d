"""Tests that need GPUs: `bash tests/gpu/visit.sh` on a machine that has some. Skipped elsewhere."""

import os

import pytest

# Kernels are compiled in this process: a pool of compilers would outlive the test that started it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
