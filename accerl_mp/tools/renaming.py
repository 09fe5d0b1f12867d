"""Give the things of a game other names, so that a model has to read and copy instead of knowing games by heart.

A name is changed word by word and everywhere alike: `steam room` may become `plover room` in the room's title, in the objective,
in the commands and in the replies. Other words come from other games' names and from a fixed list of made-up ones.
"""

import random
import re
from collections.abc import Callable, Iterable

RENAMED_SHARE = 0.7
NUM_MADE_UP = 3000

# Words that commands, prompts and the games' own sentences use: they keep their meaning.
_KEPT = frozenset(
    """a an the of in on into inside from with to up down is are it you your and or not take open close go put insert unlock lock eat drop
    examine look inventory north south east west carrying nothing floor ground room objective observation commands command""".split()
)
_WORD = re.compile(r"[A-Za-z]+")
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sn sp st t th tr v w z".split()
_VOWELS = "a e i o u ai ea ee oo ou".split()
_ENDS = "b ck d f g l ll m n nd ng nt p r rd rk s sh ss st t th x".split()


def made_up_words(num_words: int = NUM_MADE_UP, seed: int = 0) -> list[str]:
    """Words that sound like English and mostly are not: `plover`, `scand`, `threamill`."""
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < num_words:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        word = "".join(syllables) + rng.choice(_ENDS)
        if len(word) >= 3:
            words[word] = None
    return list(words)


def name_words(names: Iterable[str]) -> list[str]:
    """The words of these names that may be renamed, in order, lower case."""
    words = (word.lower() for name in names for word in _WORD.findall(name))
    return list(dict.fromkeys(word for word in words if word not in _KEPT and len(word) > 1))


def draw_renaming(names: Iterable[str], others: list[str], rng: random.Random) -> dict[str, str]:
    """New words for RENAMED_SHARE of the words of these names; no two words become one."""
    words = name_words(names)
    taken = set(words)
    renaming = {}
    for word in words:
        if rng.random() >= RENAMED_SHARE:
            continue
        other = rng.choice(others)
        if other not in taken:
            taken.add(other)
            renaming[word] = other
    return renaming


def renamer(renaming: dict[str, str]) -> Callable[[str], str]:
    """A function that renames within a text and keeps capitals."""
    if not renaming:
        return lambda text: text
    pattern = re.compile(r"(?<![A-Za-z])(" + "|".join(map(re.escape, sorted(renaming))) + r")(?![A-Za-z])", re.IGNORECASE)

    def rename(match: re.Match[str]) -> str:
        word = match.group()
        other = renaming[word.lower()]
        return other.capitalize() if word[0].isupper() else other

    return lambda text: pattern.sub(rename, text)
