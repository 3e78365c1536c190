"""Resolver of a model's name: finds the folder on disk, or downloads it from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import CheckpointError
from .unsupported_formats import explain_file, explain_models

# Files that a checkpoint can consist of here: never a pickle, never code.
DOWNLOADED_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
IGNORED_FILES = ("*/*", "consolidated*")  # other formats' folders, and Mistral's second copy of the weights
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(name_or_path: str | Path) -> Path:
    """Return a local folder as it is, or download a Hugging Face id ("org/name", "org/name@revision") unless it is
    cached.

    Raises CheckpointError with a remedy.
    """
    path = Path(name_or_path)
    if str(name_or_path) and _is_folder(path):
        return path
    if _is_file(path):
        raise explain_file(path)
    name, _, revision = str(name_or_path).partition("@")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            "there is no such folder, and it is no Hugging Face id (org/name) either",
            file=str(name_or_path)[:200] or "(empty name)",
        )
    return _download(name, revision or None)


def _explain_repository(
    name: str, revision: str | None, offline: tuple[type[BaseException], ...]
) -> CheckpointError | None:
    """Return an error that names what a repository is, such as one of GGUF files, when no file of it was downloaded;
    None if that is unknown or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        error = explain_models(HfApi().list_repo_files(name, revision=revision))
    except offline:  # the cached folder has no config.json, which is reported later
        return None
    if error is None:
        return None
    return CheckpointError(f"holds {error.file}, which {error.message.partition(': ')[2]}", file=name)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # for one, a name longer than the system allows
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Bases: the HTTP client's own errors, those of requests, httpx or httpx2 by the hub's version.
    offline: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)
    try:
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(DOWNLOADED_FILES), ignore_patterns=list(IGNORED_FILES)
            )
        )
        if (
            not (folder / "config.json").exists()
            and (error := _explain_repository(name, revision, offline)) is not None
        ):
            raise error
        return folder
    except GatedRepoError as error:
        problem = "is gated: accept its licence on its page and log in with `hf auth login`"
        raise CheckpointError(problem, file=name) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"has no revision {revision!r}", file=name) from error
    except RepositoryNotFoundError as error:
        problem = "is not on the Hugging Face hub, or is private: check the name, or log in with `hf auth login`"
        raise CheckpointError(problem, file=name) from error
    except offline as error:
        problem = (
            "cannot be downloaded, and is not in the local cache: check the network, or give the path of a local folder"
        )
        raise CheckpointError(problem, file=name) from error
