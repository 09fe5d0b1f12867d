"""Numbers that no flag can have: too small, too large, not finite."""

import dataclasses
import math
from collections.abc import Iterator

from accerl_mp.cli import option_of
from accerl_mp.config import GROUPS, Config, resolve

_FIELDS = {field.name: field for group in GROUPS.values() for field in dataclasses.fields(group)}
_SECONDS = ("_s", "_seconds", "_timeout")
_LONGEST_S = 1e8
"""Three years: threads and sockets fail at waits of some hundred."""
_LARGEST = 1e12
"""Of any number: far beyond it messages do not hold counts, nor float32 rewards."""


def out_of_bounds(field_name: str, value: float | None, option: str) -> Iterator[str]:
    """What is wrong with a number for the flag of this field, said of `option`. Tools have some of the flags under other names."""
    at_least, above, at_most, beyond = (_FIELDS[field_name].metadata[name] for name in ("at_least", "above", "at_most", "beyond"))
    if at_most is None:
        at_most = _LONGEST_S if field_name.endswith(_SECONDS) else _LARGEST
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{option} must be a finite number, got {value}"
    elif value is not None and at_least is not None and value < at_least:
        yield f"{option} must be at least {at_least}, got {value}"
    elif value is not None and above is not None and value <= above:
        yield f"{option} must be above {above}, got {value}"
    elif isinstance(value, int | float) and value > at_most:
        yield f"{option} must be at most {at_most:.10g}, got {value}" + (f": {beyond}" if beyond else "")
    elif isinstance(value, int | float) and value < -_LARGEST:
        yield f"{option} must be at least {-_LARGEST:g}, got {value}"


def bad_numbers(config: Config, typed: Config | None = None) -> dict[str, list[str]]:
    """Field -> sentences, of a resolved Config. Those that follow from a bad one of `typed` are left out."""
    bad = {name: found for name, value in config.to_flat().items() if (found := list(out_of_bounds(name, value, option_of(name))))}
    given = {name for name, value in (typed or config).to_flat().items() if value is not None}
    return {name: found for name, found in bad.items() if name in given} or bad


def without(bad: dict[str, list[str]], config: Config, typed: Config | None, *, num_gpus: int) -> Config:
    """With the defaults in place of bad numbers, and whatever follows from them resolved anew."""
    follows = [name for name, value in (typed or config).to_flat().items() if value is None]
    defaults = {name: _FIELDS[name].default for name in [*follows, *bad]}
    return resolve(config.replace(**defaults), num_gpus=num_gpus, log_dir=config.metrics.log_dir or "")
