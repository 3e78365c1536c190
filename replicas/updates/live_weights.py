"""The weights that a model has now, and those that it will have next.

Two versions exist side by side as long as requests run on the older one; in memory these are the model, and once more
what has changed. A request ends with the version that it began with, so that no response is from two models, and no
later request finds its KV; requests that had not begun use the new version. There is no third version until the older
one has been released.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from ..checkpoint.files.safetensors_header import read_header
from ..checkpoint.reading.weight_digests import combine_tensor_digests
from ..errors import CheckpointError, InvalidRequest, Unavailable
from ..loading.model_loader import LoadedModel, updated_model
from ..model.checkpoint_inspection import Checkpoint
from ..model.sharding.ranks import Ranks
from ..model.tensor_layout import decoder_layout
from ..types import WeightsStatus
from .device_update import DeviceUpdater
from .process_folder import latest_process_folder, release_process_folder
from .update_replay import updates_to_replay
from .update_staging import digest_of_file, stage_update
from .weight_file import WeightFile

log = logging.getLogger(__name__)

_MAX_PAST_VERSIONS = 8  # versions whose digest is kept: messages about older ones are no longer in flight


class RemoteUpdates(Protocol):
    """Protocol of the other processes that have a part of the model."""

    def prepare(self, version: int, file: Path) -> None:
        """Let every other process prepare weights of `version` from a file: afterwards all have it, or none and this
        raises.
        """
        ...

    def forget(self, version: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """Version of the weights that is complete and not used yet.

    names    names of the tensors that have changed
    made_of  digest of the file that has changed them
    """

    version: int
    loaded: LoadedModel
    names: tuple[str, ...]
    made_of: bytes


class LiveWeights:
    """Versions of a replica's weights. One thread prepares a version at a time.

    version  version in use, as steps and messages have it: 0 is what was loaded first, and each adopted update adds 1.
             The version in `status` also counts updates that were skipped
    frozen   patterns of names that must not change
    ranks    ranks among which the model is divided; None if it is not
    others   the other processes of a divided model
    beside   makes new weights on a device with memory of its own; None on a CPU
    """

    def __init__(
        self,
        loaded: LoadedModel,
        frozen: Sequence[str] = (),
        ranks: Ranks | None = None,
        others: RemoteUpdates | None = None,
        beside: DeviceUpdater | None = None,
    ) -> None:
        self.version = 0
        self.loaded = loaded
        self._frozen, self._ranks, self._others = frozen, ranks, others
        self._beside = beside
        self._folders: list[Path] = []  # folders with copies of files; new ones go to the last
        self._digests = {0: loaded.fingerprint}
        self._made_of = b""  # digest of the file that the newest version is made of
        self._skipped = 0  # updates that were not read because later ones replace all their tensors

    def status(self, version: int | None = None) -> WeightsStatus:
        """Return a version's number and fingerprint for others; None for the newest version. Safe from any thread.

        version  one that exists, or existed recently
        """
        version = self.version if version is None else version
        return WeightsStatus(version + self._skipped, self._digests.get(version, ""))

    def check_made_of(self, file: WeightFile) -> None:
        """Raise InvalidRequest unless the newest version is what that file makes of the one before."""
        now = self.status()
        same = now.contents == file.contents if file.contents else digest_of_file(file) == self._made_of
        if not same:
            message = (
                f"path: weights of version {now.version} have other contents than {file.path.name} gives: roll the pool"
            )
            raise InvalidRequest(message, param="path", code="weights_differ")

    def replay(self, files: Sequence[WeightFile]) -> Iterator[PreparedVersion]:
        """Yield a prepared version for each of all updates since the checkpoint that must be read; each must be adopted
        before the next is asked for.

        Raises as `prepare` does.
        """
        replayed = list(files) if len(files) < 2 else updates_to_replay(files, self._changeable(), read_header)
        self._skipped = len(files) - len(replayed)
        log.info("%d updates of the weights are read again, of the %d since the checkpoint", len(replayed), len(files))
        for file in replayed:
            yield self.prepare(file)

    def _changeable(self) -> list[str]:
        checkpoint = self.loaded.checkpoint
        if checkpoint is None:
            return []
        layout = decoder_layout(checkpoint.config, checkpoint.format)
        names = (name for name in layout if name in checkpoint.tensors)
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self._frozen)]

    def prepare(self, file: WeightFile, expected: int | None = None) -> PreparedVersion:
        """Build a new version beside the one in use. Nothing has changed if this raises.

        expected  version that the file is for, as `status` counts; None for any

        Raises InvalidRequest, CheckpointError, Unavailable where there is no memory for it, and EngineFault where a
        process does not answer.
        """
        checkpoint = self.loaded.checkpoint
        if checkpoint is None:
            raise InvalidRequest(
                "path: a model without a checkpoint cannot be updated; replace its replicas with `motley fleet roll`",
                param="path",
            )
        if expected is not None and expected != (now := self.status().version):
            message = f"expected_version: {expected} is not accepted; the weights are of version {now}"
            raise InvalidRequest(message, param="expected_version", code="version_mismatch")
        made_of = digest_of_file(file) if file.delta else b""
        version, copy = self.version + 1, self._place(self.version + 1)
        staged = stage_update(file, checkpoint, self._frozen, copy)
        try:
            changed = replace(checkpoint, tensors={**checkpoint.tensors, **staged})
            if self._others is not None:
                self._others.prepare(version, copy)
            loaded = self._updated(version, changed, staged.keys())
            self._check_digest(file, loaded, version)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        # A file of whole tensors was copied as it is, and the digests of its tensors are known by now.
        made_of = made_of or combine_tensor_digests(staged, {name: loaded.weight_digests[name] for name in staged})
        return PreparedVersion(version, loaded, tuple(sorted(staged)), made_of)

    def adopt(self, prepared: PreparedVersion) -> None:
        """Make a prepared version the one in use, and remove files from which nothing is read any more."""
        assert prepared.version == self.version + 1, "versions follow each other"
        assert self.loaded.checkpoint is not None
        assert prepared.loaded.checkpoint is not None
        before = {path for path, _ in self.loaded.checkpoint.tensors.values()}
        now = {path for path, _ in prepared.loaded.checkpoint.tensors.values()}
        self.version, self.loaded, self._made_of = prepared.version, prepared.loaded, prepared.made_of
        self._digests = {**self._digests, self.version: self.loaded.fingerprint}
        self._digests.pop(self.version - _MAX_PAST_VERSIONS, None)
        for path in before - now:
            self._remove(path)
        log.info("weights of version %d: %d tensors are new", self.status().version, len(prepared.names))

    def drop(self, prepared: PreparedVersion) -> None:
        """Discard a prepared version of the weights that is not wanted after all."""
        assert prepared.loaded.checkpoint is not None
        for path in {prepared.loaded.checkpoint.tensors[name][0] for name in prepared.names}:
            self._remove(path)
        prepared.loaded.decoder.forget()
        if self._others is not None:
            self._others.forget(prepared.version)

    def close(self) -> None:
        while self._folders:
            release_process_folder(self._folders.pop())

    def _updated(self, version: int, checkpoint: Checkpoint, changed: Collection[str]) -> LoadedModel:
        try:
            make = updated_model if self._beside is None else self._beside.updated_model
            return make(self.loaded, checkpoint, changed, self._ranks)
        except BaseException:
            if self._others is not None:
                self._others.forget(version)
            raise

    def _check_digest(self, file: WeightFile, loaded: LoadedModel, version: int) -> None:
        if file.contents in ("", loaded.fingerprint):
            return
        loaded.decoder.forget()
        if self._others is not None:
            self._others.forget(version)
        raise CheckpointError("has changed since other replicas read it: their weights differ", file=file.path.name)

    def _place(self, version: int) -> Path:
        """Return the path for the version's file: in this object's folder, or in a new one if that has been deleted
        meanwhile.
        """
        try:
            return latest_process_folder(self._folders) / f"{version}.safetensors"
        except OSError as error:
            raise Unavailable(
                f"the new weights cannot be stored in this host's temporary folder: {error}", code="no_room"
            ) from error

    def _remove(self, path: Path) -> None:
        """Remove a file of new weights if it was copied here; never a file of the checkpoint."""
        if path.parent in self._folders:
            path.unlink(missing_ok=True)
