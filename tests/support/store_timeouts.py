"""Patience with prefix stores: what a busy machine takes long for is waited for."""

from __future__ import annotations

import pytest

from motley.replicas.engine.kv_reuse import fetch_scheduler
from motley.replicas.kv.store import fetch_cost, store_worker

__all__ = ["be_patient"]


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline of a fetch, or of a question, passes."""
    for module in (fetch_cost, store_worker):
        monkeypatch.setattr(module, "MAX_READ_S", 60.0)
    monkeypatch.setattr(fetch_scheduler, "_GRACE_S", 60.0)
