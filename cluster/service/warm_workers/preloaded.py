"""Module that Ray imports in each worker process as it starts (ray_settings.py); it only serves to be imported."""

from __future__ import annotations

from .warm_worker import begin_warm_worker

begin_warm_worker()
