"""The tables of the README and of accerl_mp/docs/ are those of the code, links and paths lead somewhere, every flag is explained."""

import re

from accerl_mp.cli import build_parser, markdown
from accerl_mp.stats import tags
from tests.pages import ALL, PAGES, README, ROOT


def section(name: str) -> str:
    [found] = re.findall(rf"<!-- {name}: begin .*?-->\n(.*?)<!-- {name}: end -->", ALL, re.S)
    return found.strip()


def test_the_flag_tables_are_those_of_the_code() -> None:
    assert section("flags") == markdown().strip()


def test_the_metric_table_is_that_of_the_code() -> None:
    assert section("tags") == tags.markdown().strip()


def test_every_option_of_help_is_explained() -> None:
    options = {option for action in build_parser()._actions for option in action.option_strings if option.startswith("--")}
    assert {option for option in options if f"`{option}`" not in ALL} == {"--help"}


def anchors_of(text: str) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    broken, num_links = [], 0
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]*)\)", text):
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            num_links += 1
            if not target.is_file() or (heading and heading not in anchors_of(target.read_text())):
                broken.append(f"{page.name}: {link}")
    assert num_links > 30
    assert broken == []


def test_the_table_at_the_top_names_every_section_and_every_page() -> None:
    top = README[: README.index("## ")]
    named = set(re.findall(r"\]\(([^)]*)\)", top))
    sections = {f"#{anchor(name)}" for name in re.findall(r"^## (.*)$", README, re.M)}
    assert named == sections | {f"accerl_mp/docs/{page.name}" for page in PAGES if page.parent.name == "docs"}


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len(README.splitlines()) < 480


def test_every_result_that_is_named_is_there() -> None:
    """`...-name.json` stands for a date before the name."""
    named = re.findall(r"[`/](\d{4}-\d\d-\d\d-[\w.-]+\.json|\.\.\.-[\w.-]+\.json)`", ALL)
    results = [path.name for path in (ROOT / "bench/results").glob("*.json")]
    assert len(named) > 30
    assert [name for name in named if not any(result.endswith(name.removeprefix("...-")) for result in results)] == []


def test_the_pasted_debugger_shows_lines_that_are_there() -> None:
    pasted = re.findall(r"> ([\w/.]+\.py)\((\d+)\)(\w+)\(\)\n\s*-> (.*)", README)
    assert len(pasted) == 2
    for file, number, function, text in pasted:
        lines = (ROOT / file).read_text().splitlines()
        assert lines[int(number) - 1].strip() == text
        assert any(f"def {function}(" in line for line in lines[: int(number)])


def test_every_path_that_is_named_exists() -> None:
    paths = set(re.findall(r"`((?:accerl_mp|tests|bench)/[\w/.-]*|launch\.sh|requirements[\w-]*\.txt)`", ALL))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
