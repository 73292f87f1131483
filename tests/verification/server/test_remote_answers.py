"""What is read out of a server's answer, and that a hostile one gives nothing."""

import pytest

from trimtab.verification.server.answers import MAX_TOKENS, read_chat, read_completion, read_ollama
from trimtab.verification.server.tokens import TokenTable


def completion(**logprobs):
    given = {"tokens": [" a"], "token_logprobs": [-0.5], "top_logprobs": [{" a": -0.5, " b": -1.0}], **logprobs}
    return {"choices": [{"text": " a", "logprobs": given}], "usage": {"prompt_tokens": 3}}


def chat(*entries, text="a"):
    return {"choices": [{"message": {"content": text}, "logprobs": {"content": list(entries)}}]}


def entry(token=" a", logprob=-0.5, **more):
    return {"token": token, "logprob": logprob, "top_logprobs": [{"token": " b", "logprob": -1.0}], **more}


def test_a_completion_gives_text_tokens_and_the_count_of_its_prompt():
    said = read_completion(completion())
    assert (said.text, said.prompt_tokens) == (" a", 3)
    (position,) = said.positions
    assert (position.chosen.text, position.chosen.logprob) == (" a", -0.5)
    assert [(token.text, token.logprob) for token in position.top] == [(" a", -0.5), (" b", -1.0)]


def test_a_chat_gives_bytes_and_numbers_of_tokens_where_the_server_does():
    said = read_chat(chat(entry(bytes=[32, 97], id=7)))
    assert (said.positions[0].chosen.data, said.positions[0].chosen.id) == (b" a", 7)


def test_a_token_named_by_number_is_known_by_it():
    given = completion(tokens=["token_id:12"], top_logprobs=[{"token_id:12": -0.5}])
    assert read_completion(given).positions[0].chosen.id == 12


def test_llama_cpp_gives_completions_the_logprobs_of_chats():
    said = read_completion({"choices": [{"text": "a", "logprobs": {"content": [entry()]}}]})
    assert said.positions[0].top[0].text == " b"


def test_ollama_gives_its_logprobs_beside_the_response():
    said = read_ollama({"response": " a", "logprobs": [entry()], "prompt_eval_count": 5})
    assert (said.text, said.prompt_tokens, said.positions[0].chosen.text) == (" a", 5, " a")


@pytest.mark.parametrize("value", [None, [], {}, {"choices": []}, {"choices": [3]}, {"choices": [{"text": 3}]}, "x", 5])
def test_what_is_no_answer_is_none(value):
    assert read_completion(value) is None
    assert read_chat(value) is None
    assert read_ollama(value) is None


@pytest.mark.parametrize(
    "logprobs",
    [
        {"token_logprobs": ["-0.5"]}, {"token_logprobs": [True]}, {"token_logprobs": [10**400]}, {"token_logprobs": [0.5]},
        {"top_logprobs": [[1]]}, {"top_logprobs": "x"}, {"tokens": [3]}, {"tokens": ["x" * 2000]}, {"tokens": {}},
        {"top_logprobs": [{" a": None}]},
    ],
)  # fmt: skip
def test_logprobs_of_another_form_are_not_read(logprobs):
    assert read_completion(completion(**logprobs)).positions is None


def test_a_stand_in_for_impossible_is_not_measured():
    said = read_completion(completion(top_logprobs=[{" a": -0.5, " b": -9999.0}]))
    assert [token.text for token in said.positions[0].top] == [" a"]


def test_an_endless_answer_is_cut():
    said = read_chat(chat(*[entry()] * (MAX_TOKENS + 50)))
    assert len(said.positions) == MAX_TOKENS
    assert read_chat(chat(text="x" * 10**6)) is None


class Vocabulary:
    """A tokenizer by its pieces."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[number] for number in ids]


def ids_of(said, table):
    return [(chosen, dict(top)) for chosen, top in table.positions(said)]


def test_tokens_of_a_sentencepiece_vocabulary_are_found_by_text():
    table = TokenTable(Vocabulary("<s>", "\u2581a", "\u2581b", "a", "<0x41>"))
    assert ids_of(read_completion(completion()), table) == [(1, {1: -0.5, 2: -1.0})]


def test_the_piece_of_a_byte_is_not_taken_for_a_letter_that_has_a_piece_of_its_own():
    table = TokenTable(Vocabulary("\u2581a", "<0x2C>", "<0x0A>", ",", "<0xC3>"))
    entries = [entry(",", logprob=-0.1), entry("\n", logprob=-0.2), entry("\ufffd", logprob=-0.3, bytes=[0xC3])]
    assert [chosen for chosen, _ in table.positions(read_chat(chat(*entries)))] == [3, 2, 4]


def test_tokens_of_a_byte_level_vocabulary_are_found_by_text_and_by_bytes():
    table = TokenTable(Vocabulary("x", "Ġa", "Ġb", "Ã¤"))
    assert ids_of(read_completion(completion()), table) == [(1, {1: -0.5, 2: -1.0})]
    said = read_chat(chat(entry("ä", bytes=list("ä".encode()))))
    assert ids_of(said, table) == [(3, {3: -0.5, 2: -1.0})]


def test_a_text_of_two_tokens_names_neither_and_ends_the_answer():
    table = TokenTable(Vocabulary("a", "a", "b"))
    assert ids_of(read_chat(chat(entry("b"), entry("a"), entry("b"))), table) == [(2, {2: -0.5})]


def test_tokens_shown_without_their_spaces_are_found_where_only_one_fits():
    table = TokenTable(Vocabulary("\u2581the", "\u2581sea", "sea", "."))
    entries = [{"token": text, "logprob": -0.1, "top_logprobs": []} for text in ("the", "sea")]
    assert [chosen for chosen, _ in table.positions(read_chat(chat(*entries, text="the sea")))] == [0]


def test_a_number_outside_the_vocabulary_names_nothing():
    table = TokenTable(Vocabulary("a", "b"))
    assert table.positions(read_chat(chat(entry("a", id=99)))) == []
