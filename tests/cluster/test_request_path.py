"""A request takes at most 14 forms between socket and token and back, and docs/concepts/request.md lists each.

Annotations are followed from the handlers of every protocol to the scheduler and back. What leads from one room to
another, which is a folder, or the scheduler, takes and returns these forms and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from annotation_walk import Followed, leaves

from motley.cluster import api
from motley.cluster.transport.caller import Caller
from motley.replicas.engine import scheduler
from motley.replicas.engine.engine_thread import EngineThread
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.errors import Unavailable
from motley.replicas.types import Request, StreamMessage

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "request.md"
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:5]]
    for line in PAGE.read_text().partition("## The forms of a request")[2].splitlines()
    if line.startswith("| `")
]
FORMS = {name: (makers, readers) for [name], _, makers, readers in ROWS}
AT_MOST = 14
# What works on forms and is none: it is made of no fields that others read.
TOOLS = {
    "Allocation",  # KV blocks of a sequence
    "AnswerReader",  # splits an answer into text, reasoning and calls
    "CallAttempt",  # an open call
    "DispatchTracker",  # counts a request on its replica
    "GrammarProcess",  # knows which tokens may follow
    "LogprobBudget",  # bounds an answer
    "RequestStreamer",  # the router, or what stands before it
    "RouteRecord",  # notes where a request went
    "Router",
    "StreamMultiplexer",  # an open stream
}
PLAIN = (str, bytes, int, float, bool, type(None), object)


@cache
def handlers() -> list[Followed]:
    """The methods of all protocols that take a request of a known caller."""
    found = []
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        if module.name.endswith(("_protocol", "_embeddings")):
            for owner in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(owner) and owner.__module__ == module.name:
                    methods = [each for each in vars(owner).values() if isinstance(each, FunctionType)]
                    found += [Followed(each, owner) for each in methods if not each.__name__.startswith("_")]
    return [each for each in found if Caller in each.annotations.values()]


@cache
def across_threads() -> list[Followed]:
    """Return what the engine's thread and the event loop call at their ends of a queue."""
    ends = (EngineThread, "_run"), (EngineThread, "_take_commands"), (Worker, "_deliver")
    return [Followed(vars(owner)[name], owner) for owner, name in ends]


def forms_of(annotation: Any) -> set[str]:
    return {each.__name__ for each in leaves(annotation) if getattr(each, "__name__", "") in FORMS and is_ours(each)}


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("motley.")


def room(followed: Followed) -> str:
    module = followed.function.__module__
    return module if module == scheduler.__name__ else module.rpartition(".")[0]


@cache
def way() -> tuple[dict[str, Followed], dict[str, Followed]]:
    """All functions on the way, by name, and those of them that lead from one room to another."""
    seen: dict[str, Followed] = {}
    border = {each.function.__qualname__: each for each in across_threads()}
    left = [*handlers(), *across_threads()]
    while left:
        here = left.pop()
        if here.function.__qualname__ in seen:
            continue
        seen[here.function.__qualname__] = here
        for there in here.called():
            if any(map(forms_of, there.annotations.values())):
                left.append(there)
                if room(there) != room(here):
                    border[there.function.__qualname__] = there
    return seen, border


def offences(followed: Followed) -> list[str]:
    """Yield what is neither a form nor something plain, nor a tool, in the annotations of a function."""
    found = [each for annotation in followed.annotations.values() for each in leaves(annotation)]
    return [
        getattr(each, "__name__", str(each))
        for each in found
        if each is Any
        or (isinstance(each, type) and each not in PLAIN and not issubclass(each, Exception) and not is_known(each))
    ]


def is_known(kind: type) -> bool:
    return is_ours(kind) and (kind.__name__ in FORMS or kind.__name__ in TOOLS)


def test_the_forms_are_few() -> None:
    assert 0 < len(FORMS) <= AT_MOST


@pytest.mark.slow("the annotations of all that takes a request are evaluated")
def test_the_way_goes_from_every_protocol_to_the_scheduler_and_back() -> None:
    protocols = {each.function.__module__.split(".")[3] for each in handlers()}
    assert protocols == {"openai", "motley", "kserve", "vllm", "health"}
    there = {"RequestAdmitter.admit", "Router.stream", "Replica.generate", "Replica.answer", "Worker.generate",
             "EngineThread.add", "EngineCore.add", "Scheduler.add", "Scheduler.plan", "Runner.run"}  # fmt: skip
    back = {"EngineCore.step", "Worker._deliver", "OutputQueue.messages", "split_stream", "MultiplexedStream.next",
            "RetryableRequest.take", "collect_response"}  # fmt: skip
    assert there | back <= way()[0].keys()


def test_no_other_type_goes_from_one_room_to_another() -> None:
    border = way()[1]
    assert len(border) > 40
    assert {name: wrong for name, each in border.items() if (wrong := offences(each))} == {}


def test_every_form_goes_from_one_room_to_another() -> None:
    assert {form for each in way()[1].values() for kind in each.annotations.values() for form in forms_of(kind)} == {
        *FORMS
    }


def test_tools_are_no_data() -> None:
    found = {kind.__name__: kind for each in way()[1].values() for kind in _kinds(each) if kind.__name__ in TOOLS}
    assert found.keys() == TOOLS, "and each is needed"
    assert not [name for name, kind in found.items() if is_dataclass(kind) or hasattr(kind, "_fields")]


def _kinds(followed: Followed) -> list[type]:
    return [each for kind in followed.annotations.values() for each in leaves(kind) if isinstance(each, type)]


@pytest.mark.parametrize("form", FORMS)
def test_each_is_made_and_read_where_the_page_says(form: str) -> None:
    makers, readers = FORMS[form]
    assert makers
    assert readers
    for maker in map(_named, makers):
        made = forms_of(maker.annotations.get("return")) | set(
            re.findall(r"\b(\w+)\(", inspect.getsource(maker.function))
        )
        assert form in made, f"{maker.function.__qualname__} does not make it"
    for reader in map(_named, readers):
        given = [kind for name, kind in reader.annotations.items() if name != "return"]
        assert form in set().union(*map(forms_of, given)), f"{reader.function.__qualname__} does not read it"


def _named(qualname: str) -> Followed:
    """The function of this name in any module of ours, on the way or at its ends."""
    owner, _, name = qualname.rpartition(".")
    for module in [each for key, each in sys.modules.items() if key.startswith("motley.")]:
        scope = vars(module).get(owner) if owner else module
        found = vars(scope).get(name) if scope is not None else None
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if isinstance(found, FunctionType):
            return Followed(inspect.unwrap(found), scope if isinstance(scope, type) else None)
    raise AssertionError(f"there is no {qualname}")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (Any, "Any"),
        (dict, "dict"),
        (dict[str, int], "dict"),
        (tuple, "tuple"),
        (tuple[Request, str], "tuple"),
        (list[tuple[int, StreamMessage]], "tuple"),
        (Followed, "Followed"),
    ],
)
def test_what_is_no_form_is_seen(wrong: Any, named: str) -> None:
    def hand_over(request: Request) -> None: ...

    hand_over.__annotations__ = {"request": Request, "return": tuple[StreamMessage, ...] | Unavailable | None}
    assert offences(Followed(hand_over, None)) == []
    hand_over.__annotations__["return"] = wrong
    assert named in offences(Followed(hand_over, None))
