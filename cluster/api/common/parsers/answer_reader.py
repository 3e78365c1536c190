"""Reader of one choice's text as it comes, for the answers of every protocol."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from .....replicas.text.tokenizer.text_stream import TextStream
from .....replicas.text.tokenizer.tokenizer import Tokenizer
from .....replicas.types import Request
from .answer_parser import ParsedAnswer, parse_whole
from .parser_selection import AnswerParserConfig


class AnswerReader:
    """Reader for whole answers and streams alike, so that a text means the same in both."""

    def __init__(self, reading: AnswerParserConfig, tokenizer: Tokenizer) -> None:
        self._parser = reading.parser()
        self._counter = reading.counter()
        self._tokenizer = tokenizer

    def read(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedAnswer:
        """Return the answer's next part from the next text.

        last  no more text will come
        """
        if self._parser is None:  # the usual case: nothing to look for
            return ParsedAnswer(text=text)
        if self._counter is not None:
            self._counter.push([self._tokenizer.token_bytes(token_id) for token_id in token_ids])
        return parse_whole(self._parser, text) if last else ParsedAnswer().add(self._parser.push(text))

    def skip(self, request: Request, token_ids: Sequence[int]) -> None:
        """Read what the client of a resumed request has received already; the text is the one that the engine sent."""
        sampling = request.sampling
        text = TextStream(
            self._tokenizer,
            prompt_ids=request.prompt_ids,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            include_stop=sampling.include_stop_str_in_output,
        )
        self.read(text.push(token_ids), token_ids, last=False)

    @property
    def called(self) -> bool:
        """Whether tool calls with complete arguments were found."""
        return self._parser is not None and self._parser.num_calls > 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.num_tokens


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
