"""Queue of grammars that wait to be compiled: tenants take turns, so that no tenant's grammars delay the others' for
long.

Most grammars take a moment, and some as long as they may, which is not known before. Each is tried for a moment first;
one that is not done by then joins a second queue, of which one grammar is compiled at a time. All other compilers are
for grammars that have not been tried.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ...errors import Overloaded
from ...host.tenant_queue import TenantQueue
from ..grammar_spec import GrammarSpec
from .grammar_process import GrammarProcess

MAX_QUEUED = 64
MAX_OF_TENANT = 16
FIRST_CPU_S = 0.3
LAST_CPU_S = 2.0  # for a start from the beginning, since a process that is kept half done would keep its memory


@dataclass(eq=False, slots=True)
class QueuedGrammar:
    """A grammar that waits. last: it has been tried once, and its second time is its last."""

    tenant: str
    spec: GrammarSpec
    future: Future[GrammarProcess] = field(default_factory=Future)
    last: bool = False

    @property
    def cpu_s(self) -> float:
        return LAST_CPU_S if self.last else FIRST_CPU_S


class GrammarQueue:
    """Queue that is first come, first served within a tenant, and tries one grammar of each tenant in turn.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._new: TenantQueue[QueuedGrammar] = TenantQueue()
        self._tried: TenantQueue[QueuedGrammar] = TenantQueue()
        self._long = False  # whether a grammar of the second queue is being compiled

    def __len__(self) -> int:
        return len(self._new) + len(self._tried)

    def put(self, tenant: str, spec: GrammarSpec) -> Future[GrammarProcess]:
        """Add a grammar. Raises Overloaded when too many wait, of this tenant or of all."""
        own = self._new.of(tenant) + self._tried.of(tenant)
        if own >= MAX_OF_TENANT or len(self) >= MAX_QUEUED:
            count = f"{own} grammars of yours" if own >= MAX_OF_TENANT else f"{MAX_QUEUED} grammars"
            raise Overloaded(f"{spec.field}: {count} are waiting to be compiled", code="queue_full")
        waiting = QueuedGrammar(tenant, spec)
        self._new.put(tenant, waiting)
        return waiting.future

    def take(self) -> QueuedGrammar | None:
        """Return the next grammar, to be reported by `tried`. None: none waits, or only ones that must wait for a long
        one to end.
        """
        waiting = None if self._long else self._tried.take()
        self._long = self._long or waiting is not None
        return waiting or self._new.take()

    def tried(self, waiting: QueuedGrammar, *, retry: bool) -> None:
        """Record that a grammar has had its time. `retry`: it was not compiled, so it joins the queue for the longer
        time.
        """
        self._long = self._long and not waiting.last
        if retry:
            waiting.last = True
            self._tried.put(waiting.tenant, waiting)

    def clear(self) -> list[QueuedGrammar]:
        """Remove and return all grammars that wait."""
        return [*iter(self._new.take, None), *iter(self._tried.take, None)]
