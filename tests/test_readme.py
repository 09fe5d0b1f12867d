"""The README's generated tables are those of the code, its paths exist, and every flag is explained."""

import re
from pathlib import Path

from accerl_mp.cli import build_parser, markdown
from accerl_mp.stats import tags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(name: str) -> str:
    match = re.search(rf"<!-- {name}: begin .*?-->\n(.*?)<!-- {name}: end -->", README, re.S)
    assert match, f"README has no generated section {name!r}"
    return match.group(1).strip()


def test_the_flag_tables_are_those_of_the_code() -> None:
    assert section("flags") == markdown().strip()


def test_the_metric_table_is_that_of_the_code() -> None:
    assert section("tags") == tags.markdown().strip()


def test_every_option_of_help_is_in_the_readme() -> None:
    options = {option for action in build_parser()._actions for option in action.option_strings if option.startswith("--")}
    assert {option for option in options if f"`{option}`" not in README} == {"--help"}


def test_every_path_that_the_readme_names_exists() -> None:
    paths = set(re.findall(r"`((?:accerl_mp|tests|bench)/[\w/.-]*|launch\.sh|requirements[\w-]*\.txt)`", README))
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
