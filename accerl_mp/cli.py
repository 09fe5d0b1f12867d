"""Command line <-> Config: one argparse group per dataclass, one option per field.

A word `@file` stands for the flags in that file (`#` begins a comment, `$NAME` is an environment variable);
flags behind it override it.
"""

import argparse
import dataclasses
import difflib
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from accerl_mp.config import GROUPS, Config, ConfigError
from accerl_mp.files import read_text

_KINDS = {int: "a whole number", float: "a number", str: "a text"}
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
PROGRAM = "bash launch.sh"
DESCRIPTION = "Train a language-model agent online in TextWorld games. Without flags: the demo."


class PatientParser(argparse.ArgumentParser):
    """Where argparse would stop, at a flag whose value is left out, this one says so to `lacks_value` and goes on."""

    def lacks_value(self, action: argparse.Action, problem: str) -> None:
        """The action's value is None then."""
        raise NotImplementedError

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self.lacks_value(action, f"{action.option_strings[-1]}: {error.message}")
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        return super()._get_values(action, arg_strings) if arg_strings or action.nargs is not None else None


class _Parser(PatientParser):
    """Bad values are problems like all others."""

    def __init__(self, problems: list[str], **options: Any) -> None:
        super().__init__(**options)
        self._problems = problems

    def lacks_value(self, action: argparse.Action, problem: str) -> None:
        self._problems.append(problem)

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def build_parser(problems: list[str] | None = None) -> argparse.ArgumentParser:
    """All flags, grouped as the dataclasses are. Defaults stay in the dataclasses: the parser knows only what was typed.

    Values that are none go to `problems`: argparse would stop at the first.
    """
    found = [] if problems is None else problems
    parser = _Parser(
        found,
        prog=PROGRAM,
        usage=f"{PROGRAM} [FLAGS ...] [@FILE ...]",
        description=DESCRIPTION,
        epilog="@FILE reads flags from a file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for group in GROUPS.values():
        section = parser.add_argument_group(group.__doc__ or group.__name__)
        hints = get_type_hints(group)
        for field in dataclasses.fields(group):
            section.add_argument(option_of(field.name), **_option_settings(hints[field.name], field, found))
    return parser


def option_of(field_name: str) -> str:
    """`tw_game_dir` -> `--tw-game-dir`."""
    return "--" + field_name.replace("_", "-")


def parse(argv: list[str], *, environ: Mapping[str, str], base: Config | None = None) -> Config:
    """Flags as typed, over `base` (else the defaults) -> Config, not resolved. ConfigError: unknown flags, bad values, unreadable files."""
    config, problems = read(argv, environ=environ, base=base)
    if problems:
        raise ConfigError(problems)
    return config


def read(argv: list[str], *, environ: Mapping[str, str], base: Config | None = None) -> tuple[Config, list[str]]:
    """What `parse` gives where nothing is wrong; else without the flags that are, and what is wrong.

    ConfigError: what is wrong where flags are missing, because files cannot be read or variables are not set: more cannot be said.
    """
    problems: list[str] = []
    words, of_files = _expanded(argv, environ)
    values, unknown = build_parser(problems).parse_known_args(words)
    bad = {problem.split()[0].removesuffix(":") for problem in problems}
    known = [option_of(field.name) for group in GROUPS.values() for field in dataclasses.fields(group)]
    problems += belong_to_no_flag(unknown, words, known, f"{PROGRAM} --help")
    if of_files:
        raise ConfigError(of_files + [problem for problem in problems if "$" not in problem])  # it says what the variable lacks
    return (base or Config()).replace(**{name: value for name, value in vars(values).items() if option_of(name) not in bad}), problems


def without_those_of(problems: list[str], found: list[str]) -> list[str]:
    """`found` but what is said of a flag that `problems` names: it depends on what that flag will be."""
    named = {flag for problem in problems for flag in _FLAG.findall(problem)}
    return [problem for problem in found if not named & set(_FLAG.findall(problem))]


def belong_to_no_flag(left_over: list[str], line: Sequence[str], known: Sequence[str], listed_by: str) -> list[str]:
    """A sentence for each of the words that argparse has left over of a line.

    What stands behind an unknown flag on the line is its value, a number is no flag, and nobody means a flag that comes behind:
    it would be overridden. Example: of `--sead -1 x` they are `--sead: no such flag; did you mean --seed?` and `'x' belongs to no flag`.
    """
    found, place, place_of_value = [], -1, -1
    for word in left_over:
        place = line.index(word, place + 1)
        if _is_flag(word):
            flag, equals, _ = word.partition("=")
            near = difflib.get_close_matches(flag, known, n=1)
            is_near = near and near[0] not in (behind.partition("=")[0] for behind in line[place + 1 :])
            found.append(f"{flag}: no such flag; " + (f"did you mean {near[0]}?" if is_near else f"{listed_by} lists them"))
            place_of_value = -1 if equals else place + 1
        elif place != place_of_value:
            found.append(f"{word!r} belongs to no flag")
    return found


def _is_flag(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and bool(word.strip("-"))
    return False


def expand(argv: list[str], *, environ: Mapping[str, str]) -> list[str]:
    """Replace every `@file` by the words in it. All missing files and unset variables are reported at once."""
    words, problems = _expanded(argv, environ)
    if problems:
        raise ConfigError(problems)
    return words


def _expanded(argv: list[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The words, and what is wrong with the files."""
    problems: list[str] = []
    words: list[str] = []
    for word in argv:
        if word.startswith("@"):
            words += _read_flags(Path(word[1:]), environ, problems)
        else:
            words.append(word)
    return words, problems


def to_argv(config: Config) -> list[str]:
    """The shortest flags that give this Config: what differs from the defaults."""
    defaults = Config().to_flat()
    argv: list[str] = []
    for name, value in config.to_flat().items():
        if value == defaults[name]:
            continue
        argv.append(option_of(name))
        if value is not True:
            argv.append(str(value))
    return argv


def _read_flags(path: Path, environ: Mapping[str, str], problems: list[str]) -> list[str]:
    try:
        text = read_text(path)
        if "\0" in text:
            raise ValueError("it holds zero bytes")
        words = shlex.split(text, comments=True)
    except (OSError, ValueError) as error:  # ValueError: no text, or a quote without its end
        near = _like_it(path) if isinstance(error, FileNotFoundError) else ""
        problems.append(f"@{path}: cannot be read ({getattr(error, 'strerror', None) or error}): its flags are missing{near}")
        return []
    return [_expand_variables(word, path, environ, problems) for word in words]


def _like_it(path: Path) -> str:
    """A file beside where `path` would be whose name is like its own."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean @{path.with_name(near[0])}?" if near else ""


def _expand_variables(word: str, path: Path, environ: Mapping[str, str], problems: list[str]) -> str:
    """`$NAME` (a whole word) -> its value; paths hold other dollars rarely, and a typo must not pass as text."""
    if not word.startswith("$"):
        return word
    name = word[1:].strip("{}")
    if name not in environ:
        problems.append(f"@{path}: ${name} is not set: export {name}=... first, or give the flag behind the file")
        return word
    return environ[name]


def _option_settings(hint: Any, field: dataclasses.Field, problems: list[str]) -> dict[str, Any]:
    kind, choices = _unwrap(hint)
    help_text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        return {"action": "store_true", "help": help_text}
    shown = "" if field.default in (None, "") else f" [{str(field.default).replace('%', '%%')}]"
    metavar = "{" + ",".join(choices) + "}" if choices else field.name.rsplit("_", 1)[-1].upper()
    read = _reader(option_of(field.name), kind, choices, problems)
    return {"type": read, "choices": choices, "help": help_text + shown, "metavar": metavar}


def _reader(option: str, kind: type, choices: list[str] | None, problems: list[str]) -> Callable[[str], Any]:
    """Text to value; a text that is none becomes a problem and None."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            problems.append(f"{option} {text}: expected {_KINDS[kind]}")
            return None
        if choices and value not in choices:
            problems.append(f"{option} {text}: expected one of {', '.join(choices)}")
            return choices[0]  # argparse goes on to the next flag
        return value

    return read


def _unwrap(hint: Any) -> tuple[type, list[str] | None]:
    """Optional[X] -> X; Literal[...] -> (str, choices)."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        return str, list(get_args(hint))
    return hint, None


def markdown() -> str:
    """The tables of accerl_mp/docs/flags.md, one a group."""
    tables = []
    for group in GROUPS.values():
        rows = [f"| `{option_of(f.name)}` | {_shown_default(f)} | {_escaped(f.metadata['help'])} |" for f in dataclasses.fields(group)]
        tables.append("\n".join([f"**{group.__doc__}**", "", "| flag | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(tables)


def _shown_default(field: dataclasses.Field) -> str:
    if field.default is None or field.default == "":
        return "-"
    return "off" if field.default is False else f"`{field.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
