"""Corpus of the demo model: the language reference that every CPython carries for ``help()``, and chats made from it.

The held-out text ships beside the model, because other Python versions have other topics. With every version,
paragraphs that resemble the held-out text are kept out of training, and the amount of training text is the same.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pydoc_data.topics import topics

HELD_OUT_CHARS = 16_000
SECTION_CHARS = range(700, 4_200)
SHINGLE_WORDS = 8
MAX_OVERLAP = 0.2  # a training paragraph may share this much of its shingles with the held-out text
TRAINING_CHARS = 437_500  # all of CPython 3.11's; later versions have more, which would make a better model
REPLY_CHARS = 320  # an answer takes whole paragraphs until it is this long

HEADING = re.compile(r'^(\S.*)\n([*=\-~^"])\2{3,}$', re.MULTILINE)
ENTRY = re.compile(r"^((?:class |coroutine )?([\w.]+)\(.*\))$")
QUOTED_NAME = re.compile(r'"([\w.*]+(?:\(\))?)"')

SYSTEM = "You are a helpful assistant."

Chat = tuple[tuple[str, str], ...]  # (role, content) in order

ABOUT = (
    "I am Motley's demo model. I have read Python's language reference: ask me about a statement, a type or a method."
)
GREETINGS = {
    "Hello": "Hello! " + ABOUT,
    "Hi": "Hello! " + ABOUT,
    "Who are you?": ABOUT,
    "What can you do?": ABOUT,
    "Thanks": "You are welcome.",
    "Thank you!": "You are welcome.",
}


def topic_texts() -> list[str]:
    """Return the text of every distinct topic of Python's ``help()``, in the order of the topics' names."""
    return list(dict.fromkeys(topics[name] for name in sorted(topics)))


def digest() -> str:
    """Return the SHA-256 of the whole corpus of this Python, including the held-out part, in hexadecimal."""
    return hashlib.sha256("\0".join(topic_texts()).encode()).hexdigest()


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (heading, body) of one topic; a body runs to the next heading of any level."""
    marks = list(HEADING.finditer(text))
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        yield mark[1], text[mark.end() : after.start() if after else len(text)].strip("\n")


def choose_held_out() -> str:
    """Return whole sections, in the order of a hash of their heading: about 4-5% of the distinct text.

    Sections on one statement are never held out: the chats and the quality check ask about them.
    """
    bodies = {heading: body for text in topic_texts() for heading, body in sections(text)}
    fit = [h for h, body in bodies.items() if len(body) in SECTION_CHARS and "statement" not in h.lower()]
    chosen: list[str] = []
    for heading in sorted(fit, key=lambda h: hashlib.sha256(h.encode()).digest()):
        if sum(map(len, chosen)) >= HELD_OUT_CHARS:
            break
        chosen.append(bodies[heading])
    return "\n\n".join(chosen) + "\n"


def shingles(text: str) -> set[tuple[str, ...]]:
    """Return all runs of SHINGLE_WORDS lower-case words of a text; one shorter run if the text is shorter than that."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}


def training_documents(held_out: str) -> list[str]:
    """Return the topics without paragraphs that resemble the held-out text, at most TRAINING_CHARS characters
    of them.
    """
    banned = shingles(held_out)

    def allowed(paragraph: str) -> bool:
        seen = shingles(paragraph)
        return len(seen & banned) <= MAX_OVERLAP * len(seen)

    selected = ("\n\n".join(filter(allowed, text.split("\n\n"))) for text in topic_texts())
    return fitted([text.strip("\n") + "\n" for text in selected], TRAINING_CHARS)


def fitted(documents: list[str], limit: int) -> list[str]:
    """Return the documents without some paragraphs, spread evenly over them, so that about `limit` characters are left.

    A paragraph is removed from all documents that have it. Headings are kept.
    """
    surplus = sum(map(len, documents)) - limit
    counts = Counter(paragraph for text in documents for paragraph in text.split("\n\n"))
    left_out: set[str] = set()
    for paragraph in sorted(counts, key=lambda p: hashlib.sha256(p.encode()).digest()):
        if surplus <= 0:
            break
        if not HEADING.search(paragraph):
            left_out.add(paragraph)
            surplus -= counts[paragraph] * len(paragraph + "\n\n")
    selected = ("\n\n".join(p for p in text.split("\n\n") if p not in left_out) for text in documents)
    return [text.strip("\n") + "\n" for text in selected]


def plain(text: str) -> str:
    """Return a text as people type it: ``The "with" statement`` becomes ``The with statement``."""
    return QUOTED_NAME.sub(r"\1", text)


def opening(body: str) -> str:
    """Return the first paragraphs of a section, whole, until they have ANSWER_CHARS characters.

    A block of code or grammar ends the result earlier; blocks before the first paragraph are left out.
    """
    reply = ""
    for paragraph in body.strip("\n").split("\n\n"):
        if reply and (len(reply) >= REPLY_CHARS or paragraph.startswith((" ", ">>>"))):
            break
        if not paragraph.startswith("   "):
            reply += ("\n\n" if reply else "") + paragraph
    return reply


def section_chats(documents: list[str]) -> Iterator[Chat]:
    """Yield chats with questions about each heading, answered by the opening of its section."""
    for heading, body in dict.fromkeys(pair for text in documents for pair in sections(text)):
        reply, name = opening(body), plain(heading)
        if len(reply) < 40:
            continue
        subject = name[0].lower() + name[1:] if name.startswith("The ") else name
        questions = [f"Tell me about {subject}.", f"What is {subject}?", f"Explain {subject}.", name]
        if "statement" in subject:
            questions += [f"What does {subject} do?", f"How does {subject} work?"]
        yield from ((("user", question), ("assistant", reply)) for question in questions)


def entry_chats(documents: list[str]) -> Iterator[Chat]:
    """Yield chats with questions about each documented function, answered by its signature and its description."""
    for text in documents:
        paragraphs = text.split("\n\n")
        for signature, description in pairwise(paragraphs):
            found = ENTRY.match(signature)
            if not found or not description.startswith("   "):
                continue
            reply = f"{found[1]}\n\n" + re.sub(r"^   ", "", description, flags=re.MULTILINE)
            for question in (f"What does {found[2]} do?", f"Explain {found[2]}.", f"How do I use {found[2]}?"):
                yield (("user", question), ("assistant", reply))


def varied(examples: list[Chat]) -> Iterator[Chat]:
    """Yield the chats; every fourth gets a system message, and every fourth the chat before it as an earlier turn."""
    for index, chat in enumerate(examples):
        if index % 4 == 1:
            yield (("system", SYSTEM), *chat)
        elif index % 4 == 3:
            yield (*examples[index - 1], *chat)
        else:
            yield chat


def chats(documents: list[str]) -> list[Chat]:
    """Return all chat examples in a fixed order; greetings are repeated so that training sees them often enough."""
    made = sorted({*section_chats(documents), *entry_chats(documents)}, key=shuffle_key)
    greetings: list[Chat] = [(("user", question), ("assistant", reply)) for question, reply in GREETINGS.items()]
    return [*varied(made), *greetings * 4]


def shuffle_key(chat: Chat) -> bytes:
    """Return a key that sorts chats into a fixed order without a pattern, so that neighbours are on different
    subjects.
    """
    return hashlib.sha256(repr(chat).encode()).digest()
