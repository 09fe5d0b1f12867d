"""The tools' command line: --help with a short usage line, groups and each flag's default in brackets; all that is wrong at once."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accerl_mp.cli import PatientParser, belong_to_no_flag

_KINDS = {int: "a whole number", float: "a number"}


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == [] or default == argparse.SUPPRESS:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} [{shown}]"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """`--model-path PATH`: the flag's whole name twice makes columns too narrow to read."""
        return action.dest.rsplit("_", 1)[-1].upper()


class ToolParser(PatientParser):
    """argparse stops at the first problem and guesses at no flag; this one names them all, as launch.sh does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._found: list[str] = []
        self._bad: set[str] = set()

    def read(self, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """(what could be read, what could not): a flag with a problem has its default."""
        self._found, self._bad = [], set()
        line = sys.argv[1:] if argv is None else list(argv)
        needed = [action for action in self._actions if action.required]
        for action in needed:
            action.required = False  # argparse would stop before it has come to unknown flags
        try:
            parsed, unknown = self.parse_known_args(line)
        finally:
            for action in needed:
                action.required = True
        for action in self._actions:
            if action.dest in self._bad:
                setattr(parsed, action.dest, action.default)
        known = [option for action in self._actions for option in action.option_strings]
        self._found += belong_to_no_flag(unknown, line, known, "--help")
        missing = [action for action in needed if getattr(parsed, action.dest, None) in (None, [])]
        self._found += [f"{_name(action)} is missing" for action in missing if action.dest not in self._bad]
        return parsed, self._found

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Exits with code 2 and every problem."""
        parsed, problems = self.read(args)
        if problems:
            self._refuse(problems)
        return parsed

    def error(self, message: str) -> NoReturn:
        self._refuse([*self._found, message])

    def lacks_value(self, action: argparse.Action, problem: str) -> None:
        self._bad.add(action.dest)
        self._found.append(problem)

    def _refuse(self, problems: list[str]) -> NoReturn:
        self.exit(2, "\n".join([f"{self.prog}: this cannot be done:", *(f"- {problem}" for problem in problems), ""]))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._bad.add(action.dest)
            said = f"expected {_KINDS[action.type]}" if action.type in _KINDS else error.message
            self._found.append(f"{_name(action)} {arg_string}: {said}")
            return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and action.dest not in self._bad and value not in action.choices:
            self._bad.add(action.dest)
            self._found.append(f"{_name(action)} {value}: expected one of {', '.join(map(str, action.choices))}")


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def tool_parser(name: str, usage: str, description: str | None) -> ToolParser:
    """For `python -m accerl_mp.tools.NAME`; `usage` is what stands behind that."""
    program = f"python -m accerl_mp.tools.{name}"
    return ToolParser(program, usage=f"{program} {usage}", description=description, formatter_class=HelpWithDefaults, allow_abbrev=False)
