"""How does a separate process compile a grammar before the worker does?"""

from __future__ import annotations

import json
import queue
import signal
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

from trimtab.errors import RequestError
from trimtab.process.child import end_after
from trimtab.serve.grammar.source import GrammarSource, compiled

HEAD = struct.Struct("<Q")
INTEGER = array("I").itemsize
MOST_TOKEN_BYTES = 64  # of a token that encodes a text; longer ones are passed over
# Above the memory at the process's start. The watcher kills it beyond the first limit, the system refuses beyond the second,
# because memory grows between two looks; its addresses are more than its memory.
MOST_S, MOST_BYTES, ROOM_BYTES = 5.0, 512 * 2**20, 640 * 2**20
# A process whose parent is stopped or gone ends at this processor time nevertheless.
ALONE_S = 15


class Vocabulary:
    """The part of a tokenizer that llguidance needs to compile. `encode` takes the longest token that a text begins with:
    llguidance encodes a text that a grammar prescribes, and any tokens of it will do to compile."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], ends: Sequence[int]) -> None:
        self.tokens, self.special_token_ids, self.ends, self.eos_token_id = tokens, special_token_ids, ends, ends[0]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: number for number, token in enumerate(self.tokens) if token and number not in special}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(MOST_TOKEN_BYTES, len(data) - at), 0, -1)
            size = next((one for one in sizes if data[at : at + one] in self._ids), 0)
            if not size:
                return ids
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return that of an LLTokenizer."""
        ids = range(tokenizer.vocab_size)
        special = [token for token in ids if tokenizer.is_special_token(token)]
        return cls([tokenizer.decode_bytes([token]) for token in ids], special, tokenizer.eos_tokens)

    def to_bytes(self) -> bytes:
        """Return three counts, the special ids, the ends, each token's length, then all tokens; numbers have 32 bits."""
        numbers = (*self.special_token_ids, *self.ends, *map(len, self.tokens))
        counts = (len(self.special_token_ids), len(self.ends), len(self.tokens))
        return array("I", (*counts, *numbers)).tobytes() + b"".join(self.tokens)

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """Return what this machine's `to_bytes` wrote. Errors: ValueError for other data."""
        special, ends, tokens = array("I", data[: 3 * INTEGER])
        numbers = array("I", data[3 * INTEGER : (3 + special + ends + tokens) * INTEGER])
        places = list(accumulate(numbers[special + ends :], initial=(3 + len(numbers)) * INTEGER))
        if len(numbers) != special + ends + tokens or places[-1] != len(data):
            raise ValueError("no vocabulary, or a part of one")
        words = [data[start:end] for start, end in pairwise(places)]
        return cls(words, list(numbers[:special]), list(numbers[special : special + ends]))


def read_frame(stream: IO[bytes]) -> bytes:
    """Return the next frame. Errors: EOFError at the end of the stream."""
    head = stream.read(HEAD.size)
    size = HEAD.unpack(head)[0] if len(head) == HEAD.size else 1
    data = stream.read(size) if len(head) == HEAD.size else b""
    if len(data) < size:
        raise EOFError
    return data


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(HEAD.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Answer until standard input ends. Standard input has frames: the vocabulary, then one GrammarSource after the other. Standard
    output has an empty frame once the vocabulary is read, then the answer to each source."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    answers = sys.stdout.buffer
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    end_after(partial(_read, frames))
    tokenizer = _tokenizer(frames.get())
    _limit_memory()
    write_frame(answers, b"")
    while True:
        source = frames.get()
        _limit_time()
        start = time.process_time()
        found = answer(tokenizer, GrammarSource.from_json(source.decode()))
        write_frame(answers, json.dumps({**found, "seconds": time.process_time() - start}).encode())


def _read(frames: queue.SimpleQueue[bytes]) -> None:
    with suppress(EOFError, OSError):
        while True:
            frames.put(read_frame(sys.stdin.buffer))


def _tokenizer(data: bytes) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = Vocabulary.from_bytes(data)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(vocabulary.ends))


def _limit_memory() -> None:
    """Have the system give no more than the limit, where it can: allocations between two looks of the watcher are fast."""
    with suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + ALONE_S
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def answer(tokenizer: Any, source: GrammarSource) -> dict[str, Any]:
    """Return the grammars of a source, or the reason why it cannot be enforced ("reason"; "mistake": why we failed)."""
    try:
        for make in (source.checks, source.grammars):
            for grammar in (grammars := make()).values():
                if reason := compiled(tokenizer, grammar)[1]:
                    return {"reason": f"cannot be enforced ({reason})", "field": source.field}
    except RequestError as exc:
        return {"reason": exc.reason, "field": exc.field}
    except RecursionError:
        return {"reason": "is nested too deep, or its references lead too far", "field": source.field}
    except MemoryError:
        return {"reason": "takes too much memory to compile", "field": source.field}
    except BaseException as exc:  # a panic of llguidance is no Exception
        return {"mistake": f"{type(exc).__name__}: {exc}"[:2000]}
    return {"grammars": grammars}
