"""Grammars of one engine: compiled in processes of their own, kept while they are used, and refused if too complex."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ...errors import InvalidRequest, MotleyError, Unavailable
from ...host.child_frames import GrammarCommand, GrammarReply, encode_frame, encode_vocabulary, receive_frame
from ...host.forkserver import Forkserver, ProcessLost, retry_once
from ...text.tokenizer.tokenizer import Tokenizer
from ..grammar_spec import GrammarSpec
from .compile_queue import GrammarQueue, QueuedGrammar
from .grammar_process import TOO_COMPLEX, GrammarProcess

log = logging.getLogger(__name__)

MAX_CACHED = 16  # most compiled grammars that are kept, unused ones included
MAX_COMPILING = 2  # grammars compiled at a time; compile_queue.py keeps one of these for quick ones
MAX_REFUSED = 256  # refused grammars that are remembered, so that a repeated request costs nothing
REFUSED_S = 60.0
START_S = 120.0  # most seconds for importing the library, on a busy machine


class GrammarCompiler:
    """Compiler of grammars for one vocabulary. Starts nothing before the first grammar is asked for.

    vocab_size   of the model: masks have a bit for each of its ids
    stop_ids     ids that end a sequence; they may follow when the text is complete
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._lock = threading.Lock()
        self._forkserver: _GrammarForkserver | None = None
        self._forkserver_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="motley-grammar")
        self._queue = GrammarQueue()
        self._closed = False
        self._compiling: dict[GrammarSpec, Future[GrammarProcess]] = {}
        self._cache: OrderedDict[GrammarSpec, GrammarProcess] = OrderedDict()
        self._refused: OrderedDict[GrammarSpec, tuple[float, InvalidRequest]] = OrderedDict()

    def prepare(self, spec: GrammarSpec, tenant: str = "") -> Future[GrammarProcess]:
        """Compile a grammar, or find it compiled. Concurrent callers with one grammar share the future: do not cancel
        it.

        The future raises InvalidRequest naming the spec's field. Raises Overloaded when too many wait. Tenants take
        turns.
        """
        with self._lock:
            if (found := self._lookup(spec)) is not None:
                return found
            if (future := self._compiling.get(spec)) is not None:
                return future
            future = self._compiling[spec] = self._queue.put(tenant, spec)
            future.add_done_callback(lambda done: self._settle(spec, done))
            self._threads.submit(self._compile_next)
        return future

    def refuse(self, spec: GrammarSpec, error: InvalidRequest) -> None:
        """Refuse a grammar for REFUSED_S seconds, as it has proved too complex while it was used."""
        with self._lock:
            self._cache.pop(spec, None)
            self._refused[spec] = (time.monotonic() + REFUSED_S, error)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._cache.clear()
            left = self._queue.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for waiting in left:
            waiting.future.cancel()
        if self._forkserver is not None:
            self._forkserver.close()

    def _lookup(self, spec: GrammarSpec) -> Future[GrammarProcess] | None:
        future: Future[GrammarProcess] = Future()
        if (process := self._cache.get(spec)) is not None:
            if process.alive:
                self._cache.move_to_end(spec)
                future.set_result(process)
                return future
            del self._cache[spec]
        until, error = self._refused.get(spec, (0.0, None))
        if error is None or time.monotonic() >= until:
            return None
        future.set_exception(_with_field_name(error, spec))
        return future

    def _settle(self, spec: GrammarSpec, done: Future[GrammarProcess]) -> None:
        with self._lock:
            self._compiling.pop(spec, None)
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, InvalidRequest):
            self.refuse(spec, error)
        elif error is None:
            with self._lock:
                self._cache[spec] = done.result()
                while len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)

    def _compile_next(self) -> None:
        """Compile the waiting grammar whose turn it is."""
        with self._lock:
            waiting = self._queue.take()
        if waiting is None:
            return  # the queue was closed, or the others wait for a long one to end
        retry = False
        try:
            retry = not self._try(waiting)
        finally:
            self._tried(waiting, retry)

    def _try(self, waiting: QueuedGrammar) -> bool:
        """Try to compile a grammar; return False if its time was too short and it gets another."""
        try:
            process = retry_once(lambda: self._compile(waiting.spec, waiting.cpu_s))
        except ProcessLost as lost:
            message = f"{waiting.spec.field}: the process that compiles grammars was lost twice: {lost}; try again"
            waiting.future.set_exception(Unavailable(message, code="structured_output_unavailable"))
            return True
        except Exception as error:  # noqa: BLE001  # raised by the future
            waiting.future.set_exception(error)
            return True
        if process is not None:
            waiting.future.set_result(process)
        elif waiting.last:
            waiting.future.set_exception(waiting.spec.too_complex(TOO_COMPLEX))
        return process is not None or waiting.last

    def _tried(self, waiting: QueuedGrammar, retry: bool) -> None:
        with self._lock:
            self._queue.tried(waiting, retry=retry and not self._closed)
            if len(self._queue):  # another that had to wait for this one may begin now
                self._threads.submit(self._compile_next)
        if retry and self._closed:
            waiting.future.cancel()

    def _compile(self, spec: GrammarSpec, cpu_s: float) -> GrammarProcess | None:
        """Compile a grammar; return None if that takes more than `cpu_s`, or more memory than it may. Raises
        ProcessLost.
        """
        began = time.perf_counter()
        process = GrammarProcess(*self._running_forkserver(spec).child(), spec)
        done = process.compile(cpu_s)
        what = "compiled" if done else "did not compile"
        log.info("%s a %s of %d bytes in %.3f s", what, spec.kind, len(spec.source), time.perf_counter() - began)
        return process if done else None

    def _running_forkserver(self, spec: GrammarSpec) -> _GrammarForkserver:
        with self._forkserver_lock:
            if self._forkserver is None or not self._forkserver.alive:
                if importlib.util.find_spec("xgrammar") is None:
                    raise UnsupportedGrammar(
                        f"{spec.field}: this replica has no xgrammar package, which structured output needs",
                        param=spec.field,
                        code="structured_output_unavailable",
                    )
                self._forkserver = _GrammarForkserver(self._vocabulary())
            return self._forkserver

    def _vocabulary(self) -> bytes:
        count = min(self._tokenizer.vocab_size, self._vocab_size)
        skipped = self._tokenizer.skipped_ids
        tokens = [b"" if i in skipped or i in self._stop_ids else self._tokenizer.token_bytes(i) for i in range(count)]
        return encode_vocabulary(tokens, self._vocab_size, self._stop_ids)


class UnsupportedGrammar(InvalidRequest):
    """Error for a replica without the xgrammar package: not the client's fault, and not remembered against its
    grammar.
    """


class _GrammarForkserver(Forkserver):
    """Process that grammars' processes are forked from. Raises Unavailable if it does not start, and ProcessLost if it
    is stopped meanwhile.
    """

    def __init__(self, tokens: bytes) -> None:
        began = time.perf_counter()
        super().__init__(f"{__package__}.grammar_forkserver", [], _ONE_THREAD)
        line = self.line(START_S)
        try:
            line.sendall(encode_frame(GrammarCommand.VOCABULARY, payload=tokens))
            ready = receive_frame(line)
        except OSError:
            ready = None
        except ProcessLost:
            self.close()
            raise
        if ready is None or ready[0] != GrammarReply.READY:
            self.close()
            why = "the process that compiles grammars did not start" if ready is None else ready[2].decode()
            raise Unavailable(why, code="structured_output_unavailable")
        log.info("structured output: ready after %.1f s", time.perf_counter() - began)


# Threads would not survive the forks, and the process needs no device.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _with_field_name(error: MotleyError, spec: GrammarSpec) -> InvalidRequest:
    """Return the same error for a refused grammar, under the field name that this client uses."""
    message = error.message.partition(": ")[2]
    return InvalidRequest(f"{spec.field}: {message}", param=spec.field, code=error.code)
