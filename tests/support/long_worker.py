"""A scripted worker with room for tools: their descriptions are long where every byte is a token."""

from __future__ import annotations

from dataclasses import replace

from scripted_worker import ScriptedWorker

from motley.replicas.types import ReplicaProfile


class LongWorker(ScriptedWorker):
    def profile(self) -> ReplicaProfile:
        profile = super().profile()
        return replace(profile, model=replace(profile.model, max_model_len=8192))
