"""Repair of a model's call arguments to valid JSON while they are generated; valid arguments are left untouched.

Models write line ends within strings, Python's None and True, NaN, commas before a closing bracket, keys and words
without quotes, and unescaped quotes within strings; and they forget brackets, quotes and values. Clients parse what
they get, so each of these becomes the nearest valid JSON. Values are not cut short: a word that is not JSON becomes a
string, and a quote closes its string only if what follows it can follow a string. A quote that was meant as text but is
followed by a comma and another quote, or by a closing bracket, cannot be told from one that closes.
"""

from __future__ import annotations

import json

from .json_literals import is_json, is_literal, json_literal
from .lookahead import CLOSES, SPACE, ends_string, ends_word, is_mark

_CLOSING = {"{": "}", "[": "]"}
_ENDS = ",}]\n<;:"  # characters that may end a value without quotes
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
FENCE = "```"  # end of a code block; as a mark it also ends the object outside strings
_BREAKS = "<;"  # end of the object if outside strings, where JSON has neither


class JsonRepairer:
    """Reader that mends one object, which begins with the next character, `{`.

    mark  also ends the object within a string once that string contains a line end or an unescaped quote, since JSON
          has neither there

    done  the object has ended, and brackets that the model left open are closed
    """

    def __init__(self, mark: str = "") -> None:
        self.done = False
        self._mark = mark
        self._open: list[str] = []
        self._expects = "value"  # or "key", "colon", "next" (a comma or a closing bracket)
        self._quote = ""  # quote that opened the string that is being read
        self._escape = ""  # incomplete escape sequence
        self._is_broken = False  # the string contains what JSON strings cannot
        self._ends = False  # the next character ends the string or the word that is being read
        self._ahead = ""  # text whose meaning depends on what follows
        self._pending = ""  # possible beginning of the mark
        self._word = ""  # word without quotes, with the space behind it
        self._comma = ""  # comma with the space behind it, which is dropped before a closing bracket
        self._out: list[str] = []

    def push(self, text: str) -> tuple[str, str]:
        """Read more text; return the mended text that can be emitted, and the rest of `text` behind the object."""
        text, self._ahead = self._ahead + text, ""
        for index, char in enumerate(text):
            ends = self._is_end(text, index)
            if ends is None:
                self._ahead = text[index:]
                break
            self._ends = ends
            if self._quote:
                self._in_string(char)
            elif (char == FENCE[0] and ends) or (char in _BREAKS and (ends or not self._may_end(char))):
                self._end()
            else:
                self._outside(char)
            if self.done:
                stop = (
                    index if not self._pending and (self._quote or char in _BREAKS or char == FENCE[0]) else index + 1
                )
                return self._handed_out(), (self._pending or "") + text[stop:]
        return self._handed_out(), ""

    def rest(self) -> str:
        """Return what was held back, as it was written, when no more text will come."""
        ahead = '"' + self._ahead[1:] if self._quote and self._ahead else self._ahead
        return self._comma + self._word + self._escape + self._pending + ahead

    def _is_end(self, text: str, at: int) -> bool | None:
        """Return whether the character at `at` ends the string or word that is being read.

        None if what follows decides.
        """
        if self._quote:
            if text[at] != self._quote or self._escape == "\\":
                return False
            return ends_string(text, at, self._open, self._mark, is_key=self._expects == "key")
        if text[at] == self._mark[:1] == FENCE[0]:
            return is_mark(text, at, self._mark)
        return ends_word(text, at, self._open, self._mark) if self._may_end(text[at]) else False

    def _may_end(self, char: str) -> bool:
        """Return whether a value without quotes is being read and this character may end it or be part of it.

        A value that is JSON contains no commas.
        """
        if char not in _ENDS or not self._word or self._expects != "value":
            return False
        word = self._word.rstrip()
        return char in ":<;" or not is_literal(word)

    def _handed_out(self) -> str:
        said, self._out = "".join(self._out), []
        return said

    def _in_string(self, char: str) -> None:
        if self._pending or (char == self._mark[:1] and self._is_broken and not self._escape):
            self._may_be_mark(char)
        elif self._escape:
            self._escaped(char)
        elif char == "\\":
            self._escape = char
        elif char == self._quote and self._ends:
            self._close_string()
        elif char in (self._quote, '"'):
            self._is_broken = self._is_broken or char == self._quote
            self._out.append('\\"' if char == '"' else char)
        elif char < " ":
            self._is_broken = True
            self._out.append(json.dumps(char)[1:-1])
        else:
            self._out.append(char)

    def _may_be_mark(self, char: str) -> None:
        pending = self._pending + char
        if self._mark.startswith(pending):
            self._pending = pending
            if pending == self._mark:
                self._end()
            return
        self._pending = ""
        self._out.append(pending[:-1])
        self._in_string(char)

    def _escaped(self, char: str) -> None:
        escape = self._escape + char
        if escape == "\\u" or (escape[1] == "u" and char in _HEX and len(escape) < 6):
            self._escape = escape
            return
        self._escape = ""
        if escape[1] == "u" and char not in _HEX:
            self._out.append("\\" + escape[:-1])
            self._in_string(char)
        elif len(escape) == 2 and char == "'":
            self._out.append(char)
        elif len(escape) == 2 and char not in _ESCAPES:
            self._out.append("\\\\")
            self._in_string(char)
        else:
            self._out.append(escape)

    def _close_string(self) -> None:
        self._quote = ""
        self._out.append('"')
        self._expects = "colon" if self._expects == "key" else "next"

    def _outside(self, char: str) -> None:
        if self._word and char == '"' and self._word[-1] in SPACE and is_json(self._word):
            self._finish_word()  # a comma was forgotten
            self._begin(char)
        elif not self._ends and self._may_end(char):
            self._word += char
        elif char == "\n" and self._ends:
            self._finish_word()
            self._out.append(char)
        elif self._word and char not in ",:}]":
            self._word += char
        elif char in ",:}]":
            self._finish_word()
            self._punctuation(char)
        elif char in SPACE:
            if self._comma:
                self._comma += char
            else:
                self._out.append(char)
        else:
            self._begin(char)

    def _begin(self, char: str) -> None:
        """Begin a value or a key with this character."""
        if self._expects == "next":  # a comma was forgotten
            self._comma = self._comma or ","
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif self._expects == "colon":
            self._out.append(": ")
            self._expects = "value"
        self._out.append(self._comma)
        self._comma = ""
        if char in "\"'":
            self._quote, self._is_broken = char, False
            self._out.append('"')
        elif char in "{[" and self._expects == "value":
            self._open.append(char)
            self._out.append(char)
            self._expects = "key" if char == "{" else "value"
        else:
            self._word = char

    def _finish_word(self) -> None:
        if not self._word:
            return
        word = self._word.rstrip()
        space, self._word = self._word[len(word) :], ""
        if self._expects == "key":
            self._out += [json.dumps(word), *(char for char in space if char in SPACE)]
            self._expects = "colon"
            return
        self._out += [json_literal(word), *(char for char in space if char in SPACE)]
        self._expects = "next"

    def _punctuation(self, char: str) -> None:
        if char == ":":
            if self._expects == "colon":
                self._out.append(char)
                self._expects = "value"
        elif char == ",":
            self._complete()
            if self._expects == "next" and not self._comma:
                self._comma = char
                self._expects = "key" if self._open[-1] == "{" else "value"
        elif CLOSES[char] in self._open:
            self._close(char)

    def _complete(self) -> None:
        """Give null to a key without a value, or to a colon without one."""
        if self._expects == "colon":
            self._out.append(": null")
            self._expects = "next"
        elif self._expects == "value" and self._open[-1] == "{":
            self._out.append("null")
            self._expects = "next"

    def _close(self, char: str) -> None:
        """Close this bracket, and those within it that the model has not closed."""
        self._complete()
        self._out.append(self._comma[1:])
        self._comma = ""
        while self._open:
            opened = self._open.pop()
            self._out.append(_CLOSING[opened])
            if opened == CLOSES[char]:
                break
            self._expects = "next"
        self._expects = "next"
        self.done = not self._open

    def _end(self) -> None:
        """End the object: close everything that is open."""
        if self._quote:
            self._close_string()
            self._quote = "ended"
        self._finish_word()
        while self._open:
            self._close(_CLOSING[self._open[-1]])
        self.done = True


def repair_json(text: str) -> str:
    """Return a mended object, and what follows it unchanged."""
    said, rest = JsonRepairer().push(text)
    return said + rest
