"""The vLLM versions that inference/engine.py and weight_sync/receiver.py were written for."""

OLDEST, NEWEST = (0, 24), (0, 32)
OLDER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""0: the older of vLLM 0.24's model runners on GPUs. It takes a new request in half the time, and its steps may be whole CUDA graphs."""


def warning_of(version: str) -> str:
    """What to say about this vLLM; empty for one that is known to work."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if OLDEST <= numbers <= NEWEST:
        return ""
    return f"vLLM {version} is not among those this was written for (0.24 to 0.32): weight pushes may fail"


def has_measured_runner(version: str, num_workers: int) -> bool:
    """Whether the older runner's whole graphs were measured with this vLLM and so many workers an engine: speed, and every logprob."""
    return version.startswith("0.24.") and num_workers == 1
