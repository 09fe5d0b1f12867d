"""Many episodes side by side with a Transformers model: one growing cache, a row an episode. For tools; training plays through vLLM."""

from dataclasses import dataclass, field

import torch
from torch import nn

from accerl_mp.rollout.actions import normalise, parse_action
from accerl_mp.rollout.env import Observation, TextWorldEnv, game_name
from accerl_mp.rollout.prompt import SYSTEM, invalid_message, turn_message
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat, Transcript


@dataclass
class PlayedEpisode:
    """One episode, finished or cut."""

    game: str
    transcript: Transcript
    won: bool = False
    num_turns: int = 0
    num_invalid: int = 0
    replies: list[str] = field(default_factory=list)
    rejected: str | None = None
    """The last reply as its notice quotes it, if it was no command."""


class RowCache:
    """Rows of token ids that only grow. A feed pads the rows that get less; what is padding is masked for ever, and costs memory only."""

    def __init__(self, model: nn.Module, num_rows: int) -> None:
        self._model, self._cache = model, None
        self._device = next(model.parameters()).device
        self._mask = torch.zeros(num_rows, 0, dtype=torch.long, device=self._device)

    @torch.inference_mode()
    def feed(self, rows: list[list[int]]) -> torch.Tensor:
        """Append to each row; returns the logits [rows, vocab] after each row's last new token (garbage where nothing was appended)."""
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        new_mask = (torch.arange(width, device=self._device) < lengths[:, None]).long()
        positions = self._mask.sum(1, keepdim=True) + torch.arange(width, device=self._device)
        self._mask = torch.cat([self._mask, new_mask], dim=1)
        body = self._model.base_model(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        )
        self._cache = body.past_key_values
        last = body.last_hidden_state[torch.arange(len(rows), device=self._device), (lengths - 1).clamp(min=0)]
        return self._model.get_output_embeddings()(last).float()


@dataclass(frozen=True, kw_only=True)
class PlaySettings:
    """How episodes are sampled and cut."""

    max_turns: int
    max_action_tokens: int = 16
    temperature: float = 1.0
    """0: greedy."""


def play_batch(
    model: nn.Module, tokenizer: Tokenizer, chat: ChatFormat, games: list[str], settings: PlaySettings, generator: torch.Generator
) -> list[PlayedEpisode]:
    """Play one episode of each entry of `games`, all at once."""
    cache = RowCache(model, len(games))
    envs = [TextWorldEnv(game) for game in games]
    episodes = [PlayedEpisode(game_name(game), Transcript(tokenizer, chat, SYSTEM)) for game in games]
    observations = [env.reset(seed) for seed, env in enumerate(envs, start=1)]
    pending = [episode.transcript.add_message(turn_message(seen)) for episode, seen in zip(episodes, observations, strict=True)]
    for turn in range(settings.max_turns):
        replies = _sample_replies(cache, tokenizer, pending, settings, generator)
        for row, (env, episode) in enumerate(zip(envs, episodes, strict=True)):
            if pending[row]:
                observations[row] = _take_turn(env, episode, observations[row], replies[row], tokenizer)
            is_over = not pending[row] or episode.won or observations[row].done or turn + 1 == settings.max_turns
            pending[row] = [] if is_over else _next_prompt(episode, observations[row])
        if not any(pending):
            break
    for env in envs:
        env.close()
    return episodes


def _sample_replies(
    cache: RowCache, tokenizer: Tokenizer, prompts: list[list[int]], settings: PlaySettings, generator: torch.Generator
) -> list[list[int]]:
    """Sample a reply in every row whose prompt isn't empty; it ends with an end-of-turn token, a newline or at its longest."""
    replies: list[list[int]] = [[] for _ in prompts]
    open_rows = [row for row, prompt in enumerate(prompts) if prompt]
    logits = cache.feed(prompts)
    while open_rows:
        tokens = _sample(logits, settings.temperature, generator)
        fed: list[list[int]] = [[] for _ in prompts]
        for row in open_rows:
            replies[row].append(tokens[row])
            fed[row] = [tokens[row]]
        open_rows = [row for row in open_rows if not _has_ended(tokenizer, replies[row], settings.max_action_tokens)]
        logits = cache.feed(fed)
    return replies


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    if temperature == 0:
        return logits.argmax(-1).tolist()
    return torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator).flatten().tolist()


def _has_ended(tokenizer: Tokenizer, reply: list[int], max_tokens: int) -> bool:
    return reply[-1] in tokenizer.eos_token_ids or len(reply) >= max_tokens or "\n" in tokenizer.text_of(reply[-1])


def _take_turn(env: TextWorldEnv, episode: PlayedEpisode, seen: Observation, reply: list[int], tokenizer: Tokenizer) -> Observation:
    """Add the reply and execute it if it names a command."""
    text = tokenizer.decode(reply)
    episode.transcript.add_reply(reply)
    episode.replies.append(text)
    episode.num_turns += 1
    action = parse_action(text, seen.commands)
    episode.rejected = None if action else normalise(text) or text
    if action is None:
        episode.num_invalid += 1
        return seen
    seen = env.step(action)
    episode.won = seen.won
    return seen


def _next_prompt(episode: PlayedEpisode, seen: Observation) -> list[int]:
    message = turn_message(seen) if episode.rejected is None else invalid_message(episode.rejected, seen)
    return episode.transcript.add_message(message)
