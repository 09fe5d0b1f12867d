"""Transcripts: append-only ids that equal the template's own rendering, whatever the template."""

from pathlib import Path

import pytest
from chat_fixture import (
    CHATML,
    LLAMA3,
    MISTRAL,
    PLAIN,
    QWEN,
    RENUMBERING,
    THINKING,
    build_fast,
    build_meta,
    build_tokenizer,
    save_tokenizer,
)

from accerl_mp.rollout.history import FullHistory, WindowHistory
from accerl_mp.rollout.prompt import SYSTEM as SYSTEM_OF_GAMES
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat, TemplateError, Transcript

SYSTEM = "You play a text game."
USERS = ["Objective: open the door.\nCommands:\n- go east\n- look\nYour command:", "You see <b>a door</b>.", "third", "4, {{ no }}"]
APPEND_ONLY = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "plain": PLAIN}
ALL = APPEND_ONLY | {"qwen": QWEN}


def play(tokenizer: Tokenizer, reply: str, num_turns: int = 4) -> Transcript:
    """A conversation in which every reply is this text, ended as the template ends it."""
    transcript = Transcript(tokenizer, ChatFormat.probe(tokenizer), SYSTEM)
    for user in USERS[:num_turns]:
        transcript.add_message(user)
        transcript.add_reply_text(reply)
    return transcript


def conversation(chat: ChatFormat, reply: str, num_turns: int) -> list[dict[str, str]]:
    users = list(USERS[:num_turns])
    messages = [{"role": "system", "content": SYSTEM}]
    if not chat.has_system:
        messages, users[0] = [], f"{SYSTEM}\n\n{users[0]}"
    for user in users:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_a_transcript_equals_the_templates_own_rendering(name: str) -> None:
    tokenizer = build_tokenizer(APPEND_ONLY[name])
    chat = ChatFormat.probe(tokenizer)
    messages = conversation(chat, "go east", 4)
    expected = tokenizer.render(messages[:-1], add_generation_prompt=True)
    transcript = play(tokenizer, "go east", 4)
    prompt = transcript.ids[: transcript.replies[-1][0]]
    assert prompt == tokenizer.encode(expected)


@pytest.mark.parametrize("name", ALL)
def test_each_prompt_begins_with_the_previous_prompt_and_reply(name: str) -> None:
    tokenizer = build_tokenizer(ALL[name])
    transcript = Transcript(tokenizer, ChatFormat.probe(tokenizer), SYSTEM)
    before: list[int] = []
    for user in USERS:
        new = transcript.add_message(user)
        assert transcript.ids == before + new
        reply = tokenizer.encode("open door")
        transcript.add_reply(reply)
        start, stop = transcript.replies[-1]
        assert transcript.ids[start:stop] == reply
        before = list(transcript.ids)


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode_all(ids)


def test_a_reply_that_ended_its_turn_gets_no_second_end() -> None:
    tokenizer = build_tokenizer(CHATML)
    end, newline = tokenizer.encode("<|im_end|>"), tokenizer.encode("\n")
    shown = {}
    for kind, tail in {"eos": end, "newline": newline, "length": []}.items():
        transcript = Transcript(tokenizer, ChatFormat.probe(tokenizer), SYSTEM)
        transcript.add_message("first")
        transcript.add_reply(tokenizer.encode("go east") + tail)
        transcript.add_message("second")
        shown[kind] = text(tokenizer, transcript.ids).partition("go east")[2]
    between = "<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    assert shown == {"eos": between, "newline": "\n" + between, "length": between}


def test_another_end_token_than_the_templates_counts_as_the_end_too() -> None:
    tokenizer = build_tokenizer(CHATML)  # its meta names </s> as well
    transcript = Transcript(tokenizer, ChatFormat.probe(tokenizer), SYSTEM)
    transcript.add_message("first")
    transcript.add_reply(tokenizer.encode("look</s>"))
    transcript.add_message("second")
    assert "look</s>\n<|im_start|>user" in text(tokenizer, transcript.ids)


def test_an_end_token_that_the_models_settings_do_not_name_is_not_doubled_either() -> None:
    fast = build_fast()
    tokenizer = Tokenizer(fast, CHATML, build_meta(fast) | {"eos_token": "</s>", "eos_token_ids": [fast.token_to_id("</s>")]})
    chat = ChatFormat.probe(tokenizer)
    for tail in ("<|im_end|>", "<|im_end|>\n"):  # sampling goes on behind it, up to the newline
        transcript = Transcript(tokenizer, chat, SYSTEM)
        transcript.add_message("first")
        transcript.add_reply(tokenizer.encode("look" + tail))
        transcript.add_message("second")
        assert text(tokenizer, transcript.ids).partition("look")[2].startswith("<|im_end|>\n<|im_start|>user\nsecond")


def test_a_template_without_end_token_gets_one_newline() -> None:
    tokenizer = build_tokenizer(PLAIN)
    chat = ChatFormat.probe(tokenizer)
    assert chat.end_of_reply == ""
    for tail in ("\n", ""):
        transcript = Transcript(tokenizer, chat, SYSTEM)
        transcript.add_message("first")
        transcript.add_reply(tokenizer.encode(" go east" + tail))
        transcript.add_message("second")
        assert text(tokenizer, transcript.ids).endswith("Assistant: go east\nUser: second\nAssistant:")


def test_an_empty_thinking_block_is_kept_and_said() -> None:
    tokenizer = build_tokenizer(QWEN)
    chat = ChatFormat.probe(tokenizer)
    assert chat.drops_empty_thinking
    shown = text(tokenizer, play(tokenizer, "go east", 3).ids)
    assert shown.count("<|im_start|>assistant\n<think>\n\n</think>\n\ngo east<|im_end|>\n") == 2
    assert shown.endswith("<think>\n\n</think>\n\ngo east<|im_end|>")


def test_a_template_that_opens_a_thinking_block_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"opens a thinking block.*<think>"):
        ChatFormat.probe(build_tokenizer(THINKING))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (RENUMBERING, "not append-only"),
        (CHATML.replace("for m in messages", "for m in messages[-2:]"), "leaves out|not append-only"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), "leaves out|changes"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | replace('\\n', ' ') }}"), "changes the text"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else '...' }}"), "leaves out the replies"),
        (CHATML + "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}", "cannot render.*too long"),
    ],
)
def test_a_template_that_is_not_append_only_is_refused(template: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        ChatFormat.probe(build_tokenizer(template))


def test_a_template_without_system_role_gets_it_before_the_first_message() -> None:
    tokenizer = build_tokenizer(MISTRAL)
    chat = ChatFormat.probe(tokenizer)
    assert not chat.has_system
    assert text(tokenizer, play(tokenizer, "look", 2).ids).startswith(f"<s>[INST] {SYSTEM}\n\n{USERS[0]} [/INST] look</s>[INST] ")


def test_a_line_break_that_the_generation_prompt_lacks_is_added_to_it() -> None:
    bare = CHATML.replace("assistant\n{% endif %}", "assistant{% endif %}")
    assert bare != CHATML
    tokenizer = build_tokenizer(bare)
    assert play(tokenizer, "look", 3).ids == play(build_tokenizer(CHATML), "look", 3).ids


def test_control_tokens_in_a_message_never_end_a_turn() -> None:
    tokenizer = build_tokenizer(CHATML)
    transcript = Transcript(tokenizer, ChatFormat.probe(tokenizer), SYSTEM)
    transcript.add_message("a <|im_end|> b <|im_<|im_end|>start|> c")
    ids = transcript.ids
    assert ids.count(tokenizer.encode("<|im_end|>")[0]) == 2  # system and user
    assert "a   b <|im_ start|> c" in text(tokenizer, ids)


def test_the_files_of_the_run_folder_make_the_same_tokenizer(tmp_path: Path) -> None:
    loaded = save_tokenizer(tmp_path, LLAMA3)
    transcript = play(loaded, "go east", 3)
    assert transcript.ids == play(build_tokenizer(LLAMA3), "go east", 3).ids
    assert loaded.decode(transcript.ids).count("go east") == 4  # once listed, thrice replied


def test_a_bos_is_added_once_where_the_launcher_asks_for_it() -> None:
    fast = build_fast()
    for template in (CHATML, LLAMA3):
        tokenizer = Tokenizer(fast, template, build_meta(fast, template) | {"add_bos": True})
        ids = play(tokenizer, "look", 2).ids
        assert ids[0] == fast.token_to_id("<s>")
        assert ids.count(ids[0]) == 1


def test_transformers_renders_and_tokenises_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for template in (CHATML, LLAMA3, QWEN):
        fast = build_fast()
        meta = build_meta(fast, template)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=fast, chat_template=template, bos_token="<s>", eos_token=meta["eos_token"], pad_token="<pad>"
        )
        ours = Tokenizer(fast, template, meta)
        messages = conversation(ChatFormat.probe(ours), "go east", 3)[:-1]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=False)
        assert ours.render(messages, add_generation_prompt=True) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, return_dict=True)["input_ids"]
        assert ours.encode_start(expected) == ids


def test_a_history_ends_where_a_reply_might_not_fit() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = ChatFormat.probe(tokenizer)
    first = FullHistory(tokenizer, chat, room=10_000).next_prompt(USERS[0])
    assert first is not None
    assert FullHistory(tokenizer, chat, room=len(first.ids)).next_prompt(USERS[0]) == first
    assert FullHistory(tokenizer, chat, room=len(first.ids) - 1).next_prompt(USERS[0]) is None


def test_a_window_holds_the_last_turns_and_the_system_message() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = ChatFormat.probe(tokenizer)
    history = WindowHistory(tokenizer, chat, room=10_000, num_turns=2)
    shown = []
    for user, reply in zip(USERS, ("one", "two", "three", "four"), strict=True):
        prompt = history.next_prompt(user)
        assert prompt is not None
        assert prompt.ids == prompt.new_ids
        shown.append(text(tokenizer, prompt.ids))
        history.add_reply(tokenizer.encode(reply + "<|im_end|>"))
    messages = [{"role": "system", "content": SYSTEM_OF_GAMES}, {"role": "user", "content": USERS[2]}]
    messages += [{"role": "assistant", "content": "three"}, {"role": "user", "content": USERS[3]}]
    assert shown[3] == tokenizer.render(messages, add_generation_prompt=True)


def test_a_window_drops_turns_until_the_rest_fits() -> None:
    tokenizer = build_tokenizer(CHATML)
    chat = ChatFormat.probe(tokenizer)
    alone = FullHistory(tokenizer, chat, room=10_000).next_prompt("short")
    assert alone is not None
    history = WindowHistory(tokenizer, chat, room=len(alone.ids) + 3, num_turns=4)
    for _ in range(3):
        prompt = history.next_prompt("short")
        assert prompt is not None
        assert prompt.ids == alone.ids
        history.add_reply(tokenizer.encode("look<|im_end|>"))
    assert history.next_prompt("much longer than what fits " * 10) is None
