"""Triton's kernels run in its interpreter here, which and the compiler cannot share a process."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
