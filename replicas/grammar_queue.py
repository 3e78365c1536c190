"""Who waits for a compiler of grammars: tenants take turns, so that what one asks for holds up no other for long."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future

from .errors import Overloaded
from .grammar_process import GrammarProcess
from .grammar_spec import GrammarSpec

MAX_QUEUED = 64
MAX_OF_TENANT = 16

Waiting = tuple[GrammarSpec, "Future[GrammarProcess]"]


class GrammarQueue:
    """First come, first served within a tenant; among tenants each has one of its own done in turn.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Waiting]] = OrderedDict()  # by tenant; whose turn is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, spec: GrammarSpec) -> Future[GrammarProcess]:
        """Raises Overloaded when too many wait, of this tenant or of all."""
        own = self._waiting.get(tenant, ())
        if len(own) >= MAX_OF_TENANT or len(self) >= MAX_QUEUED:
            count = f"{len(own)} grammars of yours" if len(own) >= MAX_OF_TENANT else f"{MAX_QUEUED} grammars"
            raise Overloaded(f"{spec.field}: {count} are waiting to be compiled", code="queue_full")
        future: Future[GrammarProcess] = Future()
        self._waiting.setdefault(tenant, deque()).append((spec, future))
        return future

    def take(self) -> Waiting | None:
        """The next one's, whose tenant then is the last; None: nobody waits."""
        if not self._waiting:
            return None
        tenant, own = self._waiting.popitem(last=False)
        first = own.popleft()
        if own:
            self._waiting[tenant] = own
        return first
