from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from admin_door import Plane, admin_door


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with admin_door() as plane:
        yield plane
