"""Choice of the replica for each request in a fleet file."""

from __future__ import annotations

import inspect
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from ....replicas.errors import InvalidRequest
from ...routing.policy.routing_policies import DEFAULT_POLICY, ROUTING_POLICIES, create_routing_policy
from .value_types import Spec, spec_error

__all__ = ["RoutingSpec"]


def _check_policy(name: str) -> str:
    try:
        create_routing_policy(name)
    except InvalidRequest as error:
        raise spec_error(error.message.partition(": ")[2]) from None
    return name


def _meanings() -> str:
    texts = ((name, (inspect.getdoc(policy) or "").partition("\n")[0]) for name, policy in ROUTING_POLICIES.items())
    return "; ".join(f"{name}: {text[:1].lower()}{text[1:].rstrip('.')}" for name, text in texts)


class RoutingSpec(Spec):
    """Choice of the replica for each request."""

    policy: Annotated[
        str,
        AfterValidator(_check_policy),
        WithJsonSchema({"type": "string", "enum": list(ROUTING_POLICIES)}),
        Field(description=f"Policy that chooses the replica. {_meanings()}."),
    ] = DEFAULT_POLICY
