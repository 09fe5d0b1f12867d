"""How the tools' --help looks: a short usage line, groups, and each flag's default in brackets."""

import argparse


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


def tool_parser(name: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """For `python -m accerl_mp.tools.NAME`; `usage` is what stands behind that."""
    program = f"python -m accerl_mp.tools.{name}"
    return argparse.ArgumentParser(
        program, usage=f"{program} {usage}", description=description, formatter_class=HelpWithDefaults, allow_abbrev=False
    )
