"""Learning rate of each optimizer step."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, max_steps: int, min_lr_ratio: float = 0.0) -> float:
    """Linear warm-up, then a cosine from `peak` to `min_lr_ratio * peak` at `max_steps`. Step 0 is the first.

    The first step has peak / warmup_steps, not 0 (it would do nothing). Where the warm-up takes the whole run, the peak stays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if warmup_steps >= max_steps:
        return peak
    progress = min(1.0, (step - warmup_steps) / (max_steps - warmup_steps))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
