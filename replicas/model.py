"""From a folder to a model ready to run."""

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

from ..kernels.ops import Ops
from ..kernels.packed_layer import PackedLayerOps
from .checkpoint import Checkpoint, inspect_checkpoint
from .config import ModelConfig
from .contents import Piece, Progress, each_digest, in_order, piece_digests, pieces_of
from .decoder import Decoder
from .generation import GenerationDefaults
from .gpu.accelerator import Copier
from .host_memory import available_memory
from .kept_file import Kept
from .known import Known, files_of, fingerprint_of, in_a_row, known_contents, names_of, tolerated
from .layout import (
    EMBEDDING,
    HEAD,
    check_tied_head,
    decoder_layout,
    head_is_tied,
    problem_of,
    whole,
)  # fmt: skip
from .loading import Said
from .manifest import check_manifests
from .reading_rooms import Staging
from .shards.ranks import Ranks
from .shards.readers import owners
from .shards.stages import Stage
from .shelf import EMPTY, Filled, Noting, Shelf
from .tiers.budget import budgets, check_budget
from .tiers.device import DeviceTier
from .tiers.onto import found_decoder, placed_decoder
from .tiers.open import able, tiered_decoder
from .tiers.plan import Budgets
from .tiers.renew import renewed_decoder
from .tiers.renew_device import renewed_on_device
from .tiers.tier import layer_of
from .weights import Weights
from .weights_cache import VERSION, WeightsCache, signature_of

__all__ = ["Decoder", "LoadedModel", "load_model", "updated_model"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with what the engine must know of it.

    fingerprint   hex digest of the config and of every weight's content: equal only for equal models
    weight_bytes  held in memory, all copies counted
    digests       what this process has found of the fingerprint, if the model is divided
    checkpoint    that it was loaded from; None: it was made up
    contents      digest of each tensor, which the fingerprint is made of; a process that does not tell it has none
    keep          of a part that was repacked: called with the fingerprint of the whole, it keeps it for the next start
    """

    decoder: Decoder
    config: ModelConfig
    defaults: GenerationDefaults
    quantization: str
    fingerprint: str
    weight_bytes: int
    digests: Sequence[bytes] = ()
    checkpoint: Checkpoint | None = None
    contents: Mapping[str, bytes] = field(default_factory=dict)
    keep: Callable[[str], None] | None = None


Others = Callable[[], Sequence[Sequence[bytes]]]  # waits for the other processes: digests of the same files


def load_model(
    path: str | Path,
    ops: Ops,
    *,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    stage: Stage | None = None,
    others: Others | None = None,
    cache: WeightsCache | None = None,
    weights_memory: int | None = None,
    weights_host_memory: int | None = None,
    copier: Copier | None = None,
    outline: Callable[[], Decoder] | None = None,
    known: Known | None = None,
) -> LoadedModel:
    """Load a checked local folder through a device's operators.

    progress  called with (bytes read, bytes in all)
    ranks     among which layers are divided: then this rank's part alone is read
    stage     whose layers alone are read; None: all
    others    of the process that is to tell the fingerprint
    cache     of weights as they are repacked, on devices that keep layers: each process has a part of its own
    known     of a model that is divided, before any process read of it
    weights_memory  bytes of weights on the device; what is beyond is off it until it computes. None: all is loaded
    weights_host_memory  bytes of what is off a device with memory of its own; what is beyond stays in the cache's file,
              as all of it does of a CPU. None: most of what is free
    copier    of such a device
    outline   of the model, on operators of its own: tells of one that was never read whether that can be

    Raises InvalidRequest where that cannot be, and CheckpointError naming file and tensor: for all that headers can
    tell before a value is read, for the values themselves as they are read.
    """
    checkpoint, progress = inspect_checkpoint(path), Said(progress)
    stage = stage or whole(checkpoint.config)
    if stage.count > 1 or (ranks is not None and len(ranks.parts) > 1):
        assert weights_memory is None, "of a model that is divided all is in memory"
        cache = cache if cache is not None and checkpoint.nbytes >= cache.least_bytes else None
        return _load_part(checkpoint, ops, progress, ranks, stage, others, cache, known or Known(), copier)
    tiers = None
    if weights_memory is not None:
        _, _, cache = able(ops, cache)
        tiers = budgets(weights_memory, weights_host_memory, copier)
        if outline is not None and cache.contents(files_of(checkpoint)) is None:
            check_budget(outline(), *tiers)
    elif cache is not None and checkpoint.nbytes < cache.least_bytes:
        cache = None
    began = time.perf_counter()
    loaded, how = _load_whole(checkpoint, ops, progress, cache, tiers, copier)
    progress(checkpoint.nbytes, checkpoint.nbytes)
    took = time.perf_counter() - began
    rate = checkpoint.nbytes / took / 1e9
    log.info("weights: %.2f GB %s in %.2f s: %.2f GB/s", checkpoint.nbytes / 1e9, how, took, rate)
    return loaded


def _load_whole(
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None,
    cache: WeightsCache | None,
    tiers: Budgets | None,
    copier: Copier | None,
) -> tuple[LoadedModel, str]:
    """And in words where it came from."""
    files = files_of(checkpoint)
    before = [] if cache is None else signature_of(files)
    contents = known_contents(checkpoint, cache)
    read = "read" if contents is None else "known to be unchanged"
    if contents is None:
        check_manifests(checkpoint.folder, [path for path, _ in checkpoint.tensors.values()])
    repacking = _repacking(ops, cache)
    kind = "" if repacking is None else _kind(checkpoint, repacking)
    if cache is not None and contents is None and (tiers is not None or cache.has(kind)):
        contents = _digested(checkpoint, progress)  # which says whether what is kept is of these weights
        cache.remember(before, files, in_a_row(contents))
    if cache is not None and repacking is not None and contents is not None:
        key = _key(kind, checkpoint, contents)
        if tiers is not None:
            decoder, found = (
                tiered_decoder(checkpoint, ops, cache, key, tiers.device)
                if tiers.host is None or copier is None
                else placed_decoder(checkpoint, ops, cache, key, tiers.device, tiers.host, copier)
            )
            cache.hint(checkpoint.folder, key, ops.device.type)
            how = "as they were repacked before" if found else "repacked to disk"
            return _loaded(decoder, checkpoint, contents), f"{read} and {how}"
        if (restored := _found(checkpoint, ops, cache, key, copier)) is not None:
            cache.hint(checkpoint.folder, key, ops.device.type)
            return _loaded(restored, checkpoint, contents), f"{read} and as repacked before"
    noting = Noting(repacking) if repacking is not None and _notes(checkpoint, ops, cache, kind) else None
    decoder, found_contents = _repacked(checkpoint, ops, noting or EMPTY, progress, copier, digests=contents is None)
    if contents is None:
        contents = found_contents
        if cache is not None:
            cache.remember(before, files, in_a_row(contents))
    if cache is not None and noting is not None and noting.complete:
        cache.keep(key := _key(kind, checkpoint, contents), _noted(noting, ops))
        cache.hint(checkpoint.folder, key, ops.device.type)
    elif cache is not None:
        cache.give_up()
    return _loaded(decoder, checkpoint, contents), f"{read} and repacked"


def _digested(checkpoint: Checkpoint, progress: Progress | None) -> Mapping[str, bytes]:
    """Likewise, of files that are read for it: whoever goes on to read them finds them in the page cache."""
    names = names_of(checkpoint)
    return each_digest(checkpoint.tensors, names, piece_digests(checkpoint.tensors, names, progress=progress))


def _repacking(ops: Ops, cache: WeightsCache | None) -> PackedLayerOps | None:
    """Operators whose layers can be kept, where there is a cache for them."""
    return ops if cache is not None and isinstance(ops, PackedLayerOps) and ops.layout is not None else None


def _kind(checkpoint: Checkpoint, ops: PackedLayerOps, part: str = "") -> str:
    """What weights of one kind have in common, whatever their values. part: of a model that is divided."""
    shapes = sorted((name, info.dtype, info.shape) for name, (_, info) in checkpoint.tensors.items())
    described = f"{VERSION}\n{checkpoint.config}\n{checkpoint.format}\n{shapes}\n{ops.layout}\n{_sources()}\n{part}"
    return hashlib.sha256(described.encode()).hexdigest()


def _key(kind: str, checkpoint: Checkpoint, contents: Mapping[str, bytes]) -> str:
    return f"{kind}\n{fingerprint_of(checkpoint, contents)}"


def _repacked(
    checkpoint: Checkpoint, ops: Ops, shelf: Shelf, progress: Progress | None, copier: Copier | None, *, digests: bool
) -> tuple[Decoder, Mapping[str, bytes]]:
    """All of it read, once; and the digest of each tensor, if they are wanted."""
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    # As the decoder takes them: the head is the longest of what is repacked side by side.
    order = sorted(layout, key=lambda name: not name.startswith((EMBEDDING, HEAD)))
    weights = Weights(
        checkpoint.tensors, ops.device, progress, lambda name, tensor: problem_of(layout[name], tensor),
        order=order, digests=digests, whole=True, staging=_staging(copier),
    )  # fmt: skip
    try:
        if head_is_tied(checkpoint.config, checkpoint.format):
            check_tied_head(weights)
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, shelf=shelf)
        _finish(weights, copier)
    except BaseException:
        weights.abandon()
        raise
    return decoder, weights.contents


def _staging(copier: Copier | None) -> Staging | None:
    """Where weights are read to that go on to a device with memory of its own."""
    return copier.staging if copier is not None and copier.apart else None


def _finish(weights: Weights, copier: Copier | None) -> None:
    weights.finish(tolerated=tolerated)
    if copier is not None:
        copier.trim()  # of what they went through


def _found(checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, copier: Copier | None) -> Decoder | None:
    """What was kept for that key, if anything is."""
    if copier is not None and copier.apart:
        return found_decoder(checkpoint, ops, cache, key, copier)
    kept = cache.find(key)
    return None if kept is None else _restored(checkpoint, ops, kept)


def _notes(checkpoint: Checkpoint, ops: Ops, cache: WeightsCache | None, kind: str) -> bool:
    """Whether what is made shall be kept: of another device in copies, of which one process of a host has one."""
    if ops.device.type == "cpu" or cache is None:
        return True
    if 2 * checkpoint.nbytes > available_memory():
        log.warning("weights cache: repacked weights are not kept: the host has no memory for a copy of them")
        return False
    return cache.claim(kind)


def _restored(
    checkpoint: Checkpoint, ops: Ops, kept: Kept, ranks: Ranks | None = None, stage: Stage | None = None
) -> Decoder:
    """Of weights that were checked before they were kept."""
    assert isinstance(ops, PackedLayerOps)
    ops.restore_choices(kept.choices)
    shelf = Filled(ops, ops.device, kept.tensors, kept.packed)
    return Decoder(checkpoint.config, checkpoint.format, Weights({}, ops.device), ops, ranks, stage, shelf)


def _noted(noting: Noting, ops: Ops) -> Kept:
    packed = {
        name: [part for part in noting.packed[name] if part is not None]
        for name in sorted(noting.packed, key=layer_of)  # layers lie together in the file, whichever was made first
    }
    choices = {what: why for what, why in ops.choices.items() if what.startswith(("layer, ", "head, "))}
    return Kept(noting.tensors, packed, choices)


def _load_part(
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None,
    ranks: Ranks | None,
    stage: Stage,
    others: Others | None,
    cache: WeightsCache | None,
    known: Known,
    copier: Copier | None,
) -> LoadedModel:
    """A process's. Digests of what is not known are found by all that read the same files, each of what it reads."""
    readers = known.readers
    if readers is not None and readers.is_first:
        check_manifests(checkpoint.folder, [path for path, _ in checkpoint.tensors.values()])
    names = names_of(checkpoint)
    whose = [] if readers is None else owners(checkpoint, names, readers)
    own: dict[int, Piece] = {}  # pieces that this process digests, by number
    if readers is not None:
        every = zip(pieces_of(checkpoint.tensors, names), whose, strict=True)
        own = {number: piece for number, (piece, owner) in enumerate(every) if owner == readers.own}
    on_the_way: Mapping[Piece, bytes] = {}
    repacking = _repacking(ops, cache)
    kind = "" if repacking is None else _kind(checkpoint, repacking, f"{ranks and ranks.own}\n{stage}")
    keep: Callable[[str], None] | None = None
    kept = None
    if cache is not None and repacking is not None and known.fingerprint:
        kept = cache.find(f"{kind}\n{known.fingerprint}")
    if kept is not None:
        decoder = _restored(checkpoint, ops, kept, ranks, stage)
        log.info("weights: this process's part as it was repacked before")
    else:
        noting = Noting(repacking) if repacking is not None and _notes(checkpoint, ops, cache, kind) else None
        weights = _part(checkpoint, ops.device, progress, ranks, stage, _staging(copier), own.values())
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, ranks, stage, noting or EMPTY)
        _finish(weights, copier)
        on_the_way = weights.digested
        if cache is not None and noting is not None and noting.complete:
            keep = partial(_keep_part, cache, kind, _noted(noting, ops))
    digests = _of_own(checkpoint, own, on_the_way)
    contents: Mapping[str, bytes] = {}
    if others is not None:
        theirs = others()
        contents = known.contents or {}
        if not contents:
            contents = each_digest(checkpoint.tensors, names, in_order([digests, *theirs], whose))
            if cache is not None:
                cache.remember(known.signature, files_of(checkpoint), in_a_row(contents))
    loaded = _loaded(decoder, checkpoint, contents, digests)
    if keep is not None and loaded.fingerprint:
        keep(loaded.fingerprint)
        return loaded
    return replace(loaded, keep=keep)


def _of_own(checkpoint: Checkpoint, own: Mapping[int, Piece], on_the_way: Mapping[Piece, bytes]) -> list[bytes]:
    """Digests of a process's pieces, by number. What was not found on the way is read from the page cache: columns, and
    pieces of which it has read a part."""
    rest = [number for number, piece in own.items() if piece not in on_the_way]
    after = piece_digests(checkpoint.tensors, names_of(checkpoint), rest) if rest else []
    found = dict(zip(rest, after, strict=True))
    return [found[number] if number in found else on_the_way[piece] for number, piece in own.items()]


def _part(
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress | None,
    ranks: Ranks | None,
    stage: Stage,
    staging: Staging | None,
    pieces: Collection[Piece],
) -> Weights:
    """What a process takes its part from. pieces: that it digests, on the way where it reads them whole."""
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    own = decoder_layout(checkpoint.config, checkpoint.format, stage)
    weights = Weights(
        checkpoint.tensors, device, progress, lambda name, tensor: problem_of(layout[name], tensor), order=own,
        pieces=pieces, staging=staging,
    )  # fmt: skip
    weights.leave(layout.keys() - own.keys())
    if head_is_tied(checkpoint.config, checkpoint.format) and stage.is_last:
        check_tied_head(weights, *(() if ranks is None else (slice(*ranks.own.tokens),)))
    return weights


def _keep_part(cache: WeightsCache, kind: str, kept: Kept, fingerprint: str) -> None:
    cache.keep(f"{kind}\n{fingerprint}", kept)


def updated_model(
    before: LoadedModel, checkpoint: Checkpoint, changed: Collection[str], ranks: Ranks | None = None
) -> LoadedModel:
    """The same model, or a process's part of it, with other values of the tensors that have `changed`.

    What has none of them is shared.

    checkpoint  whose layout is that of `before`, and whose values are known to be sound

    Raises CheckpointError naming file and tensor, and in tiers what else these do; nothing of `before` has changed
    then, nor otherwise.
    """
    decoder, stage = before.decoder, before.decoder.stage
    own = frozenset(changed) & decoder_layout(checkpoint.config, checkpoint.format, stage).keys()
    if isinstance(decoder.tier, DeviceTier):
        made = renewed_on_device(decoder, checkpoint, own)
    elif decoder.tier is not None:
        made = renewed_decoder(decoder, checkpoint, own)
    else:
        weights = Weights(checkpoint.tensors, decoder.ops.device)
        tied = stage.is_last and head_is_tied(checkpoint.config, checkpoint.format)
        if tied and not {EMBEDDING, f"{HEAD}.weight"}.isdisjoint(own):
            check_tied_head(weights, *(() if ranks is None else (slice(*ranks.own.tokens),)))
        made = Decoder(
            checkpoint.config, checkpoint.format, weights, decoder.ops, ranks, stage, before=decoder, changed=own
        )
        weights.finish(tolerated=lambda name: name not in own)
    if not before.contents:
        return _loaded(made, checkpoint, {}, ())
    tensors = checkpoint.tensors
    contents = {**before.contents, **each_digest(tensors, changed, piece_digests(tensors, changed))}
    return _loaded(made, checkpoint, contents, ())


def _loaded(
    decoder: Decoder, checkpoint: Checkpoint, contents: Mapping[str, bytes], digests: Sequence[bytes] = ()
) -> LoadedModel:
    """contents: none of a process that does not tell the fingerprint."""
    return LoadedModel(
        decoder=decoder,
        config=checkpoint.config,
        defaults=checkpoint.defaults,
        quantization=checkpoint.quantization,
        fingerprint=fingerprint_of(checkpoint, contents) if contents else "",
        weight_bytes=decoder.nbytes,
        digests=digests,
        checkpoint=checkpoint,
        contents=contents,
    )


@functools.cache
def _sources() -> str:
    """Digest of the code that reads formats: with any change of it, what was kept before is made anew."""
    here = Path(__file__).parent
    others = ("decoder.py", "layers.py", "layout.py", "shelf.py", "weights.py", "kept_file.py", "contents.py")
    readers = ("extents.py", "read_ahead.py", "reading.py", "reading_rooms.py", "tiers/tier.py", "tiers/write.py")
    files = [*sorted((here / "quantization").glob("*.py")), *(here / name for name in (*others, *readers))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
