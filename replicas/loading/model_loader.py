"""Loader of a model: from a checkpoint folder, or from repacked weights in the cache, to a decoder that is ready to
run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ...kernels.ops import Ops
from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint.cache.packed_weights import PackedWeights
from ..checkpoint.cache.repack_cache import NO_REPACK_CACHE, RecordingRepackCache, RepackCache, RestoringRepackCache
from ..checkpoint.cache.weights_cache import VERSION, WeightsCache, file_signatures
from ..checkpoint.files.checksum_manifest import check_manifests
from ..checkpoint.reading.load_progress import LoadProgressLog
from ..checkpoint.reading.read_buffers import AllocateStaging
from ..checkpoint.reading.weight_digests import (
    DigestPiece,
    Progress,
    digest_pieces,
    digests_by_tensor,
    order_piece_digests,
    tensor_pieces,
)
from ..checkpoint.reading.weight_loader import WeightLoader
from ..execution.copier import Copier
from ..host.host_memory import available_memory
from ..model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from ..model.decoder import Decoder
from ..model.generation_config import GenerationDefaults
from ..model.model_config import ModelConfig
from ..model.sharding.ranks import Ranks
from ..model.sharding.stages import PipelineStage
from ..model.tensor_layout import (
    EMBEDDING,
    HEAD,
    check_tied_head,
    decoder_layout,
    find_problem,
    head_is_tied,
    whole_stage,
)  # fmt: skip
from ..offload.device.device_tier import DeviceTier
from ..offload.device.offloaded_decoder import load_cached_decoder, load_offloaded_decoder
from ..offload.disk.disk_tier import layer_index
from ..offload.disk.tiered_decoder import load_tiered_decoder, require_repacking
from ..offload.planning.disk_plan import WeightBudgets
from ..offload.planning.weight_budget import check_budget, resolve_budgets
from ..offload.renewal.device_renewal import renew_device_decoder
from ..offload.renewal.disk_renewal import renew_disk_decoder
from .cached_digests import (
    CachedDigests,
    cached_weight_digests,
    checkpoint_files,
    digested_names,
    is_tolerated,
    join_digests,
    model_fingerprint,
)
from .digest_assignment import assign_digests

__all__ = ["Decoder", "LoadedModel", "load_model", "updated_model"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, with what the engine must know of it.

    fingerprint     hex digest of the config and of every weight's content: equal only for equal models
    weight_bytes    bytes of weights in memory, all copies counted
    digests         digests of pieces that this process found toward the fingerprint, if the model is divided
    checkpoint      checkpoint that it was loaded from; None: it was made up
    weight_digests  digest of each tensor, from which the fingerprint is made; empty in a process that does not compute
                    it
    keep            keeps this process's repacked part for the next start; called with the fingerprint of the whole
                    model
    """

    decoder: Decoder
    config: ModelConfig
    defaults: GenerationDefaults
    quantization: str
    fingerprint: str
    weight_bytes: int
    digests: Sequence[bytes] = ()
    checkpoint: Checkpoint | None = None
    weight_digests: Mapping[str, bytes] = field(default_factory=dict)
    keep: Callable[[str], None] | None = None


GatherPeerDigests = Callable[[], Sequence[Sequence[bytes]]]  # waits for the other processes' digests of the same files


def load_model(
    path: str | Path,
    ops: Ops,
    *,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    stage: PipelineStage | None = None,
    others: GatherPeerDigests | None = None,
    cache: WeightsCache | None = None,
    weights_memory: int | None = None,
    weights_host_memory: int | None = None,
    copier: Copier | None = None,
    outline: Callable[[], Decoder] | None = None,
    cached_digests: CachedDigests | None = None,
) -> LoadedModel:
    """Load a checked local folder through a device's operators.

    progress  called with (bytes read, total bytes)
    ranks     ranks that divide the layers: then only this rank's part is read
    stage     pipeline stage whose layers are read; None: all layers
    others    returns the other processes' digests; given to the process that computes the fingerprint
    cache     cache of repacked weights, for devices that can keep layers; each process has a part of its own
    cached_digests  digests of a divided model that were known before any process read it
    weights_memory  bytes of weights on the device; layers beyond are off it until they are computed. None: all are
                    loaded
    weights_host_memory  bytes of host memory for layers off a device with memory of its own; layers beyond stay in the
              cache's file, as they all do for a CPU. None: most of free memory
    copier    copies to such a device
    outline   returns an outline of the model, on operators of its own: it shows for a model that was never read whether
              the memory limits can be met

    Raises InvalidRequest if the memory limits cannot be met, and CheckpointError naming file and tensor: for all that
    headers show before a value is read, and for the values as they are read.
    """
    checkpoint, progress = inspect_checkpoint(path), LoadProgressLog(progress)
    stage = stage or whole_stage(checkpoint.config)
    if stage.count > 1 or (ranks is not None and len(ranks.parts) > 1):
        assert weights_memory is None, "of a model that is divided all is in memory"
        cache = cache if cache is not None and checkpoint.nbytes >= cache.min_bytes else None
        return _load_part(
            checkpoint, ops, progress, ranks, stage, others, cache, cached_digests or CachedDigests(), copier
        )
    tiers = None
    if weights_memory is not None:
        _, _, cache = require_repacking(ops, cache)
        tiers = resolve_budgets(weights_memory, weights_host_memory, copier)
        if outline is not None and cache.find_digests(checkpoint_files(checkpoint)) is None:
            check_budget(outline(), *tiers)
    elif cache is not None and checkpoint.nbytes < cache.min_bytes:
        cache = None
    began = time.perf_counter()
    loaded, how = _load_whole(checkpoint, ops, progress, cache, tiers, copier)
    progress(checkpoint.nbytes, checkpoint.nbytes)
    took = time.perf_counter() - began
    rate = checkpoint.nbytes / took / 1e9
    log.info("weights: %.2f GB loaded (%s) in %.2f s: %.2f GB/s", checkpoint.nbytes / 1e9, how, took, rate)
    return loaded


def _load_whole(
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None,
    cache: WeightsCache | None,
    tiers: WeightBudgets | None,
    copier: Copier | None,
) -> tuple[LoadedModel, str]:
    """Load a model that is not divided; return it and, in words, where its weights came from."""
    files = checkpoint_files(checkpoint)
    before = [] if cache is None else file_signatures(files)
    weight_digests = cached_weight_digests(checkpoint, cache)
    read = "read" if weight_digests is None else "known to be unchanged"
    if weight_digests is None:
        check_manifests(checkpoint.folder, [path for path, _ in checkpoint.tensors.values()])
    repacking = _repacking_ops(ops, cache)
    kind = "" if repacking is None else _cache_kind(checkpoint, repacking)
    if cache is not None and weight_digests is None and (tiers is not None or cache.has(kind)):
        weight_digests = _digest_checkpoint(
            checkpoint, progress
        )  # shows whether the cached weights were made from these
        cache.remember(before, files, join_digests(weight_digests))
    if cache is not None and repacking is not None and weight_digests is not None:
        key = _cache_key(kind, checkpoint, weight_digests)
        if tiers is not None:
            decoder, found = (
                load_tiered_decoder(checkpoint, ops, cache, key, tiers.device)
                if tiers.host is None or copier is None
                else load_offloaded_decoder(checkpoint, ops, cache, key, tiers.device, tiers.host, copier)
            )
            cache.hint(checkpoint.folder, key, ops.device.type)
            how = "as they were repacked before" if found else "repacked to disk"
            return _make_loaded_model(decoder, checkpoint, weight_digests), f"{read} and {how}"
        if (restored := _find_packed(checkpoint, ops, cache, key, copier)) is not None:
            cache.hint(checkpoint.folder, key, ops.device.type)
            return _make_loaded_model(restored, checkpoint, weight_digests), f"{read} and as repacked before"
    recorder = (
        RecordingRepackCache(repacking)
        if repacking is not None and _should_record(checkpoint, ops, cache, kind)
        else None
    )
    decoder, found_digests = _load_repacking(
        checkpoint, ops, recorder or NO_REPACK_CACHE, progress, copier, digests=weight_digests is None
    )
    if weight_digests is None:
        weight_digests = found_digests
        if cache is not None:
            cache.remember(before, files, join_digests(weight_digests))
    if cache is not None and recorder is not None and recorder.complete:
        cache.keep(key := _cache_key(kind, checkpoint, weight_digests), _recorded_weights(recorder, ops))
        cache.hint(checkpoint.folder, key, ops.device.type)
    elif cache is not None:
        cache.give_up()
    return _make_loaded_model(decoder, checkpoint, weight_digests), f"{read} and repacked"


def _digest_checkpoint(checkpoint: Checkpoint, progress: Progress | None) -> Mapping[str, bytes]:
    """Return the digest of each tensor, reading the files for that alone; a later read finds them in the page cache."""
    names = digested_names(checkpoint)
    return digests_by_tensor(checkpoint.tensors, names, digest_pieces(checkpoint.tensors, names, progress=progress))


def _repacking_ops(ops: Ops, cache: WeightsCache | None) -> PackedLayerOps | None:
    """Return the operators if their layers can be kept and there is a cache for them; else None."""
    return ops if cache is not None and isinstance(ops, PackedLayerOps) and ops.layout is not None else None


def _cache_kind(checkpoint: Checkpoint, ops: PackedLayerOps, part: str = "") -> str:
    """Return a digest of what weights of one kind have in common, whatever their values. part: of a divided model."""
    shapes = sorted((name, info.dtype, info.shape) for name, (_, info) in checkpoint.tensors.items())
    described = (
        f"{VERSION}\n{checkpoint.config}\n{checkpoint.format}\n{shapes}\n{ops.layout}\n{_source_digest()}\n{part}"
    )
    return hashlib.sha256(described.encode()).hexdigest()


def _cache_key(kind: str, checkpoint: Checkpoint, weight_digests: Mapping[str, bytes]) -> str:
    return f"{kind}\n{model_fingerprint(checkpoint, weight_digests)}"


def _load_repacking(
    checkpoint: Checkpoint,
    ops: Ops,
    repack_cache: RepackCache,
    progress: Progress | None,
    copier: Copier | None,
    *,
    digests: bool,
) -> tuple[Decoder, Mapping[str, bytes]]:
    """Read all of the checkpoint once and build the decoder; return it with the digest of each tensor, if those are
    wanted.
    """
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    # In the order in which the decoder takes them; the head goes first, since repacking it takes longest.
    order = sorted(layout, key=lambda name: not name.startswith((EMBEDDING, HEAD)))
    weights = WeightLoader(
        checkpoint.tensors, ops.device, progress, lambda name, tensor: find_problem(layout[name], tensor),
        order=order, digests=digests, whole=True, staging=_staging(copier),
    )  # fmt: skip
    try:
        if head_is_tied(checkpoint.config, checkpoint.format):
            check_tied_head(weights)
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, repack_cache=repack_cache)
        _finish(weights, copier)
    except BaseException:
        weights.abandon()
        raise
    return decoder, weights.weight_digests


def _staging(copier: Copier | None) -> AllocateStaging | None:
    """Return the host memory through which weights go to a device with memory of its own; None for other devices."""
    return copier.staging if copier is not None and copier.apart else None


def _finish(weights: WeightLoader, copier: Copier | None) -> None:
    weights.finish(tolerated=is_tolerated)
    if copier is not None:
        copier.trim()  # frees the host memory that the weights went through


def _find_packed(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, copier: Copier | None
) -> Decoder | None:
    """Return the decoder that was kept for that key; None if there is none."""
    if copier is not None and copier.apart:
        return load_cached_decoder(checkpoint, ops, cache, key, copier)
    packed_weights = cache.find(key)
    return None if packed_weights is None else _restore_decoder(checkpoint, ops, packed_weights)


def _should_record(checkpoint: Checkpoint, ops: Ops, cache: WeightsCache | None, kind: str) -> bool:
    """Return whether repacked weights shall be kept. For a GPU that takes a copy in host memory, and one process of a
    host does it.
    """
    if ops.device.type == "cpu" or cache is None:
        return True
    if 2 * checkpoint.nbytes > available_memory():
        log.warning("weights cache: repacked weights are not kept: the host has no memory for a copy of them")
        return False
    return cache.claim(kind)


def _restore_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    packed_weights: PackedWeights,
    ranks: Ranks | None = None,
    stage: PipelineStage | None = None,
) -> Decoder:
    """Build a decoder from repacked weights, which were checked before they were kept."""
    assert isinstance(ops, PackedLayerOps)
    ops.restore_choices(packed_weights.choices)
    repack_cache = RestoringRepackCache(ops, ops.device, packed_weights.tensors, packed_weights.packed)
    return Decoder(checkpoint.config, checkpoint.format, WeightLoader({}, ops.device), ops, ranks, stage, repack_cache)


def _recorded_weights(recorder: RecordingRepackCache, ops: Ops) -> PackedWeights:
    packed = {
        name: [part for part in recorder.packed[name] if part is not None]
        for name in sorted(
            recorder.packed, key=layer_index
        )  # layers lie together in the file, whichever was made first
    }
    choices = {what: why for what, why in ops.choices.items() if what.startswith(("layer, ", "head, "))}
    return PackedWeights(recorder.tensors, packed, choices)


def _load_part(
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None,
    ranks: Ranks | None,
    stage: PipelineStage,
    others: GatherPeerDigests | None,
    cache: WeightsCache | None,
    cached_digests: CachedDigests,
    copier: Copier | None,
) -> LoadedModel:
    """Load a process's part of a divided model. Digests that are not known are computed by all processes that read the
    same files, each digesting some pieces of what it reads.
    """
    readers = cached_digests.readers
    if readers is not None and readers.is_first:
        check_manifests(checkpoint.folder, [path for path, _ in checkpoint.tensors.values()])
    names = digested_names(checkpoint)
    whose = [] if readers is None else assign_digests(checkpoint, names, readers)
    own: dict[int, DigestPiece] = {}  # pieces that this process digests, by number
    if readers is not None:
        every = zip(tensor_pieces(checkpoint.tensors, names), whose, strict=True)
        own = {number: piece for number, (piece, owner) in enumerate(every) if owner == readers.own}
    on_the_way: Mapping[DigestPiece, bytes] = {}
    repacking = _repacking_ops(ops, cache)
    kind = "" if repacking is None else _cache_kind(checkpoint, repacking, f"{ranks and ranks.own}\n{stage}")
    keep: Callable[[str], None] | None = None
    packed_weights = None
    if cache is not None and repacking is not None and cached_digests.fingerprint:
        packed_weights = cache.find(f"{kind}\n{cached_digests.fingerprint}")
    if packed_weights is not None:
        decoder = _restore_decoder(checkpoint, ops, packed_weights, ranks, stage)
        log.info("weights: this process's part was read as it was repacked before")
    else:
        recorder = (
            RecordingRepackCache(repacking)
            if repacking is not None and _should_record(checkpoint, ops, cache, kind)
            else None
        )
        weights = _weights_of_part(checkpoint, ops.device, progress, ranks, stage, _staging(copier), own.values())
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, ranks, stage, recorder or NO_REPACK_CACHE)
        _finish(weights, copier)
        on_the_way = weights.digested
        if cache is not None and recorder is not None and recorder.complete:
            keep = partial(_keep_part, cache, kind, _recorded_weights(recorder, ops))
    digests = _digest_own_pieces(checkpoint, own, on_the_way)
    weight_digests: Mapping[str, bytes] = {}
    if others is not None:
        theirs = others()
        weight_digests = cached_digests.weight_digests or {}
        if not weight_digests:
            weight_digests = digests_by_tensor(
                checkpoint.tensors, names, order_piece_digests([digests, *theirs], whose)
            )
            if cache is not None:
                cache.remember(cached_digests.signature, checkpoint_files(checkpoint), join_digests(weight_digests))
    loaded = _make_loaded_model(decoder, checkpoint, weight_digests, digests)
    if keep is not None and loaded.fingerprint:
        keep(loaded.fingerprint)
        return loaded
    return replace(loaded, keep=keep)


def _digest_own_pieces(
    checkpoint: Checkpoint, own: Mapping[int, DigestPiece], on_the_way: Mapping[DigestPiece, bytes]
) -> list[bytes]:
    """Return the digests of a process's pieces, by number. Those that were not computed while reading are read again
    from the page cache: columns, and pieces of which the process has read only a part.
    """
    rest = [number for number, piece in own.items() if piece not in on_the_way]
    after = digest_pieces(checkpoint.tensors, digested_names(checkpoint), rest) if rest else []
    found = dict(zip(rest, after, strict=True))
    return [found[number] if number in found else on_the_way[piece] for number, piece in own.items()]


def _weights_of_part(
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress | None,
    ranks: Ranks | None,
    stage: PipelineStage,
    staging: AllocateStaging | None,
    pieces: Collection[DigestPiece],
) -> WeightLoader:
    """Return the weights that a process takes its part from. pieces: those that it digests while reading them whole."""
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    own = decoder_layout(checkpoint.config, checkpoint.format, stage)
    weights = WeightLoader(
        checkpoint.tensors, device, progress, lambda name, tensor: find_problem(layout[name], tensor), order=own,
        pieces=pieces, staging=staging,
    )  # fmt: skip
    weights.skip(layout.keys() - own.keys())
    if head_is_tied(checkpoint.config, checkpoint.format) and stage.is_last:
        check_tied_head(weights, *(() if ranks is None else (slice(*ranks.own.tokens),)))
    return weights


def _keep_part(cache: WeightsCache, kind: str, packed_weights: PackedWeights, fingerprint: str) -> None:
    cache.keep(f"{kind}\n{fingerprint}", packed_weights)


def updated_model(
    before: LoadedModel, checkpoint: Checkpoint, changed: Collection[str], ranks: Ranks | None = None
) -> LoadedModel:
    """Return the same model, or a process's part of it, with other values of the tensors in `changed`.

    Parts that use none of these tensors are shared with `before`.

    checkpoint  has the layout of `before`, and values that are known to be sound

    Raises CheckpointError naming file and tensor, and in tiers the errors of those. `before` is never changed.
    """
    decoder, stage = before.decoder, before.decoder.stage
    own = frozenset(changed) & decoder_layout(checkpoint.config, checkpoint.format, stage).keys()
    if isinstance(decoder.tier, DeviceTier):
        made = renew_device_decoder(decoder, checkpoint, own)
    elif decoder.tier is not None:
        made = renew_disk_decoder(decoder, checkpoint, own)
    else:
        weights = WeightLoader(checkpoint.tensors, decoder.ops.device)
        tied = stage.is_last and head_is_tied(checkpoint.config, checkpoint.format)
        if tied and not {EMBEDDING, f"{HEAD}.weight"}.isdisjoint(own):
            check_tied_head(weights, *(() if ranks is None else (slice(*ranks.own.tokens),)))
        made = Decoder(
            checkpoint.config, checkpoint.format, weights, decoder.ops, ranks, stage, before=decoder, changed=own
        )
        weights.finish(tolerated=lambda name: name not in own)
    if not before.weight_digests:
        return _make_loaded_model(made, checkpoint, {}, ())
    tensors = checkpoint.tensors
    weight_digests = {**before.weight_digests, **digests_by_tensor(tensors, changed, digest_pieces(tensors, changed))}
    return _make_loaded_model(made, checkpoint, weight_digests, ())


def _make_loaded_model(
    decoder: Decoder, checkpoint: Checkpoint, weight_digests: Mapping[str, bytes], digests: Sequence[bytes] = ()
) -> LoadedModel:
    """Return the loaded model with its fingerprint. contents: empty in a process that does not compute the
    fingerprint.
    """
    return LoadedModel(
        decoder=decoder,
        config=checkpoint.config,
        defaults=checkpoint.defaults,
        quantization=checkpoint.quantization,
        fingerprint=model_fingerprint(checkpoint, weight_digests) if weight_digests else "",
        weight_bytes=decoder.nbytes,
        digests=digests,
        checkpoint=checkpoint,
        weight_digests=weight_digests,
    )


@functools.cache
def _source_digest() -> str:
    """Return a digest of the code that reads formats: after any change of it, repacked weights are made again."""
    replicas = Path(__file__).parents[1]
    folders = ("quantization", "checkpoint/reading")
    others = ("model/decoder.py", "model/layers.py", "model/tensor_layout.py", "checkpoint/cache/repack_cache.py")
    files = [file for folder in folders for file in sorted((replicas / folder).glob("*.py"))]
    files += [replicas / name for name in (*others, "checkpoint/cache/packed_weights.py")]
    files += [replicas / "offload/disk" / name for name in ("disk_tier.py", "repacked_file_writer.py")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
