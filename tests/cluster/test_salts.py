"""What separates the prefixes of tenants is the same in every ingress of a service, and in services with one secret."""

from __future__ import annotations

from pathlib import Path

from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.ask import Ask
from motley.cluster.caller import Caller
from motley.cluster.entrance import Entrance
from motley.cluster.fleet.spec import FleetSpec
from motley.cluster.prefix.shared import settle

FLEET = {"model": "demo", "pools": [{"name": "cpu"}]}


async def salts(folder: Path, entrance: Entrance | None) -> list[bytes]:
    """Of two tenants, by an ingress of its own."""
    ingress = await make_ingress(folder, ScriptedWorker(str(folder), ()), entrance=entrance)
    callers = [Caller(tenant=tenant) for tenant in ("alice", "bob")]
    return [(await ingress.door.admit(Ask("", "a"), caller)).request.cache_salt for caller in callers]


async def test_all_ingresses_of_a_service_have_the_same(folder: Path) -> None:
    entrance = Entrance()
    one, other = await salts(folder, entrance), await salts(folder, entrance)
    assert one == other
    assert len(set(one)) == 2
    assert await salts(folder, None) != one, "nobody outside can know it"


def test_it_follows_from_the_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    spec = FleetSpec.model_validate({**FLEET, "prefix_cache": {"secret": str(secret)}})
    one, again = settle(spec), settle(spec, secret=b"x" * 32)
    assert one.salt == again.salt, "the file that is named says it"
    assert one.salt not in one.secret
    bare = FleetSpec.model_validate(FLEET)
    assert settle(bare).salt != settle(bare).salt
    assert settle(bare, secret=b"x" * 32).salt == settle(bare, secret=b"x" * 32).salt, "a service keeps its own"
    assert "salt" not in repr(Entrance(salt=one.salt))
