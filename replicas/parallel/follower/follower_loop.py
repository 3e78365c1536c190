"""A process other than the first, which computes what the first process sends.

Messages and answers go by pipes, and each question is answered when it is done. The first process sends in turn: which
model it is, for which this process reports what that costs on its own device; which layers to load; when to meet the
other ranks; how many KV blocks to allocate; and then calls of the decoder. Ranks of the first stage send no results. A
later stage receives hidden states from the stage before it by a pipe of its own, and the last stage sends results to
the first process.

Each process sends heartbeats all the time, and the reason if it ends. Between calls it may be sent other weights to be
prepared, which it answers, or to be dropped; and copies of KV to or from the host, which it reports when they are done.
Ranks of a single stage on GPUs follow the first rank's calls and graphs by `run_gpu_calls`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ....kernels.cpu.c_kernels.shm_collectives import ShmCollectives
from ....kernels.ops import Ops
from ...capacity import kv_sizing
from ...checkpoint.cache.weights_cache import open_weights_cache
from ...engine_config import EngineConfig
from ...errors import CheckpointError, EngineLost, InvalidRequest
from ...execution.copier import Copier, CpuCopier
from ...execution.swapper import Swapper
from ...gpu.accelerator import Accelerator, open_accelerator
from ...loading.cached_digests import CachedDigests, find_cached_digests
from ...loading.digest_assignment import DigestReaders
from ...model.checkpoint_inspection import inspect_checkpoint
from ...model.layers import allocate_kv
from ...model.sharding.ranks import Ranks
from ...model.sharding.split import shard_for_rank
from ...model.sharding.stages import PipelineStage, pipeline_stages
from ...updates.device_update import DeviceUpdater
from ..calls import decoder_calls
from ..calls.stage_executor import StageExecutor
from ..planning import checkpoint_agreement
from ..planning.device_report import report_local_device
from ..transport.collective import CollectiveExchange
from ..transport.file_identity import local_temp_identity
from ..transport.heartbeats import HeartbeatSender
from ..transport.pipe import MessageInbox, MessagePipe
from ..transport.remote_errors import encode_error
from ..transport.rendezvous import join_group, open_rendezvous_store
from ..transport.shared_host_kv import SharedHostMemory
from .gpu_follower import run_gpu_calls
from .weight_receiver import WeightFileReceiver
from .weight_versions import WeightVersions

log = logging.getLogger(__name__)

AnyExchange = ShmCollectives | CollectiveExchange
# Shortest standstill that is reported on a GPU: in a first call kernels are compiled by other processes meanwhile.
COMPILES_S = 30.0

Copy = Callable[[dict[str, Any]], None]
Between = Callable[[dict[str, Any]], bool]  # handles a message that is no call and returns True; False for a call


def serve_follower(pipe: MessagePipe, ends: Mapping[str, int], heartbeats: HeartbeatSender) -> None:
    """Compute what the first process sends, until it closes its end. Raises whatever a step raises, after sending the
    reason.

    ends  file descriptors by name: `memory` for the ranks' exchange, or `meeting` for the file where they meet;
          `before` and `after` to receive from the stage before and to send to the one after, if any; and `host`, a file
          for the host's KV
    """
    start, _ = pipe.receive()
    exchange: AnyExchange | None = None
    if start["meets"] is not None:
        exchange = CollectiveExchange()
    elif "memory" in ends:
        exchange = ShmCollectives(ends["memory"], start["rank"], start["size"])
        os.close(ends["memory"])
    elif start["size"] > 1:
        raise RuntimeError(f"{start['name']} shares no memory with the other ranks: it has to be on their node")
    arrivals = WeightFileReceiver(pipe)
    try:
        _run_calls(pipe, start, ends, exchange, heartbeats, arrivals)
    except EOFError:
        log.info("%s ends with the process that started it", start["name"])
    except Exception as error:
        with suppress(EngineLost, OSError):
            refused = {"refused": encode_error(error), "where": f"{start['folder']} on {socket.gethostname()}"}
            is_refusal = isinstance(error, (CheckpointError, InvalidRequest))
            pipe.send({"why": f"{type(error).__name__}: {error}", **(refused if is_refusal else {})})
        raise
    finally:
        arrivals.close()
        if exchange is not None:
            exchange.abort()


def _run_calls(
    pipe: MessagePipe, start: dict[str, Any], ends: Mapping[str, int], exchange: AnyExchange | None,
    heartbeats: HeartbeatSender, arrivals: WeightFileReceiver,
) -> None:  # fmt: skip
    from ...loading.model_loader import load_model
    from ...loading.operator_choice import choose_meta_operators, choose_operators

    size, folder = start["size"], Path(start["folder"])
    config = EngineConfig(**start["config"])
    torch.set_num_threads(config.threads or 1)
    checkpoint = inspect_checkpoint(folder)
    ops, _ = choose_operators(config, checkpoint.config.dtype)
    accelerator = open_accelerator(ops.device)
    make_meta_ops = partial(choose_meta_operators, config, checkpoint.config.dtype, ops)
    account = report_local_device(
        checkpoint, config, ops, make_meta_ops, on_device=accelerator is not None, chosen=start["chosen"]
    )
    cache = open_weights_cache(config.weights_cache)
    cached_digests = find_cached_digests(checkpoint, cache)
    model = checkpoint_agreement.encode_digests(checkpoint, cached_digests, start)
    heartbeats.says("waits to be told its layers")
    pipe.send({"account": asdict(account), "model": model, "temporary": local_temp_identity()})
    assignment, _ = pipe.receive()
    layers, together, number = assignment["layers"], tuple(assignment["digest"]), start["stage"] * size + start["rank"]
    readers = DigestReaders(tuple(layers), size, together, number) if together else None
    ranks = None
    if exchange is not None:
        parts = [shard_for_rank(checkpoint.config, checkpoint.format, each, size) for each in range(size)]
        ranks = Ranks(parts, start["rank"], exchange)
    stage = pipeline_stages(checkpoint.config.num_layers, layers)[start["stage"]]
    of_all = CachedDigests(
        fingerprint=start["fingerprint"] or ("" if readers else cached_digests.fingerprint), readers=readers
    )
    heartbeats.says("loads weights")
    loaded = load_model(
        folder,
        ops,
        progress=heartbeats.report_bytes,
        ranks=ranks,
        stage=stage,
        cache=cache,
        cached_digests=of_all,
        copier=accelerator,
    )
    heartbeats.says("waits for the others to load")
    torch.set_num_threads(ops.torch_threads)
    pipe.send({"digests": [digest.hex() for digest in loaded.digests]})
    of_kv, _ = pipe.receive()
    if isinstance(exchange, CollectiveExchange):
        with heartbeats.during("meets the other ranks"):
            _join_exchange(exchange, start, ends, ops)
    # shares: whether there is a prefix store is known to the first process alone, so that one is assumed.
    blocks, _ = kv_sizing.count_kv_blocks(config, loaded, ops, shares=True, **of_kv)
    pipe.send({"blocks": blocks, "arithmetic": ops.arithmetic})
    allocation, _ = pipe.receive()
    if "remember" in allocation:
        checkpoint_agreement.cache_shared_digests(cache, checkpoint, cached_digests, allocation["remember"])
        allocation, _ = pipe.receive()
    heartbeats.says("makes room for KV")
    kv = allocate_kv(ops, loaded.decoder.local.layers, allocation["blocks"])
    cells = [part for cache in kv for part in ops.kv_parts(cache)]
    copy = _copier(pipe, cells, accelerator or CpuCopier(), ends.get("host"), allocation["host_blocks"])
    if accelerator is not None:
        loaded.decoder.rotary.reserve(allocation["tokens"])  # graphs contain the table's address, which must not change
    heartbeats.says("serves")
    pipe.send(allocation)
    if loaded.keep is not None:
        loaded.keep(allocation["fingerprint"])
        loaded = replace(loaded, keep=None)  # it refers to the weights that it has written
    if accelerator is None:
        versions = WeightVersions(loaded, ranks)
    else:
        versions = WeightVersions(
            loaded, ranks, DeviceUpdater(accelerator, kv_sizing.largest_step_bytes(config, loaded)).updated_model
        )
    del loaded  # this reference would keep the weights in memory when their version is dropped
    between = _handle_control_message(pipe, versions, copy, arrivals)
    shares_steps = stage.count == 1 and start["meets"] is None  # then the ranks' exchange detects a rank that hangs
    if not shares_steps:
        heartbeats.watch_current_thread(0.0 if accelerator is None else COMPILES_S)
    if accelerator is not None and stage.count == 1:
        assert isinstance(exchange, CollectiveExchange), "ranks on GPUs meet"
        run_gpu_calls(pipe, versions, kv, exchange, accelerator, between)
    if stage.count > 1:
        _run_stage(pipe, start, ends, versions, stage, kv, between, accelerator)
    assert ranks is not None, "a stage alone has ranks"
    # Where files of weights may be sent, a thread always reads, so that the sender need not wait for a step.
    _run_rank(pipe if shares_steps else MessageInbox(pipe, "calls"), versions, kv, between)


def _join_exchange(exchange: CollectiveExchange, start: dict[str, Any], ends: Mapping[str, int], ops: Ops) -> None:
    address = start["meets"].get("address")
    store = open_rendezvous_store(ends.get("meeting"), None if address is None else (address[0], address[1]))
    host = None if address is None else address[0]
    exchange.join(
        join_group(store, start["meets"]["name"], start["stage"], start["rank"], start["size"], ops.device, host)
    )


def _copier(
    pipe: MessagePipe, parts: Sequence[torch.Tensor], copier: Copier, file: int | None, host_blocks: int
) -> Copy:
    """Return a function that makes copies between KV and the host, and reports them.

    file  descriptor of the file for the host's blocks, which is closed here; None if there is none
    """
    assert file is not None or not host_blocks, "there is memory to be shared"
    swapper = None
    if file is not None and host_blocks:
        host = SharedHostMemory(file)
        copier.pin(host.memory)
        swapper = Swapper(parts, copier, host_blocks, host.staging)
    if file is not None:
        os.close(file)

    def copy(fields: dict[str, Any]) -> None:
        assert swapper is not None, "there are blocks of the host"
        swapper.swap(decoder_calls.read_copies(fields))
        swapper.mark().wait()  # the next call may read the blocks copied in, and overwrite those copied out
        swapper.forget()
        pipe.send({"copied": fields["copies"]})

    return copy


def _handle_control_message(
    pipe: MessagePipe, versions: WeightVersions, copy: Copy, arrivals: WeightFileReceiver
) -> Between:
    def handle_message(fields: dict[str, Any]) -> bool:
        if "copies" in fields:
            copy(fields)
        elif "prepare" in fields:  # by another thread, so that steps go on
            threading.Thread(target=_prepare, args=(pipe, versions, fields), name="weights", daemon=True).start()
        elif "forget" in fields:
            versions.forget(fields["forget"])
            arrivals.sweep(fields["settled"], versions.files())
        else:
            return False
        return True

    return handle_message


def _run_rank(
    orders: MessagePipe | MessageInbox, versions: WeightVersions, kv: list[torch.Tensor], between: Between
) -> NoReturn:
    """Make calls in their order, each with the version of the weights that it names, until the pipe ends."""
    while True:
        fields, tensors = orders.receive()
        if not between(fields):
            decoder_calls.execute_call(versions.decoder(fields["weights"]), kv, fields, tensors)


def _run_stage(
    pipe: MessagePipe, start: dict[str, Any], ends: Mapping[str, int], versions: WeightVersions, stage: PipelineStage,
    kv: list[torch.Tensor], between: Between, accelerator: Accelerator | None,
) -> NoReturn:  # fmt: skip
    """Make calls in their order, each with the version of the weights that it names and with what the stage before has
    computed of it, until the pipe ends.
    """
    before = MessageInbox(MessagePipe(reads=ends["before"]), "stage before") if "before" in ends else None
    hand_on = _hand_on(pipe, start, ends, stage)
    make: Callable[..., decoder_calls.CallResult] = decoder_calls.execute_call
    if accelerator is not None:
        make = StageExecutor(accelerator, wanted=not (stage.is_last and start["rank"])).make
    orders = MessageInbox(pipe, "calls")
    while True:
        fields, tensors = orders.receive()
        if between(fields):
            continue
        whole = before is None or "hidden" in tensors  # then the first process has sent all of the input
        stream = None if whole or before is None else decoder_calls.read_stream(before.receive())
        hand_on(make(versions.decoder(fields["weights"]), kv, fields, tensors, stream))


def _hand_on(
    pipe: MessagePipe, start: dict[str, Any], ends: Mapping[str, int], stage: PipelineStage
) -> Callable[[Any], None]:
    """Return the function that sends on what a call has computed: to the next stage, or from one rank of the last stage
    to the first process.
    """
    if not stage.is_last:
        after = MessagePipe(writes=ends["after"])
        return lambda stream: after.send(*decoder_calls.stream_message(stream))
    if start["rank"]:
        return lambda found: None
    return lambda found: pipe.send({}, {"found": found.contiguous()})


def _prepare(pipe: MessagePipe, versions: WeightVersions, fields: dict[str, Any]) -> None:
    """Prepare new weights and report whether that worked. The weights that steps are computed with stay as they are in
    either case.
    """
    try:
        versions.prepare(fields["prepare"], Path(fields["file"]))
        pipe.send({"prepared": fields["prepare"]})
    except Exception as error:
        log.exception("weights of version %d could not be prepared", fields["prepare"])
        pipe.send({"failed": encode_error(error)})
