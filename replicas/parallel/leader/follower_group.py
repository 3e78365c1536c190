"""The processes of one engine: the first rank of the first stage is this process, and it starts the others."""

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

from ....kernels.batch import StepBatch
from ....kernels.cpu.c_kernels.shm_collectives import RankLost, ShmCollectives, open_shared_memory
from ....kernels.ops import Ops
from ...engine_config import EngineConfig
from ...errors import EngineLost, MotleyError
from ...execution.step_plan import StepPlan
from ...loading.cached_digests import CachedDigests
from ...loading.digest_assignment import DigestReaders
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import HiddenStream
from ...model.sharding.ranks import Ranks
from ...model.sharding.split import shard_for_rank
from ...model.sharding.stages import PipelineStage, check_stages, pipeline_stages
from ..calls import decoder_calls
from ..planning.checkpoint_agreement import CheckpointAgreement
from ..planning.describe import describe_arithmetic, describe_devices, process_name
from ..planning.device_report import DeviceReport, layers_sharing_memory
from ..planning.layer_assignment import check_ranks_alike, layers_are_automatic
from ..transport.collective import CollectiveBackend, CollectiveExchange
from ..transport.heartbeats import HEARTBEAT_S, HeartbeatChecker, HeartbeatMonitor
from ..transport.pipe import MessagePipe
from ..transport.rendezvous import Rendezvous, join_group, run_while_peers_live
from ..transport.shared_host_kv import KvShare, SharedHostMemory, kv_layout_mismatch, kv_shares
from .copy_tracker import CopyTracker
from .follower_handle import FollowerHandle
from .launcher import FollowerLauncher, SubprocessLauncher
from .weight_sender import FollowerUpdates

__all__ = ["FollowerGroup"]

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done bytes, total bytes

REPLY_TIMEOUT_S = 5.0  # most seconds without a heartbeat, or without computing, while a step waits for others
SILENCE_TIMEOUT_S = (
    30.0  # the same at any other time: while a process imports libraries from a slow disk it sends nothing
)
_EXIT_NOTICE_TIMEOUT_S = 1.0  # most seconds from a failed exchange to the notice which process has ended, if one has


class FollowerGroup:
    """All processes of a divided model, as the first process starts, calls and watches them.

    The others report on their devices when they start, and load once layers are divided. One that sends no heartbeat,
    or serves and computes nothing by its own report, for SILENCE_TIMEOUT_S seconds, or REPLY_TIMEOUT_S while a step
    waits, is lost. All processes then end, and waits raise EngineLost with its name and its last activity.

    config          configuration of the first process
    devices         devices of all processes
    account         this process's report on its device
    launcher        starts the other processes; None for subprocesses
    cached_digests  what is cached of this process's files before any is read
    device          device that has this process's work; None on a CPU

    ranks         ranks of the first stage; None if layers are not divided among ranks
    stages        all stages in order, after `divide`
    shares        share of a KV block of each process, stage by stage, after `divide`
    hosts         host memory for KV of each of the other processes, after `allocate`, where there is any
    copies        progress of the copies between KV and the host in the other processes
    block_counts  KV blocks that each of the other processes has memory for, after `digests`
    kinds         arithmetic of each of the other processes' operators, after `digests`

    Raises InvalidRequest where the model cannot be divided so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        devices: Sequence[str],
        account: DeviceReport,
        launcher: FollowerLauncher | None = None,
        *,
        cached_digests: CachedDigests | None = None,
        device: torch.device | None = None,
    ) -> None:
        launcher = launcher or SubprocessLauncher()
        size, count, self.device = config.tensor_parallel, config.pipeline_parallel, device
        check_stages(checkpoint.config.num_layers, count, config.pipeline_layers)
        parts = (
            [shard_for_rank(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)]
            if size > 1
            else []
        )
        self.stages: Sequence[PipelineStage] = ()
        self.shares: Sequence[KvShare] = ()
        self.why = ""
        self.hosts: list[SharedHostMemory] = []
        self.copies = CopyTracker(size * count - 1)
        self.block_counts: list[int] = []
        self.kinds: list[str] = []
        self._config, self._parts = checkpoint.config, parts
        self._size, self._count = size, count
        self._accounts = [account]  # this process's; those of all once the others have sent theirs
        self._found: list[Sequence[bytes]] = []  # digests that the other processes have found
        self._host_files: list[int] = []  # descriptors for the other processes' host memory, until `allocate`
        self.ranks: Ranks | None = None
        self._exchange: ShmCollectives | CollectiveExchange | None = None
        self._after: int | None = None  # descriptor by which the first stage writes to the second
        self._followers: list[FollowerHandle] = []
        self._lost: EngineLost | None = None  # the first error that says which process is lost
        self._first: FollowerHandle | None = None  # the first process that has ended
        self._gone = threading.Event()  # set when it is known which process is lost
        self._closed = False
        self._waiting = 0
        far = launcher.host()
        self._agreement = CheckpointAgreement(
            checkpoint, cached_digests or CachedDigests(), count, size, near=far is None
        )
        on_gpus = device is not None or any(each != "cpu" for each in devices)
        self._meeting = Rendezvous(far) if size > 1 and (on_gpus or far is not None) else None
        start: dict[str, Any] = {"folder": str(checkpoint.folder), "size": size, **self._agreement.leader_digests}
        start["chosen"] = layers_are_automatic(config)
        start["meets"] = (
            None
            if self._meeting is None
            else {
                "address": self._meeting.address,
                "name": self._meeting.name,
            }
        )
        try:
            with ExitStack() as given:  # closes this process's copies of descriptors that were passed to others
                shared = size > 1 and self._meeting is None
                memories = [_open_descriptor(given, open_shared_memory(size)) if shared else None for _ in range(count)]
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
                        _open_descriptor(given, reads)
                        if (stage, rank) == (0, 0):
                            self._after = writes
                            continue
                        _open_descriptor(given, writes)
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
                        who = {"stage": stage, "rank": rank, "name": process_name(count, stage, size, rank)}
                        follower = FollowerHandle(
                            number,
                            start | who | {"config": asdict(own)},
                            {name: end for name, end in ends.items() if end is not None},
                            launcher,
                            self._ended,
                            partial(self.copies.made, number - 1),
                        )
                        self._followers.append(follower)
                    before = [reads for reads, _ in links]
        except BaseException:
            self.lose()
            for follower in self._followers:
                follower.close()
            self._close_files()
            if self._after is not None:
                os.close(self._after)
            raise
        self._handing_on = MessagePipe(writes=self._after)
        self._updates = FollowerUpdates(self._followers)
        self._watch = HeartbeatMonitor(
            self._followers, lambda: REPLY_TIMEOUT_S if self._waiting else SILENCE_TIMEOUT_S, self._silent
        )

    def accounts(self) -> Sequence[DeviceReport]:
        """Return the reports of all processes on their devices, stage by stage; waits until all have sent theirs.

        Raises EngineLost, CheckpointError where one has another model, and InvalidRequest where ranks of a stage
        differ.
        """
        if len(self._accounts) == 1:
            replies = self._receive_all()
            self._agreement.hear([reply["model"] for reply in replies])
            self._updates.temporaries = [reply["temporary"] for reply in replies]
            self._accounts += [DeviceReport(**reply["account"]) for reply in replies]
            check_ranks_alike(self._accounts, self._size)
        return self._accounts

    def divide(self, layers: Sequence[int], why: str) -> None:
        """Send every process its layers, upon which it loads. Raises EngineLost and InvalidRequest.

        layers  number of layers of each stage
        why     reason for these numbers
        """
        self.stages, self.why = pipeline_stages(self._config.num_layers, layers), why
        self.shares = kv_shares(self._config, self.stages, self._parts)
        if not self._agreement.near:  # which processes share digests depends on their reports
            self.accounts()
        self.check()
        self._agreement.divide(layers)
        for number, follower in enumerate(self._followers, 1):
            readers = self._agreement.readers(number)
            follower.pipe.send({"layers": list(layers), "digest": [] if readers is None else list(readers.processes)})

    @property
    def readers(self) -> DigestReaders | None:
        """The processes that digest this process's files with it, for `CachedDigests`; set by `divide`."""
        return self._agreement.readers(0)

    def places(self) -> str:
        """Return a sentence that says which layers each process has, and on what device. Raises EngineLost."""
        return describe_devices(self.accounts(), self.stages, self._size)

    def kv_layers(self, number: int) -> int:
        """Return the number of KV layers of all processes that use the same memory as process `number`. Raises
        EngineLost.
        """
        sizes = [stage.layers[1] - stage.layers[0] for stage in self.stages for _ in range(self._size)]
        return layers_sharing_memory(self.accounts(), sizes, number)

    def check(self) -> None:
        """Raise EngineLost when a process has been lost, or the error with which one has refused the model."""
        if self._lost is not None or self._first is not None:
            raise self._reason()

    def watched(self, progress: Progress | None) -> Progress:
        """Return a progress callback for loading that also raises EngineLost when another process is lost."""

        def goes_on(done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(done, total)

        return goes_on

    @property
    def shares_memory(self) -> bool:
        """Whether all processes are on one host; known once they have loaded."""
        return all(follower.shares_memory for follower in self._followers)

    @property
    def host_kv_refusal(self) -> str:
        """The reason why KV is never copied to the host's memory, nor from there to a store; empty if it is. Known once
        all processes have loaded.
        """
        if not self.shares_memory:
            return "the processes of the model are on several nodes"
        return kv_layout_mismatch((getattr(torch, each.dtype), each.on_device) for each in self._accounts)

    def arithmetic(self, own: str) -> str:
        """Return the name of the arithmetic of all processes; where stages differ, each stage's with its number of
        layers.

        own  arithmetic of this process's operators
        """
        kinds = [own, *self.kinds]
        if isinstance(self._exchange, CollectiveExchange):
            by_gloo = ["" if account.on_device else "-gloo" for account in self._accounts]
            kinds = [f"{kind}{how}" for kind, how in zip(kinds, by_gloo, strict=True)]
        return describe_arithmetic(kinds, self.stages, self._size)

    def digests(self) -> list[Sequence[bytes]]:
        """Return the digests that other processes have found of this process's files, once all have loaded and met.

        Raises EngineLost.
        """
        self.accounts()
        self._found = [[bytes.fromhex(digest) for digest in reply["digests"]] for reply in self._receive_all()]
        for number, follower in enumerate(self._followers, 1):
            follower.pipe.send({"kv_layers": self.kv_layers(number), "stays": bool(self.host_kv_refusal)})
        if self._meeting is not None:
            assert isinstance(self._exchange, CollectiveExchange)
            self._exchange.join(self._met(self._meeting))
        replies = self._receive_all()
        self.block_counts = [reply["blocks"] for reply in replies]
        self.kinds = [reply["arithmetic"] for reply in replies]
        return self._agreement.own(self._found)

    def agree(self, weight_digests: Mapping[str, bytes]) -> None:
        """Compare the contents of every host's files with `weight_digests`: the digests of all tensors of this
        process's files.

        Raises CheckpointError where a host has other contents.
        """
        for number, row in self._agreement.check(weight_digests, self._found).items():
            self._followers[number - 1].pipe.send({"remember": row})

    def limit_blocks(self, blocks: int, why: str) -> tuple[int, str]:
        """Return the number of KV blocks of the model, and the reason in words.

        Every process has a part of each block, so that the number is `blocks`, which this process has memory for, or
        less where another process has memory for fewer.
        """
        limit_blocks = min(self.block_counts, default=blocks)
        if blocks <= limit_blocks:
            return blocks, why
        name = self._followers[self.block_counts.index(limit_blocks)].name
        return limit_blocks, f"{limit_blocks} blocks: {name} has room for no more; here {why}"

    def block_bytes(self, ops: Ops) -> int:
        """Bytes of a KV block, in all processes together."""
        return sum(self._block_bytes(ops))

    def allocate(self, blocks: int, host_blocks: int, ops: Ops, fingerprint: str, tokens: int) -> None:
        """Let every other process allocate its KV; it takes calls from then on. Raises EngineLost.

        host_blocks  blocks of the host's memory, for copies of KV
        fingerprint  fingerprint of the model, under which processes cache the weights that they have repacked
        tokens       most tokens of a sequence
        """
        if host_blocks:
            for file, nbytes in zip(self._host_files, self._block_bytes(ops)[1:], strict=True):
                os.ftruncate(file, host_blocks * nbytes)
                self.hosts.append(SharedHostMemory(file))
        self._close_files()
        padded = blocks + (self.device is not None)  # CUDA graphs use one more block for their padding
        self.broadcast({"blocks": padded, "host_blocks": host_blocks, "fingerprint": fingerprint, "tokens": tokens})
        self._receive_all()

    def broadcast(self, fields: dict[str, Any]) -> None:
        """Send a message to every other process of the model. Raises what `check` raises."""
        self.check()
        for follower in self._followers:
            follower.pipe.send(fields)

    def call(self, method: str, argument: StepBatch | torch.Tensor, version: int = 0) -> None:
        """Let every other process begin a call with weights of `version`. Raises EngineLost."""
        self._send(self._followers, method, argument, version)

    def call_last(self, method: str, argument: torch.Tensor, version: int = 0) -> None:
        """Let the last stage begin a call, whose result `answer` then returns in turn. Raises EngineLost."""
        self._send(self._followers[-self._size :], method, argument, version)

    def copy(self, plan: StepPlan) -> None:
        """Let every other process make the plan's copies between KV and the host, after what it was sent before. Raises
        EngineLost.
        """
        self.copies.num_requested += 1
        message = decoder_calls.copies_message(self.copies.num_requested, plan)
        for follower in self._followers:
            follower.pipe.send(*message)

    def hand_on(self, stream: HiddenStream) -> None:
        """Send to the second stage what the first has computed of the last call. Raises EngineLost."""
        self._handing_on.send(*decoder_calls.stream_message(stream))

    def receive_result(self) -> torch.Tensor:
        """Return the last stage's result of the oldest call that has none yet.

        Raises EngineLost when a process has ended, or sends or computes nothing for REPLY_TIMEOUT_S seconds meanwhile.
        """
        last = self._followers[-self._size]
        checker = HeartbeatChecker(self._followers, lambda: REPLY_TIMEOUT_S)
        while True:
            try:
                return last.inbox.receive(HEARTBEAT_S)[1]["found"]
            except queue.Empty:
                self._poll(checker)
            except EOFError:
                raise self._fault() from None

    def prepare(self, version: int, file: Path) -> None:
        """Let every other process prepare weights of `version` from a file, beside those before it: afterwards all have
        it, or none.

        Raises the error of a process that could not, and EngineLost if one has gone.
        """
        try:
            self._updates.prepare(version, file)
        except EOFError:
            raise self._fault() from None

    def forget(self, version: int) -> None:
        """Let every other process drop the weights of `version`, with which no step is computed any more. Raises
        EngineLost.
        """
        self._updates.forget(version)

    def end(self, error: Exception) -> Exception:
        """End all processes, since no step can end any more, and return the cause: a process that is lost, or else
        `error`.
        """
        if self._lost is None and isinstance(error, RankLost | EngineLost):
            self._gone.wait(_EXIT_NOTICE_TIMEOUT_S)
        fault = self._fault() if self._lost is not None or self._gone.is_set() else error
        self._lost = self._lost or (fault if isinstance(fault, EngineLost) else EngineLost(str(fault)))
        self.lose()
        return fault

    @contextmanager
    def waiting_for_followers(self) -> Iterator[None]:
        """Context manager for a step that waits for the other processes: inside it one that sends or computes nothing
        is lost after REPLY_TIMEOUT_S seconds.

        Where ranks share memory it does nothing, since their exchange detects that by itself.
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
        """Kill all other processes of the model: no step can end any more."""
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

    def _met(self, meeting: Rendezvous) -> CollectiveBackend:
        """Return the process group of the first stage's ranks. Raises EngineLost where one does not come."""
        host = None if meeting.address is None else meeting.address[0]
        device = self.device or torch.device("cpu")
        try:
            return run_while_peers_live(
                partial(join_group, meeting.store, meeting.name, 0, 0, self._size, device, host),
                self.check,
                HEARTBEAT_S,
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise EngineLost(f"the ranks could not join a process group: {self.end(RankLost(str(error)))}") from error

    def _send(
        self, followers: Sequence[FollowerHandle], method: str, argument: StepBatch | torch.Tensor, version: int = 0
    ) -> None:
        message = decoder_calls.call_message(method, argument, version)
        for follower in followers:
            follower.pipe.send(*message)

    def _receive_all(self) -> list[dict[str, Any]]:
        """Return the next message of each process. Raises EngineLost, and InvalidRequest or CheckpointError where one
        has refused.
        """
        try:
            return [follower.receive() for follower in self._followers]
        except EOFError:
            raise self._reason() from None

    def _reason(self) -> MotleyError:
        fault = self._fault()  # afterwards all messages of the process that ended first have been read
        refused = None if self._first is None else self._first.refused
        return refused or fault

    def _fault(self) -> EngineLost:
        """Return the error that says why no more messages come from a model's processes."""
        if self._lost is not None:
            return self._lost
        return EngineLost("a process of the model has ended" if self._first is None else self._first.exit_reason())

    def _poll(self, checker: HeartbeatChecker) -> None:
        try:
            checker.poll()
        except EngineLost as error:
            self._lost = self._lost or error
            raise

    def _silent(self, error: EngineLost) -> None:
        self._lost = self._lost or error
        self._gone.set()
        log.error("%s", error)
        self.lose()

    def _ended(self, follower: FollowerHandle) -> None:
        """Record that a process of the model has ended. May be called from any thread."""
        self._first = self._first or follower
        self._gone.set()
        self._give_up()

    def _give_up(self) -> None:
        """Stop waiting for any process, because one is lost. May be called from any thread."""
        self.copies.lose()
        for follower in self._followers:
            follower.mark_lost()
        if self._exchange is not None:
            self._exchange.abort()

    def _block_bytes(self, ops: Ops) -> list[int]:
        return [sum(part.nbytes for part in share.block(ops, self._config.kv_shape[1])) for share in self.shares]

    def _close_files(self) -> None:
        while self._host_files:
            os.close(self._host_files.pop())


def _open_descriptor(given: ExitStack, descriptor: int | None) -> int | None:
    """Register a file descriptor to be closed at the end of the ExitStack `given`, and return it."""
    if descriptor is not None:
        given.callback(os.close, descriptor)
    return descriptor
