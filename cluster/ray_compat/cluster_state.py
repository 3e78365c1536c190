"""State of this process's Ray cluster: records in its GCS, and how it compares nodes with what replicas need."""

from __future__ import annotations

from collections.abc import Mapping

_NAMESPACE = b"motley"


def read_record(key: bytes) -> bytes | None:
    """Return a record that Motley has written into Ray's GCS, which the cluster's token protects; None if there is
    none.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(key, namespace=_NAMESPACE)
    return found


def write_record(key: bytes, value: bytes) -> None:
    """Write a record, in place of the one with that key. Raises ray.exceptions.RayError, RuntimeError or OSError if
    Ray's GCS does not take it.
    """
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def create_record(key: bytes, value: bytes) -> bool:
    """Write a record unless there is one with that key; return whether it was written. Raises as `write_record`."""
    from ray.experimental.internal_kv import _internal_kv_put

    return not _internal_kv_put(key, value, overwrite=False, namespace=_NAMESPACE)


def list_records(prefix: bytes) -> list[bytes]:
    """Return the keys of all records that begin with these bytes."""
    from ray.experimental.internal_kv import _internal_kv_list

    found: list[bytes] = _internal_kv_list(prefix, namespace=_NAMESPACE)
    return found


def delete_record(key: bytes) -> None:
    """Delete a record, if there is one with that key."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=_NAMESPACE)


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return what is free of each living node's resources now, by the node's id."""
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def labels_match(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a node with these labels is one that the selector takes, as Serve decides it."""
    from ray.serve._private.deployment_scheduler import node_labels_match_selector

    return bool(node_labels_match_selector(labels, selector))
