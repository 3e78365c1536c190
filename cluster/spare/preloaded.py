"""Module that Ray imports in each worker process as it starts (settings.py); it only serves to be imported."""

from __future__ import annotations

from .process import begin

begin()
