"""Text of one choice as its tokens arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Stream that turns the output ids of one choice into text that is safe to send.

    Text that could still become part of a stop string is held back, and no more than that: the longest
    suffix that begins one. The first stop string to be completed ends the text; of several completed by the
    same character, the one that began first. It counts only if it is completed by token number `min_tokens`
    or later.

    stopped       the stop string that ended the text, or None
    include_stop  whether the stop string is the end of the text, and not left out
    num_tokens    tokens taken so far, the one that completed the stop string being the last. `push` takes
                  none after it: compare with the number pushed to see which ids belong to the output
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._decoder = tokenizer.detokenizer(prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matchers = tuple(_StopStringMatcher(text) for text in dict.fromkeys(stop))
        self._starts = frozenset(text[0] for text in stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""  # complete characters not yet handed out
        self.stopped: str | None = None
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that became safe to send, which may be empty."""
        if not self._matchers:
            self.num_tokens += len(token_ids)
            return self._decoder.push(token_ids)
        safe = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            safe.append(self._scan(self._decoder.push((token_id,))))
        return "".join(safe)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take tokens whose text was sent before, so that the next `push` returns exactly what follows it."""
        self.push(token_ids)

    def flush(self) -> str:
        """End the text: return what was held back, and an unfinished character as U+FFFD. Empty after a stop string."""
        if self.stopped is not None:
            return ""
        safe = self._scan(self._decoder.flush())
        if self.stopped is None:
            safe, self._held = safe + self._held, ""
        return safe

    def _scan(self, new: str) -> str:
        if not self._held and self._starts.isdisjoint(new):
            return new  # the most frequent case: no stop string has begun or begins here
        text = self._held + new
        checked = self.num_tokens >= self._min_tokens
        for position, char in enumerate(new, start=len(self._held) + 1):
            ended = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if ended and checked:
                self.stopped, self._held = max(ended, key=len), ""
                return text[: position if self._include_stop else position - len(self.stopped)]
        # |<------ safe ------>|<-- held: could begin a stop string -->|
        cut = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[cut:]
        return text[:cut]


class _StopStringMatcher:
    """Knuth, Morris and Pratt's automaton: `matched` is the length of the longest suffix read that begins `stop`."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _prefix_borders(stop)

    def step(self, char: str) -> bool:
        """Read one character; return True if it completes the stop string."""
        matched = self.matched
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched]
        if self.stop[matched] == char:
            matched += 1
        complete = matched == len(self.stop)
        self.matched = self._fallback[matched] if complete else matched
        return complete


def _prefix_borders(text: str) -> list[int]:
    """Return, for each length, the length of the longest proper prefix of `text[:length]` that is also its suffix."""
    borders = [0] * (len(text) + 1)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[i] != text[matched]:
            matched = borders[matched]
        matched += text[i] == text[matched]
        borders[i + 1] = matched
    return borders
