"""Reward of one env step. NumPy-free and torch-free."""


def step_reward(
    score_before: float,
    score_after: float,
    *,
    won: bool,
    lost: bool,
    step_penalty: float = 0.0,
    win_bonus: float = 1.0,
    lost_penalty: float = 0.0,
) -> float:
    """What the game's score gained by the step, less `step_penalty`, plus or minus the end's own part.

    Only for a command that the game executed: a reply that is no admissible command has its own penalty.
    """
    reward = float(score_after) - float(score_before) - step_penalty
    if won:
        reward += win_bonus
    if lost:
        reward -= lost_penalty
    return reward
