"""Who waits for a compiler of grammars: tenants take turns, so that what one asks for holds up no other for long.

Most grammars take a moment, and some as long as they may. Nobody knows before: each is tried for a moment first, and
what is not done by then stands in a second line, of which one is compiled at a time. Whatever else compiles is for
those who come new.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from .errors import Overloaded
from .grammar_process import GrammarProcess
from .grammar_spec import GrammarSpec
from .tenant_line import TenantLine

MAX_QUEUED = 64
MAX_OF_TENANT = 16
FIRST_CPU_S = 0.3
LAST_CPU_S = 2.0  # from the beginning again: a process that is kept half done would keep its memory


@dataclass(eq=False, slots=True)
class Waiting:
    """last  it has been tried: this is its second and last time"""

    tenant: str
    spec: GrammarSpec
    future: Future[GrammarProcess] = field(default_factory=Future)
    last: bool = False

    @property
    def cpu_s(self) -> float:
        return LAST_CPU_S if self.last else FIRST_CPU_S


class GrammarQueue:
    """First come, first served within a tenant; among tenants each has one of its own tried in turn.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._new: TenantLine[Waiting] = TenantLine()
        self._tried: TenantLine[Waiting] = TenantLine()
        self._long = False  # one of those tried is compiled right now

    def __len__(self) -> int:
        return len(self._new) + len(self._tried)

    def put(self, tenant: str, spec: GrammarSpec) -> Future[GrammarProcess]:
        """Raises Overloaded when too many wait, of this tenant or of all."""
        own = self._new.of(tenant) + self._tried.of(tenant)
        if own >= MAX_OF_TENANT or len(self) >= MAX_QUEUED:
            count = f"{own} grammars of yours" if own >= MAX_OF_TENANT else f"{MAX_QUEUED} grammars"
            raise Overloaded(f"{spec.field}: {count} are waiting to be compiled", code="queue_full")
        waiting = Waiting(tenant, spec)
        self._new.put(tenant, waiting)
        return waiting.future

    def take(self) -> Waiting | None:
        """The next one, to be told of by `tried`. None: nobody waits, or only for the one that takes long."""
        waiting = None if self._long else self._tried.take()
        self._long = self._long or waiting is not None
        return waiting or self._new.take()

    def tried(self, waiting: Waiting, *, again: bool) -> None:
        """It has had its time. `again`: in vain, so it stands in line for the longer one."""
        self._long = self._long and not waiting.last
        if again:
            waiting.last = True
            self._tried.put(waiting.tenant, waiting)

    def clear(self) -> list[Waiting]:
        """All that wait, who do so no more."""
        return [*iter(self._new.take, None), *iter(self._tried.take, None)]
