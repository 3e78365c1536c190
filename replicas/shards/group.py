"""The processes of one engine: the first rank of the first stage is this one, the others are started here."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels.batch import StepBatch
from ...kernels.cpu.c_kernels.shm_collectives import RankLost, ShmCollectives, open_shared_memory
from ...kernels.ops import Ops
from ..checkpoint import Checkpoint
from ..decoder import Stream
from ..engine_config import EngineConfig
from ..errors import EngineLost, MotleyError
from ..known import Known
from ..plan import StepPlan
from . import calls
from .agreement import Agreement
from .beats import BEAT_S, Patience, Watch
from .collective import CollectiveExchange, Collectives
from .copies import Copies
from .costs import check_alike, chooses_layers
from .deliveries import Updates
from .host import Share, SharedHost, shares_of, unlike_kv
from .launch import Launcher, Subprocesses
from .meeting import Meeting, join, while_others_live
from .member import Member
from .pipe import Pipe
from .places import Account, layers_beside
from .ranks import Ranks
from .readers import Readers
from .split import split
from .stages import Stage, check_stages, stages_of
from .telling import arithmetic_of, name_of, places_of

__all__ = ["Group"]

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done bytes, total bytes

ANSWER_S = 5.0  # without a sign of life, or of computing, while a step waits for others
SILENCE_S = 30.0  # at any other time: what imports libraries from a slow disk says nothing meanwhile
_SAID_S = 1.0  # from an exchange that fails to the word of which process has ended, where one has


class Group:
    """Starts the other processes, which say what they are on, and load when layers are divided. `config`: of the first;
    devices: of all; account: of this one; known: of its files, before any of them is read.

    ranks   of the first stage; None: layers are not divided
    stages  after `divide`: all of them, in order
    shares  likewise, what each process has of a block of KV, stage by stage
    hosts   after `allocate`: of each of the other processes its part of the host's blocks, where there are any
    copies  between KV and the host, that the others make
    rooms   after `digests`: of the other processes, the blocks of KV that each has room for
    kinds   likewise, the arithmetic of each of their operators

    launcher  of the others; None: they are subprocesses of this one
    device    that has this process's work; None: it is on a CPU

    Raises InvalidRequest where the model cannot be divided so. One that says nothing for SILENCE_S, or ANSWER_S while
    a step waits, is lost, whatever it and this process do, and so are all: whoever waits for them is told which it was,
    and what it said last. So is one that serves and says itself that it has not computed for so long.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        devices: Sequence[str],
        account: Account,
        launcher: Launcher | None = None,
        *,
        known: Known | None = None,
        device: torch.device | None = None,
    ) -> None:
        launcher = launcher or Subprocesses()
        size, count, self.device = config.tensor_parallel, config.pipeline_parallel, device
        check_stages(checkpoint.config.num_layers, count, config.pipeline_layers)
        parts = [split(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)] if size > 1 else []
        self.stages: Sequence[Stage] = ()
        self.shares: Sequence[Share] = ()
        self.why = ""
        self.hosts: list[SharedHost] = []
        self.copies = Copies(size * count - 1)
        self.rooms: list[int] = []
        self.kinds: list[str] = []
        self._config, self._parts = checkpoint.config, parts
        self._size, self._count = size, count
        self._accounts = [account]  # this process's, and when they have said theirs, of all
        self._found: list[Sequence[bytes]] = []  # digests, of the other processes
        self._host_files: list[int] = []  # of the other processes, until `allocate`
        self.ranks: Ranks | None = None
        self._exchange: ShmCollectives | CollectiveExchange | None = None
        self._after: int | None = None  # where the first stage writes for the next
        self._followers: list[Member] = []
        self._lost: EngineLost | None = None  # by its silence, or by what was found of it first
        self._first: Member | None = None  # that has ended
        self._gone = threading.Event()  # it is known which process is lost
        self._closed = False
        self._waiting = 0
        far = launcher.host()
        self._agreement = Agreement(checkpoint, known or Known(), count, size, near=far is None)
        on_gpus = device is not None or any(each != "cpu" for each in devices)
        self._meeting = Meeting(far) if size > 1 and (on_gpus or far is not None) else None
        start: dict[str, Any] = {"folder": str(checkpoint.folder), "size": size, **self._agreement.asked}
        start["chosen"] = chooses_layers(config)
        start["meets"] = (
            None
            if self._meeting is None
            else {
                "address": self._meeting.address,
                "name": self._meeting.name,
            }
        )
        try:
            with ExitStack() as given:  # what is given to others is closed here
                shared = size > 1 and self._meeting is None
                memories = [_opened(given, open_shared_memory(size)) if shared else None for _ in range(count)]
                if self._meeting is not None:
                    self._exchange = CollectiveExchange()
                elif memories[0] is not None:
                    self._exchange = ShmCollectives(memories[0], 0, size)
                if self._exchange is not None:
                    self.ranks = Ranks(parts, 0, self._exchange)
                before: list[int | None] = [None] * size
                for stage in range(count):
                    links = [(None, None) if stage == count - 1 else os.pipe() for _ in range(size)]
                    for rank, (reads, writes) in enumerate(links):
                        _opened(given, reads)
                        if (stage, rank) == (0, 0):
                            self._after = writes
                            continue
                        _opened(given, writes)
                        self._host_files.append(os.memfd_create("motley-host-kv"))
                        ends = {"memory": memories[stage], "before": before[rank], "after": writes}
                        ends["host"] = self._host_files[-1]
                        ends["meeting"] = None if self._meeting is None else self._meeting.descriptor
                        number = len(self._followers) + 1
                        own = replace(
                            config,
                            pipeline_layers=None,
                            threads=launcher.threads(number) or config.threads,
                            device=devices[number],
                        )
                        who = {"stage": stage, "rank": rank, "name": name_of(count, stage, size, rank)}
                        member = Member(
                            number,
                            start | who | {"config": asdict(own)},
                            {name: end for name, end in ends.items() if end is not None},
                            launcher,
                            self._ended,
                            partial(self.copies.made, number - 1),
                        )
                        self._followers.append(member)
                    before = [reads for reads, _ in links]
        except BaseException:
            self.lose()
            for follower in self._followers:
                follower.close()
            self._close_files()
            if self._after is not None:
                os.close(self._after)
            raise
        self._handing_on = Pipe(writes=self._after)
        self._updates = Updates(self._followers)
        self._watch = Watch(self._followers, lambda: ANSWER_S if self._waiting else SILENCE_S, self._silent)

    def accounts(self) -> Sequence[Account]:
        """Of all processes, stage by stage, when they have said theirs.

        Raises EngineLost, CheckpointError where one has another model, InvalidRequest where ranks are not alike.
        """
        if len(self._accounts) == 1:
            answers = self._answers()
            self._agreement.hear([answer["model"] for answer in answers])
            self._updates.temporaries = [answer["temporary"] for answer in answers]
            self._accounts += [Account(**answer["account"]) for answer in answers]
            check_alike(self._accounts, self._size)
        return self._accounts

    def divide(self, layers: Sequence[int], why: str) -> None:
        """They load from now on. layers: of each stage, and why so many. Raises EngineLost, InvalidRequest."""
        self.stages, self.why = stages_of(self._config.num_layers, layers), why
        self.shares = shares_of(self._config, self.stages, self._parts)
        if not self._agreement.near:  # with whom each shares digests, is for them to tell
            self.accounts()
        self.check()
        self._agreement.divide(layers)
        for number, follower in enumerate(self._followers, 1):
            readers = self._agreement.readers(number)
            follower.pipe.send({"layers": list(layers), "digest": [] if readers is None else list(readers.processes)})

    @property
    def readers(self) -> Readers | None:
        """Of this process, see `Known`. Once layers are divided."""
        return self._agreement.readers(0)

    def places(self) -> str:
        """What each process has, and on what. Raises EngineLost."""
        return places_of(self.accounts(), self.stages, self._size)

    def kv_layers(self, number: int) -> int:
        """Layers of KV of all processes that have the same memory as that one. Raises EngineLost."""
        sizes = [stage.layers[1] - stage.layers[0] for stage in self.stages for _ in range(self._size)]
        return layers_beside(self.accounts(), sizes, number)

    def check(self) -> None:
        """Raises EngineLost when one of them has been lost, or what it has refused."""
        if self._lost is not None or self._first is not None:
            raise self._reason()

    def watched(self, progress: Progress | None) -> Progress:
        """While this process loads: it ends, too, when another is lost."""

        def goes_on(done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(done, total)

        return goes_on

    @property
    def shares_memory(self) -> bool:
        """Whether all are on one host. Known once they have loaded."""
        return all(follower.shares_memory for follower in self._followers)

    @property
    def why_kv_stays(self) -> str:
        """Why it never goes to the host's memory, nor from there to a store; empty: it does. Known once they loaded."""
        if not self.shares_memory:
            return "the processes of the model are on several nodes"
        return unlike_kv((getattr(torch, each.dtype), each.on_device) for each in self._accounts)

    def arithmetic(self, own: str) -> str:
        """Of all processes, of which this one has its own; of stages that are not alike, with the layers of each."""
        kinds = [own, *self.kinds]
        if isinstance(self._exchange, CollectiveExchange):
            by_gloo = ["" if account.on_device else "-gloo" for account in self._accounts]
            kinds = [f"{kind}{how}" for kind, how in zip(kinds, by_gloo, strict=True)]
        return arithmetic_of(kinds, self.stages, self._size)

    def digests(self) -> list[Sequence[bytes]]:
        """Of the same files, from others that read them, when all have loaded and met. Raises EngineLost."""
        self.accounts()
        self._found = [[bytes.fromhex(digest) for digest in answer["digests"]] for answer in self._answers()]
        for number, follower in enumerate(self._followers, 1):
            follower.pipe.send({"kv_layers": self.kv_layers(number), "stays": bool(self.why_kv_stays)})
        if self._meeting is not None:
            assert isinstance(self._exchange, CollectiveExchange)
            self._exchange.join(self._met(self._meeting))
        answers = self._answers()
        self.rooms = [answer["blocks"] for answer in answers]
        self.kinds = [answer["arithmetic"] for answer in answers]
        return self._agreement.own(self._found)

    def agree(self, contents: Mapping[str, bytes]) -> None:
        """contents: digests of all tensors of this process's files. Raises CheckpointError where a host has others."""
        for number, row in self._agreement.check(contents, self._found).items():
            self._followers[number - 1].pipe.send({"remember": row})

    def least(self, blocks: int, why: str) -> tuple[int, str]:
        """Blocks of KV that there are where this process has room for so many: every process has a part of each."""
        least = min(self.rooms, default=blocks)
        if blocks <= least:
            return blocks, why
        name = self._followers[self.rooms.index(least)].name
        return least, f"{least} blocks: {name} has room for no more; here {why}"

    def block_bytes(self, ops: Ops) -> int:
        """Of KV of a block, in all processes together."""
        return sum(self._block_bytes(ops))

    def allocate(self, blocks: int, host_blocks: int, ops: Ops, fingerprint: str, tokens: int) -> None:
        """Room for KV in every other process, which takes calls from then on. Raises EngineLost.

        host_blocks  of the host's memory, for what comes and goes
        fingerprint  of the model: by it they keep what they have repacked
        tokens       of the longest sequence
        """
        if host_blocks:
            for file, nbytes in zip(self._host_files, self._block_bytes(ops)[1:], strict=True):
                os.ftruncate(file, host_blocks * nbytes)
                self.hosts.append(SharedHost(file))
        self._close_files()
        padded = blocks + (self.device is not None)  # graphs have one for their padding
        self.tell({"blocks": padded, "host_blocks": host_blocks, "fingerprint": fingerprint, "tokens": tokens})
        self._answers()

    def tell(self, fields: dict[str, Any]) -> None:
        """All of them. Raises as `check` does."""
        self.check()
        for follower in self._followers:
            follower.pipe.send(fields)

    def call(self, method: str, argument: StepBatch | torch.Tensor, version: int = 0) -> None:
        """They begin, with weights of that version. Raises EngineLost."""
        self._send(self._followers, method, argument, version)

    def call_last(self, method: str, argument: torch.Tensor, version: int = 0) -> None:
        """The last stage begins, whose answer is one more of `answer`. Raises EngineLost."""
        self._send(self._followers[-self._size :], method, argument, version)

    def copy(self, plan: StepPlan) -> None:
        """They copy what the plan says between KV and the host, after what they were told before. Raises EngineLost."""
        self.copies.asked += 1
        message = calls.copies_message(self.copies.asked, plan)
        for follower in self._followers:
            follower.pipe.send(*message)

    def hand_on(self, stream: Stream) -> None:
        """To the second stage, what the first has made of the last call. Raises EngineLost."""
        self._handing_on.send(*calls.stream_message(stream))

    def answer(self) -> torch.Tensor:
        """Of the last stage, to the next of the calls that have none yet.

        Raises EngineLost when a process has ended, or says or computes nothing for ANSWER_S while this one waits.
        """
        last = self._followers[-self._size]
        patience = Patience(self._followers, lambda: ANSWER_S)
        while True:
            try:
                return last.inbox.receive(BEAT_S)[1]["found"]
            except queue.Empty:
                self._look(patience)
            except EOFError:
                raise self._fault() from None

    def prepare(self, version: int, file: Path) -> None:
        """Weights of that version in every other process, beside those before it: all of them, or none.

        Raises what one has raised that could not, EngineLost if one has gone.
        """
        try:
            self._updates.prepare(version, file)
        except EOFError:
            raise self._fault() from None

    def forget(self, version: int) -> None:
        """Weights of that version: no step is computed with them any more. Raises EngineLost."""
        self._updates.forget(version)

    def end(self, error: Exception) -> Exception:
        """Of all, as no step comes to an end any more. What was at fault: a process that is lost, or else `error`."""
        if self._lost is None and isinstance(error, RankLost | EngineLost):
            self._gone.wait(_SAID_S)
        fault = self._fault() if self._lost is not None or self._gone.is_set() else error
        self._lost = self._lost or (fault if isinstance(fault, EngineLost) else EngineLost(str(fault)))
        self.lose()
        return fault

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Meanwhile a step waits for them: one that says or computes nothing is lost after ANSWER_S.

        Where ranks share memory their exchange finds that out by itself.
        """
        if isinstance(self._exchange, ShmCollectives):
            yield
            return
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def lose(self) -> None:
        """No step comes to an end any more."""
        for follower in self._followers:
            follower.kill()
        self._give_up()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watch.close()
            self._give_up()
            for follower in self._followers:
                follower.close()
            self._close_files()
            if self._after is not None:
                self._handing_on.close_writing()

    def _met(self, meeting: Meeting) -> Collectives:
        """The first stage's ranks. Raises EngineLost where one does not come."""
        host = None if meeting.address is None else meeting.address[0]
        device = self.device or torch.device("cpu")
        try:
            return while_others_live(
                partial(join, meeting.store, meeting.name, 0, 0, self._size, device, host), self.check, BEAT_S
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise EngineLost(f"the ranks have not met: {self.end(RankLost(str(error)))}") from error

    def _send(
        self, followers: Sequence[Member], method: str, argument: StepBatch | torch.Tensor, version: int = 0
    ) -> None:
        message = calls.message(method, argument, version)
        for follower in followers:
            follower.pipe.send(*message)

    def _answers(self) -> list[dict[str, Any]]:
        """One of each. Raises EngineLost, and InvalidRequest or CheckpointError where one has refused."""
        try:
            return [follower.receive() for follower in self._followers]
        except EOFError:
            raise self._reason() from None

    def _reason(self) -> MotleyError:
        fault = self._fault()  # by then all is heard that the first to end had to say
        refused = None if self._first is None else self._first.refused
        return refused or fault

    def _fault(self) -> EngineLost:
        """Why nothing comes any more."""
        if self._lost is not None:
            return self._lost
        return EngineLost("a process of the model has ended" if self._first is None else self._first.epitaph())

    def _look(self, patience: Patience) -> None:
        try:
            patience.look()
        except EngineLost as error:
            self._lost = self._lost or error
            raise

    def _silent(self, error: EngineLost) -> None:
        self._lost = self._lost or error
        self._gone.set()
        log.error("%s", error)
        self.lose()

    def _ended(self, member: Member) -> None:
        """From any thread."""
        self._first = self._first or member
        self._gone.set()
        self._give_up()

    def _give_up(self) -> None:
        """One of them is lost: nobody waits for it any longer. From any thread."""
        self.copies.lose()
        for follower in self._followers:
            follower.says_no_more()
        if self._exchange is not None:
            self._exchange.abort()

    def _block_bytes(self, ops: Ops) -> list[int]:
        return [sum(part.nbytes for part in share.block(ops, self._config.head_dim)) for share in self.shares]

    def _close_files(self) -> None:
        while self._host_files:
            os.close(self._host_files.pop())


def _opened(given: ExitStack, descriptor: int | None) -> int | None:
    """Closed at the end of `given`."""
    if descriptor is not None:
        given.callback(os.close, descriptor)
    return descriptor
