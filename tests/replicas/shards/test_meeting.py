"""Where ranks meet: whoever leaves later than the meeting ends touches no file of anybody else's."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from pathlib import Path

from motley.replicas.shards.meeting import Meeting, store_of

CONTENTS = b"weights, of which nothing may change"


def test_a_store_that_goes_late_writes_to_no_file_that_was_opened_meanwhile(tmp_path: Path) -> None:
    """torch's goes when nothing refers to it, long after an engine's end, and then writes once more, by a number."""
    meeting = Meeting(None)
    assert meeting.descriptor is not None
    store = store_of(meeting.descriptor, None)
    store.set("somebody", "has come")
    files = [tmp_path / f"{number}.safetensors" for number in range(64)]
    with ExitStack() as opened:
        for file in files:
            file.write_bytes(CONTENTS)
            opened.enter_context(file.open("rb"))
        del store, meeting
        gc.collect()
    assert {file.read_bytes() for file in files} == {CONTENTS}


def test_meetings_of_one_process_know_nothing_of_each_other() -> None:
    first, second = Meeting(None), Meeting(None)
    assert first.descriptor == second.descriptor, "of which none is closed, so that there is one"
    assert first.name != second.name
    assert first.descriptor is not None
    os.fstat(first.descriptor)
