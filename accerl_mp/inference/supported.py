"""The vLLM versions that inference/engine.py and weight_sync/receiver.py were written for."""

OLDEST, NEWEST = (0, 24), (0, 32)


def warning_of(version: str) -> str:
    """What to say about this vLLM; empty for one that is known to work."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if OLDEST <= numbers <= NEWEST:
        return ""
    return f"vLLM {version} is not among those this was written for (0.24 to 0.32): weight pushes may fail"
