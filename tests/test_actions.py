"""The parser: what counts as a command, and what never does."""

import pytest

from accerl_mp.rollout.actions import normalise, parse_action

ADMISSIBLE = ["go east", "Open Door", "take key from table", "look"]


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go east", "go east"),
        ("> Action: Open Door.", "Open Door"),
        ('"Go  East".', "go east"),
        ("assistant: command: go east", "go east"),
        ("- go east", "go east"),
        ("* go east", "go east"),
        ("3. go east", "go east"),
        ("3) go east", "go east"),
        ("(3) go east", "go east"),
        ("go east!", "go east"),
        ("go east!!!", "go east"),
        ("Answer:\n go east", "go east"),
        ("\ngo east", "go east"),
        ("\n\n  go east\nand then look", "go east"),
        ("`take key from table`", "take key from table"),
        ("answer: output: action: command: input: assistant: > - look", "look"),
        ("OPEN\tDOOR", "Open Door"),
        ("'look.'!", "look"),
    ],
)
def test_a_reply_names_a_command(reply: str, command: str) -> None:
    assert parse_action(reply, ADMISSIBLE) == command


@pytest.mark.parametrize(
    "reply",
    ["", "\n", "go", "go easter", "go east now", "I go east", "go east, look", "12go east", "go-east", "command:", "-", "look?", "door"],
)
def test_anything_else_names_none(reply: str) -> None:
    assert parse_action(reply, ADMISSIBLE) is None


def test_only_the_first_line_counts() -> None:
    assert parse_action("well\ngo east", ADMISSIBLE) is None


def test_of_two_commands_that_read_alike_the_last_wins() -> None:
    assert parse_action("go east", ["Go East", "GO EAST"]) == "GO EAST"


def test_a_command_that_looks_like_decoration_can_be_named() -> None:
    admissible = ["3. stairs", "say hi!", "say hi", "- wait", "action: jump"]
    for command in admissible:
        assert parse_action(command, admissible) == command
    assert parse_action("- 3. stairs.", admissible) == "3. stairs"


def test_no_command_is_named_where_none_is_admissible() -> None:
    assert parse_action("look", []) is None


def test_normalising_leaves_the_bare_words() -> None:
    assert normalise(" > - Action:  Jump  HIGH!. ") == "jump high"
    assert normalise("Command:") == ""
