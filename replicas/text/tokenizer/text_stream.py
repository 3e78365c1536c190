"""Text of one choice as its tokens arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .stop_automaton import START, stop_automaton
from .tokenizer import Tokenizer


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
        self._automaton = stop_automaton(tuple(stop)) if stop else None
        self._state = START
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""  # complete characters not yet handed out
        self.stopped: str | None = None
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that became safe to send, which may be empty."""
        if self._automaton is None:
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
        automaton = self._automaton
        if automaton is None or (not self._held and automaton.starts.isdisjoint(new)):
            return new  # the most frequent case: no stop string has begun or begins here
        text, state = self._held + new, self._state
        checked = self.num_tokens >= self._min_tokens
        for position, char in enumerate(new, start=len(self._held) + 1):
            state, ended = automaton.step(state, char)
            if ended is not None and checked:
                self.stopped, self._held = ended, ""
                return text[: position if self._include_stop else position - len(ended)]
        # |<------ safe ------>|<-- held: could begin a stop string -->|
        cut = len(text) - automaton.lengths[state]
        self._state, self._held = state, text[cut:]
        return text[:cut]
