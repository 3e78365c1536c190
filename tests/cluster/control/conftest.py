from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from admin_server import Plane, admin_server


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with admin_server() as plane:
        yield plane
