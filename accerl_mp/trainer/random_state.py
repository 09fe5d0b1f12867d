"""Random numbers of one rank, as bytes for a saved state. The trainer draws from torch's generators, and Replay from one of its own."""

import torch


def random_state(device: torch.device) -> dict[str, bytes]:
    """Of torch on the CPU, and on the rank's GPU."""
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    return {"torch": torch.get_rng_state().numpy().tobytes(), "cuda": cuda}


def set_random_state(state: dict[str, bytes], device: torch.device) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8), device)
