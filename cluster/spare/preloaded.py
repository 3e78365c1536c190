"""Ray imports it in each worker process as that begins (settings.py): to be imported is all that it is for."""

from __future__ import annotations

from .process import begin

begin()
