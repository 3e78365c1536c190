"""Salts that separate the prefixes of tenants are the same in every ingress of a service, and in services with one
secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.common.parsed_request import ParsedRequest
from motley.cluster.fleet.deployed.prefix_sharing import choose_prefix_sharing
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.service.deployment.routing_settings import fleet_routing_config
from motley.cluster.transport.caller import Caller

FLEET = {"model": "demo", "pools": [{"name": "cpu"}]}


TENANTS = ("alice", "bob", "carol", "lab")


async def ingress_of(folder: Path, ingress_config: IngressConfig | None) -> Any:
    return await make_ingress(folder, ScriptedWorker(str(folder), ()), ingress_config=ingress_config)


async def salts_of(ingress: Any, tenants: Sequence[str] = TENANTS) -> list[bytes]:
    callers = [Caller(tenant=tenant) for tenant in tenants]
    return [(await ingress.admitter.admit(ParsedRequest("", "a"), caller)).request.cache_salt for caller in callers]


async def salts(folder: Path, ingress_config: IngressConfig | None) -> list[bytes]:
    """Return the salts of two tenants, by an ingress of its own."""
    return await salts_of(await ingress_of(folder, ingress_config), TENANTS[:2])


async def test_all_ingresses_of_a_service_have_the_same(folder: Path) -> None:
    ingress_config = IngressConfig()
    one, other = await salts(folder, ingress_config), await salts(folder, ingress_config)
    assert one == other
    assert len(set(one)) == 2
    assert await salts(folder, None) != one, "nobody outside can know it"


async def test_tenants_of_a_group_share(folder: Path) -> None:
    """Nobody else does: not who is called as the group is, and none when the group is there no more."""
    tenants = {"alice": {"cache_group": "lab"}, "bob": {"cache_group": "lab", "weight": 2}, "carol": {}}
    routing = fleet_routing_config(FleetSpec.model_validate({**FLEET, "tenants": tenants}))
    ingress = await ingress_of(folder, IngressConfig(routing=routing))
    alice, bob, carol, lab = await salts_of(ingress)
    assert alice == bob
    assert len({alice, carol, lab}) == 3
    await ingress.use_pools(["cpu"], fleet_routing_config(FleetSpec.model_validate(FLEET)))
    assert len({alice, *await salts_of(ingress)}) == 5


def test_it_follows_from_the_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    spec = FleetSpec.model_validate({**FLEET, "prefix_cache": {"secret": str(secret)}})
    one, again = choose_prefix_sharing(spec), choose_prefix_sharing(spec, secret=b"x" * 32)
    assert one.salt == again.salt, "the file that is named says it"
    assert one.salt not in one.secret
    bare = FleetSpec.model_validate(FLEET)
    assert choose_prefix_sharing(bare).salt != choose_prefix_sharing(bare).salt
    assert choose_prefix_sharing(bare, secret=b"x" * 32).salt == choose_prefix_sharing(bare, secret=b"x" * 32).salt, (
        "a service keeps its own"
    )
    assert "salt" not in repr(IngressConfig(salt=one.salt))
