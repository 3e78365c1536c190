"""Builder of an engine from a model's name: choose operators, load weights, size the KV cache, warm up."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....kernels.ops import Ops
from ...capacity import kv_sizing
from ...capacity.device_fit import build_meta_decoder
from ...checkpoint.cache.startup_prefetch import end_prefetch
from ...checkpoint.cache.weights_cache import WeightsCache, open_weights_cache
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.numerics_class import engine_numerics_class
from ...execution.runner import CapturingRunner, ModelRunner, RenewableModel, WarmableRunner
from ...execution.step_plan import PlanItem, StepPlan
from ...gpu.accelerator import Accelerator, open_accelerator
from ...grammar.process.grammar_compiler import GrammarCompiler
from ...host.cpu_cores import usable_cores
from ...kv.blocks import BlockPool
from ...kv.prefix.prefix_stats import PrefixStats
from ...kv.store.fetch_cost import FetchCostModel
from ...kv.store.store_access import PrefixStoreAccess, in_memory_access
from ...loading.cached_digests import CachedDigests, find_cached_digests
from ...loading.model_loader import LoadedModel, load_model
from ...loading.operator_choice import choose_meta_operators, choose_operators
from ...model.checkpoint_inspection import inspect_checkpoint, resolve_model
from ...model.decoder import Decoder
from ...model.families.registry import architecture_name
from ...model.generation_config import end_token_ids
from ...offload.device.device_speed import measure_offloaded_decode
from ...offload.device.device_tier import DeviceTier
from ...offload.device.piecewise_decoder import PiecewiseDecoder
from ...offload.disk.disk_tier import DiskTier
from ...parallel.leader.follower_group import FollowerGroup
from ...parallel.leader.launcher import FollowerLauncher
from ...parallel.leader.process_config import is_parallel, process_config, process_devices
from ...parallel.planning.device_report import report_local_device
from ...parallel.planning.layer_assignment import choose_layers, layers_are_automatic
from ...parallel.transport.shared_host_kv import ParallelHostRecords
from ...sampling_params import SamplingParams
from ...text.tokenizer.tokenizer import Tokenizer
from ...types import ModelInfo, ReplicaProfile, Request
from ...updates.device_update import DeviceUpdater
from ...updates.live_weights import LiveWeights, PreparedVersion
from ..drafting.drafter_registry import find_drafter
from ..engine import EngineCore
from ..kv_reuse.prefix_connector import PrefixConnector
from ..kv_reuse.swap_planner import SwapPlanner
from ..model_limits import ModelLimits
from ..scheduler import Scheduler
from .cached_rates import cached_rates
from .engine_rates import EngineRates, measure_rates
from .prefix_setup import build_prefix_connector, engine_kv_identity, record_geometry
from .runner_builder import build_runner
from .swap_setup import measure_swap_rates

if TYPE_CHECKING:
    from ...gpu.gpu_runner import GpuRunner
    from ...parallel.leader.gpu_pipeline_runner import GpuPipelineRunner

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done bytes, total bytes
UPDATE_WARM_UP_S = (
    2.0  # most seconds that an idle engine captures graphs after new weights; new requests wait meanwhile
)
GRAPH_WARM_UP_S = 60.0  # most seconds that readiness waits for graphs; as many are captured as fit into that time


@dataclass(slots=True)
class BuiltEngine:
    """An engine and what was found out about it while it was built.

    choices   each automatic decision -> its reason
    defaults  sampling defaults of the checkpoint's authors, as arguments of SamplingParams
    rates     returns the engine's rates and, in words, their origin: kept from an earlier start, or computed beforehand
              for a simulated device, whose measured speed is to stay hidden; None: the rates are measured
    access    connection to the store that its prefixes are shared through; None: there is no store
    group     processes that its model is divided among; None: the model is whole
    weights   present weights, which can be replaced by updates
    identity  returns the identity under which a store keeps KV that is computed with the given weights
    """

    core: EngineCore
    runner: ModelRunner | GpuRunner | GpuPipelineRunner
    tokenizer: Tokenizer | None
    profile: ReplicaProfile
    choices: Mapping[str, str]
    defaults: Mapping[str, Any]
    rates: Callable[[EngineCore], tuple[EngineRates, str]] | None = None
    access: PrefixStoreAccess | None = None
    group: FollowerGroup | None = None
    weights: LiveWeights | None = None
    identity: Callable[[LoadedModel], bytes] | None = None

    def adopt(self, prepared: PreparedVersion) -> None:
        """Let requests begin with these weights from now on. Called between two steps. Raises Unavailable: see
        `EngineCore.adopt`.
        """
        assert self.weights is not None
        loaded, version = prepared.loaded, prepared.version
        prefixes = self.core.scheduler.prefixes
        identity = self.identity(loaded) if self.identity is not None and prefixes.pool.total else None
        now = self.runner.model
        renewed = now.renewed(loaded.decoder, version) if isinstance(now, RenewableModel) else loaded.decoder
        self.core.adopt(version, renewed)
        if identity is not None:
            prefixes.identify(identity)
        self.weights.adopt(prepared)
        fingerprint = _fingerprint(loaded, self.profile.numerics, self.profile.model.dtype)
        self.profile = replace(self.profile, fingerprint=fingerprint, shares=prefixes.shares)
        self.core.let_go()
        if "graphs" in self.choices and not self.core.busy:  # it was warmed up before, and no request waits
            assert isinstance(self.runner, WarmableRunner)
            self.runner.warm_up(UPDATE_WARM_UP_S, penalised=SamplingParams(**self.defaults).penalised)

    def prefix_stats(self) -> PrefixStats | None:
        """Return statistics of the prefix store; None if there is none. Safe from any thread."""
        prefixes = self.core.scheduler.prefixes
        return prefixes.stats(self.access.store.stats()) if self.access is not None and prefixes.pool.total else None

    def flush(self, seconds: float) -> None:
        """Write pending KV to the prefix store, and wait for that for `seconds` at most. Called without requests."""
        deadline = time.monotonic() + seconds
        while self.core.scheduler.prefixes.pending and time.monotonic() < deadline:
            self.core.step()
        if self.access is not None:
            self.access.store.flush(deadline)

    def close(self) -> None:
        """Stop processes, threads and connections; the engine takes no step after that."""
        if self.core.grammars is not None:
            self.core.grammars.close()
        self.core.scheduler.prefixes.close()
        if self.access is not None:
            self.access.store.close()
        if isinstance(self.runner, CapturingRunner):
            self.runner.close()
        if self.group is not None:
            self.group.close()
        if self.weights is not None:
            self.weights.close()
            models = [
                model.decoder if isinstance(model, PiecewiseDecoder) else model for model in self.runner.models.values()
            ]
            for model in (self.weights.loaded.decoder, *models):
                if isinstance(model, Decoder) and model.tier is not None:
                    model.tier.close()

    def warm_up(self) -> None:
        """Run every path once, so that the first requests are fast, and measure the rates of the profile."""
        if isinstance(self.runner, WarmableRunner):
            why = self.runner.warm_up(GRAPH_WARM_UP_S, penalised=SamplingParams(**self.defaults).penalised)
            log.info("CUDA graphs of decode steps: %s", why)
            self.choices = {**self.choices, "graphs": why}
        rates = self._rates()
        self.profile = replace(
            self.profile,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_step_s=rates.decode_s[0],
            decode_s=rates.decode_s,
            context_s=rates.context_s,
            max_running=self.core.scheduler.max_running,
            choices=dict(self.choices),
        )
        if self.core.scheduler.swap.pool.total:
            assert self.runner.swapper is not None
            why = measure_swap_rates(self.core.scheduler.swap, self.runner.swapper, 1 / rates.prefill_tokens_per_s)
            log.info("how preempted sequences go on: %s", why)
            self.choices = {**self.choices, "preemption": f"{self.choices['preemption']}; {why}"}
            self.profile = replace(self.profile, choices=dict(self.choices))
        prefixes = self.core.scheduler.prefixes
        if prefixes.pool.total:
            assert self.runner.swapper is not None
            _, in_s = self.runner.swapper.measure()
            prefixes.cost_model = FetchCostModel(1 / rates.prefill_tokens_per_s, in_s)
            self.profile = replace(self.profile, shares=prefixes.shares, fetch_s=prefixes.fetch_s)
        self.core.scheduler.pool.forget_prefixes()

    def _rates(self) -> EngineRates:
        if self.rates is None:
            return measure_rates(self.core, compiles=isinstance(self.runner, WarmableRunner))
        rates, why = self.rates(self.core)
        log.info("rates that are predicted with: %s", why)
        self.choices = {**self.choices, "rates": why}
        return rates

    @torch.inference_mode()
    def logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Return logits fp32 [T, vocabulary] of every position of one sequence, computed in one step. Raises
        InvalidRequest.
        """
        self.core.check(Request("logits", token_ids, SamplingParams(seed=0)))
        with self.core.scheduler.pool.open(()) as allocation:
            if not allocation.grow(len(token_ids)):
                message = f"token_ids: one step over {len(token_ids)} tokens does not fit the KV cache; give fewer"
                raise InvalidRequest(message, param="token_ids")
            item = PlanItem(sequence_id=-1, start=0, token_ids=token_ids, blocks=tuple(allocation.blocks))
            return self.runner.logits(StepPlan((item,), weights=self.core.scheduler.weights))


def build_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    name: str | None = None,
    progress: Progress | None = None,
    ops: Ops | None = None,
    accelerator: Accelerator | None = None,
    access: PrefixStoreAccess | None = None,
    launcher: FollowerLauncher | None = None,
) -> BuiltEngine:
    """Load `model` (a folder or a Hugging Face id) under `config`. Raises CheckpointError, InvalidRequest.

    ops          operators to compute with; None: those of the config's device
    access       connection to a prefix store; None: as the config says
    accelerator  queues work for the operators' device; None: the GPU's own, or none on a CPU
    launcher     starts the other processes of a divided model; None: they are subprocesses
    """
    find_drafter(config.drafter)  # an unknown one is refused before anything is loaded
    path = resolve_model(model)
    divided, devices = is_parallel(config), process_devices(config, launcher)
    config = process_config(config, launcher, given=ops is not None) if divided else config
    torch.set_num_threads(config.threads or usable_cores())
    checkpoint = inspect_checkpoint(path)
    tokenizer = Tokenizer.load(path) if Tokenizer.is_in(path) else None
    ops, why = (
        choose_operators(config, checkpoint.config.dtype) if ops is None else (ops, "that of the operators given")
    )
    accelerator = accelerator or open_accelerator(ops.device)
    make_meta_ops = partial(choose_meta_operators, config, checkpoint.config.dtype, ops)
    cache, cached_digests, group = open_weights_cache(config.weights_cache), None, None
    if divided:
        cached_digests = find_cached_digests(checkpoint, cache)
        account = report_local_device(
            checkpoint,
            config,
            ops,
            make_meta_ops,
            on_device=accelerator is not None,
            chosen=layers_are_automatic(config),
        )
        device = None if accelerator is None else ops.device
        group = FollowerGroup(
            checkpoint, config, devices, account, launcher, cached_digests=cached_digests, device=device
        )
        progress = group.watched(progress)
    try:
        if group is not None:
            group.divide(*choose_layers(checkpoint.config, config, group.accounts))
            cached_digests = replace(cached_digests or CachedDigests(), readers=group.readers)
        ranks, stage, others = (None,) * 3 if group is None else (group.ranks, group.stages[0], group.digests)
        memory, host_memory = config.weights_memory_bytes, config.weights_host_memory_bytes
        loaded = load_model(
            path, ops, progress=progress, ranks=ranks, stage=stage, others=others, cache=cache,
            cached_digests=cached_digests, weights_memory=memory, weights_host_memory=host_memory, copier=accelerator,
            outline=lambda: build_meta_decoder(
                checkpoint.config, checkpoint.format, checkpoint.tensors, make_meta_ops()
            ),
        )  # fmt: skip
        if group is not None:
            group.agree(loaded.weight_digests)
        name = name or (path.name if Path(model).is_dir() else str(model))
        return assemble_engine(
            loaded, config, ops, name=name, why=why, tokenizer=tokenizer, accelerator=accelerator, access=access,
            group=group, cache=cache,
        )  # fmt: skip
    except BaseException:
        if group is not None:
            group.close()
        raise
    finally:
        end_prefetch()


def assemble_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    ops: Ops,
    *,
    name: str,
    why: str,
    tokenizer: Tokenizer | None = None,
    accelerator: Accelerator | None = None,
    access: PrefixStoreAccess | None = None,
    group: FollowerGroup | None = None,
    cache: WeightsCache | None = None,
) -> BuiltEngine:
    """Build the engine of a loaded model, whose weights the operators hold.

    why    reason why the operators compute in their dtype
    group  processes of the divided model that `loaded` is a part of; None: it is whole
    cache  weights cache, beside which measured rates are kept

    Raises InvalidRequest.
    """
    torch.set_num_threads(ops.torch_threads)
    accelerator = accelerator or open_accelerator(ops.device)
    tier = loaded.decoder.tier
    if isinstance(tier, (DiskTier, DeviceTier)):
        tier.expected = measure_offloaded_decode(loaded.decoder, accelerator)
    if access is None and config.prefix_cache == "memory":
        access = in_memory_access(config.prefix_cache_bytes)
    shares = access is not None
    kv_layers, stays = (None, False) if group is None else (group.kv_layers(0), bool(group.host_kv_refusal))
    num_blocks, kv_why = kv_sizing.count_kv_blocks(config, loaded, ops, shares=shares, stays=stays, kv_layers=kv_layers)
    if group is not None:
        num_blocks, kv_why = group.limit_blocks(num_blocks, kv_why)
    max_model_len, len_why = kv_sizing.max_model_len(config, loaded, num_blocks)
    runner, lent, swap_why = build_runner(loaded, ops, accelerator, config, num_blocks, max_model_len, shares, group)
    choices = {"dtype": why, "kv_blocks": kv_why, "preemption": swap_why, "max_model_len": len_why, **ops.choices}
    if group is not None:
        staged = len(group.stages) > 1
        choices["stages" if staged else "ranks"] = f"{group.why}; {group.places()}" if staged else group.places()
    if isinstance(tier, (DiskTier, DeviceTier)):
        choices["weights"] = f"{tier.plan}; {tier.expected}"
    prefixes, arithmetic = None, ops.arithmetic if group is None else group.arithmetic(ops.arithmetic)
    if access is not None:
        prefixes, choices["prefix_store"] = _build_prefixes(
            access, config, loaded, ops, runner, lent, arithmetic, group
        )
    if tokenizer is None:
        choices["tokenizer"] = "none in the folder: token ids only, no text and no chat"
        log.warning("tokenizer: %s", choices["tokenizer"])
    for what, reason in choices.items():
        log.info("%s: %s", what, reason)
    vocab_size, own_eos = loaded.config.vocab_size, tokenizer.eos_token_id if tokenizer is not None else None
    limits = ModelLimits(vocab_size, max_model_len, end_token_ids(loaded.defaults.eos_token_ids, own_eos, vocab_size))
    if tokenizer is not None:
        _warn_of_missing_turn_end(tokenizer, limits.eos_token_ids)
    pool = BlockPool(num_blocks, reuse_prefixes=config.reuse_prefixes)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_drafts=config.speculate_ngram,
        drafter=find_drafter(config.drafter)(),
        swap=SwapPlanner(runner.swapper.num_blocks - lent if runner.swapper is not None else 0),
        prefixes=prefixes,
        lanes=config.pipeline_parallel,
    )
    grammars = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids) if tokenizer else None
    core = EngineCore(runner, scheduler, limits, tokenizer, grammars=grammars)
    info = ModelInfo(
        name=name,
        family=loaded.config.family,
        vocab_size=limits.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=limits.eos_token_ids,
        dtype=str(ops.dtype).removeprefix("torch."),
        quantization=loaded.quantization,
        architecture=architecture_name(loaded.config.family),
    )
    profile = _profile(info, config, loaded, arithmetic, num_blocks, choices)
    defaults = loaded.defaults.sampling()
    ranks = None if group is None else group.ranks
    beside = None if accelerator is None else DeviceUpdater(accelerator, kv_sizing.largest_step_bytes(config, loaded))
    cached = cached_rates(cache, config, ops, profile, group)
    return BuiltEngine(
        core, runner, tokenizer, profile, choices, defaults, access=access, group=group,
        weights=LiveWeights(loaded, config.frozen_weights, ranks, group, beside),
        identity=lambda loaded: engine_kv_identity(config, loaded, ops, arithmetic),
        rates=None if cached is None else cached.of,
    )  # fmt: skip


def _warn_of_missing_turn_end(tokenizer: Tokenizer, ends: Sequence[int]) -> None:
    """Log a warning if the token that ends a turn in chats is no end of sequence, since responses may then run on."""
    token = tokenizer.turn_end()
    tokenizer.rest()  # here no chats are rendered
    if token is not None and tokenizer.token_id(token) not in ends:
        log.warning(
            "tokenizer: chats end a turn with %s, which no file of the checkpoint calls an end of sequence: answers "
            "may run on; name it as eos_token in tokenizer_config.json if they do", token
        )  # fmt: skip


def _build_prefixes(
    access: PrefixStoreAccess,
    config: EngineConfig,
    loaded: LoadedModel,
    ops: Ops,
    runner: ModelRunner | GpuRunner | GpuPipelineRunner,
    lent: int,
    arithmetic: str,
    group: FollowerGroup | None,
) -> tuple[PrefixConnector | None, str]:
    """Return the prefixes that are shared through a store, and why they are set up so; or None, and why there are
    none.
    """
    if not config.reuse_prefixes:
        return None, "none: reuse_prefixes is off"
    swapper, host = runner.swapper, None
    if group is not None and (why := group.host_kv_refusal):
        return None, f"none: {why}"
    if swapper is None:
        return None, "none: there is no memory of the host for what comes and goes"
    if group is not None:
        host = ParallelHostRecords(group.shares, swapper, group.hosts, ops, record_geometry(config, loaded, ops))
    return build_prefix_connector(access, config, loaded, ops, runner, swapper, lent, arithmetic, host)


def _profile(
    info: ModelInfo,
    config: EngineConfig,
    loaded: LoadedModel,
    arithmetic: str,
    num_blocks: int,
    choices: Mapping[str, str],
) -> ReplicaProfile:
    numerics = engine_numerics_class(config, arithmetic)
    fingerprint = _fingerprint(loaded, numerics, info.dtype)
    return ReplicaProfile(
        replica_id="",
        model=info,
        device=config.device,
        device_name=_device_name(config.device),
        compute_capability=_compute_capability(config.device),
        numerics=numerics,
        fingerprint=fingerprint,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        kv_blocks_total=num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        choices=dict(choices),
    )


def _fingerprint(loaded: LoadedModel, numerics: str, dtype: str) -> str:
    return hashlib.sha256(f"{loaded.fingerprint}|{numerics}|kv={dtype}".encode()).hexdigest()


def _device_name(device: str) -> str:
    return (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()
    )


def _compute_capability(device: str) -> str | None:
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.startswith("cuda") else None
