"""Patience with prefix stores: what a busy machine takes long for is waited for."""

from __future__ import annotations

import pytest

from motley.replicas.prefix import courier, fetches, prospects

__all__ = ["be_patient"]


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline of a fetch, or of a question, passes."""
    for module in (prospects, courier):
        monkeypatch.setattr(module, "READ_S", 60.0)
    monkeypatch.setattr(fetches, "_GRACE_S", 60.0)
