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


def test_every_link_of_the_readme_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]*)\)", README))
    assert len(links) > 10
    assert links - anchors == set()
    # The table at the top names every section.
    top = README[: README.index("## ")]
    assert {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in re.findall(r"^## (.*)$", README, re.M)} == set(
        re.findall(r"\]\(#([^)]*)\)", top)
    )


def test_every_result_that_the_readme_names_is_there() -> None:
    """`...-name.json` stands for a date before the name."""
    named = re.findall(r"[`/](\d{4}-\d\d-\d\d-[\w.-]+\.json|\.\.\.-[\w.-]+\.json)`", README)
    results = [path.name for path in (ROOT / "bench/results").glob("*.json")]
    assert len(named) > 6
    assert [name for name in named if not any(result.endswith(name.removeprefix("...-")) for result in results)] == []


def test_the_pasted_debugger_shows_lines_that_are_there() -> None:
    pasted = re.findall(r"> ([\w/.]+\.py)\((\d+)\)(\w+)\(\)\n\s*-> (.*)", README)
    assert len(pasted) == 2
    for file, number, function, text in pasted:
        lines = (ROOT / file).read_text().splitlines()
        assert lines[int(number) - 1].strip() == text
        assert any(f"def {function}(" in line for line in lines[: int(number)])


def test_every_path_that_the_readme_names_exists() -> None:
    paths = set(re.findall(r"`((?:accerl_mp|tests|bench)/[\w/.-]*|launch\.sh|requirements[\w-]*\.txt)`", README))
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
