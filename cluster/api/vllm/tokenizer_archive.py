"""A checkpoint's tokenizer as one zip archive: the same files always give the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path

from ....replicas.checkpoint.files.checkpoint_folder import regular_file_size, resolve_within
from ....replicas.errors import EngineFault, MotleyError, NotFound
from ...protos import vllm_common_pb2 as pb

# Files that tokenizer libraries read; no other file is sent.
FILES = (
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
CHUNK_BYTES = 1 << 20  # gRPC clients accept 4 MiB in one message by default
MAX_FILE_BYTES = 512 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's first day


class TokenizerArchive:
    """Archive of one checkpoint's tokenizer. It is packed once, at the first request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packing = asyncio.Lock()
        self._archive = b""

    async def chunks(self) -> AsyncGenerator[pb.GetTokenizerChunk, None]:
        """Yield the archive in chunks. Raises NotFound if there is no tokenizer."""
        async with self._packing:
            if not self._archive:
                self._archive = await asyncio.to_thread(pack_tokenizer, self._folder)
        archive = self._archive
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(archive)
            data = archive[start : start + CHUNK_BYTES]
            yield pb.GetTokenizerChunk(data=data, sha256=digest if last else "")


def pack_tokenizer(folder: Path) -> bytes:
    folder = folder.resolve()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            if (folder / name).exists():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), _read(folder, name), zipfile.ZIP_DEFLATED)
        if not archive.namelist():
            raise NotFound("this model has no tokenizer files", code="tokenizer_missing")
    return packed.getvalue()


def _read(folder: Path, name: str) -> bytes:
    """Return a file's bytes. Raises EngineFault with few details: a fault in the server's folder is not the
    client's.
    """
    try:
        path = resolve_within(folder, name)
        if regular_file_size(path) > MAX_FILE_BYTES:
            raise EngineFault(f"{name} is too large to be sent", code="tokenizer_unreadable")
        return path.read_bytes()
    except (OSError, MotleyError) as error:
        raise EngineFault(f"{name} of this model cannot be read", code="tokenizer_unreadable") from error
