"""TextWorld's own kinds of games, each in three sizes. `make_games` makes them; every setting can be changed (`--set level=7`)."""

from typing import Any

from textworld.challenges import coin_collector, cooking, simple, treasure_hunter
from textworld.generator import make_game
from textworld.generator.game import Game, GameOptions

Settings = dict[str, Any]

SIZES: dict[str, dict[str, Settings]] = {
    "cooking": {
        "small": {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": False, "drop": False},
        "medium": {"recipe": 2, "take": 2, "go": 6, "open": True, "cook": True, "cut": False, "drop": False},
        "large": {"recipe": 3, "take": 3, "go": 12, "open": True, "cook": True, "cut": True, "drop": True},
    },
    "coin-collector": {"small": {"level": 3}, "medium": {"level": 110}, "large": {"level": 225}},
    "treasure-hunter": {"small": {"level": 3}, "medium": {"level": 15}, "large": {"level": 25}},
    "simple": {
        "small": {"rewards": "dense", "goal": "detailed"},
        "medium": {"rewards": "balanced", "goal": "brief"},
        "large": {"rewards": "sparse", "goal": "none"},
    },
    "custom": {
        "small": {"rooms": 2, "objects": 4, "quest_length": 2},
        "medium": {"rooms": 5, "objects": 10, "quest_length": 5},
        "large": {"rooms": 10, "objects": 20, "quest_length": 8},
    },
}
"""Kind -> size -> settings. The size of simple is how much it helps: its house is always the same."""

_MAKERS = {"coin-collector": coin_collector.make, "treasure-hunter": treasure_hunter.make}


def settings_of(kind: str, size: str, changes: list[str]) -> Settings:
    """The size's settings with `name=value` changes; ValueError for a name that the kind has not, or a value of another type."""
    settings = dict(SIZES[kind][size])
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in settings:
            raise ValueError(f"--set {change}: {kind} has {', '.join(f'{key}={value}' for key, value in settings.items())}")
        settings[name] = _typed(change, text, settings[name])
    return settings


def build_game(kind: str, settings: Settings, split: str, options: GameOptions) -> Game:
    """Generate, not compile. Cooking draws its food from the split's own: train, valid, or test for any other name."""
    seed = options.seeds["quest"]
    match kind:
        case "cooking":
            kitchen = split if split in ("train", "valid") else "test"
            return cooking.make(settings | {"recipe_seed": seed, "split": kitchen}, options)
        case "simple":
            return simple.make(settings | {"test": split != "train"}, options)
        case "custom":
            options.nb_rooms, options.nb_objects = settings["rooms"], settings["objects"]
            options.quest_length = settings["quest_length"]
            return make_game(options)
    return _MAKERS[kind](settings, options)


def _typed(change: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--set {change}: true or false")
        return text.lower() == "true"
    if isinstance(default, int):
        if not text.isdecimal():
            raise ValueError(f"--set {change}: a whole number")
        return int(text)
    return text
