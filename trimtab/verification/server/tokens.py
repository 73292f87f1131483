"""Which token ids does a server's answer have?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trimtab.verification.server.answers import Said, SaidToken

_UNDERLINE = "\u2581"  # SentencePiece's space


class TokenTable:
    """The vocabulary of one tokenizer, by text and by bytes. A text that several tokens have (a replacement character, an empty
    text) identifies none of them."""

    def __init__(self, tokenizer: Any) -> None:
        size = len(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
        bytes_of = _byte_letters()
        is_byte_level = not any(piece is not None and piece.startswith(_UNDERLINE) for piece in pieces)
        self.size = size
        self._by_bytes: dict[bytes, int | None] = {}
        self._by_text: dict[str, int | None] = {}
        self._by_stripped: dict[str, int | None] = {}
        # A byte token is used only if no other token has that text: "<0x2C>" is no comma if "," is a token.
        numbered = [(number, piece) for number, piece in enumerate(pieces) if piece is not None]
        for number, piece in sorted(numbered, key=lambda one: not is_byte_level and _byte(one[1]) is not None):
            raw = _raw(piece, bytes_of if is_byte_level else None)
            if raw in self._by_bytes and not is_byte_level and _byte(piece) is not None:
                continue
            _add(self._by_bytes, raw, number)
            with suppress(UnicodeDecodeError):
                text = raw.decode("utf-8")
                _add(self._by_text, text, number)
                _add(self._by_stripped, text.strip(" "), number)

    def find(self, token: SaidToken, *, is_stripped: bool = False) -> int | None:
        """Return the id of a token, None if it is ambiguous or unknown. is_stripped: the server shows tokens without their
        spaces."""
        if token.id is not None:
            return token.id if token.id < self.size else None
        if not token.text:
            return None
        if is_stripped:
            return self._by_stripped.get(token.text)
        by_bytes = self._by_bytes.get(token.data) if token.data else None
        return self._by_text.get(token.text) if by_bytes is None else by_bytes

    def positions(self, answer: Said) -> list[tuple[int, dict[int, float]]]:
        """Return (chosen id, id -> logprob) for each position of an answer, up to the first unknown token."""
        positions = []
        # Some servers decode each token alone, and their tokenizers then drop the space before a word.
        chosen_text = "".join(position.chosen.text for position in answer.positions or ())
        is_stripped = " " not in chosen_text.strip() and " " in answer.text.strip()
        for position in answer.positions or ():
            chosen = self.find(position.chosen, is_stripped=is_stripped)
            if chosen is None:
                break
            known = ((self.find(token, is_stripped=is_stripped), token.logprob) for token in position.top)
            top = {number: logprob for number, logprob in known if number is not None}
            top.setdefault(chosen, position.chosen.logprob)
            positions.append((chosen, top))
        return positions


def _add(table: dict[Any, int | None], key: Any, number: int) -> None:
    table[key] = None if key in table else number


def _raw(piece: str, letters: Mapping[str, int] | None) -> bytes:
    if letters is not None and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return _byte(piece) or piece.replace(_UNDERLINE, " ").encode()


def _byte(piece: str) -> bytes | None:
    """Return the byte of a token such as "<0x0A>", None for other tokens."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return None


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary. Source: GPT-2, encoder.py, bytes_to_unicode (MIT): a printable
    byte is its own letter, the others have letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + at): value for at, value in enumerate(others)}
