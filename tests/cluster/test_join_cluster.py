"""Clusters that others have started: what their nodes lack is told, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Certificates

from motley.cluster.fleet.control.control_launcher import choose_endpoint
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.security.auth.api_keys import StoredKey, hash_key
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.security.edge.serve_patches import FORMER_HOOK, HOOK, SPREAD
from motley.cluster.service.startup.access_options import check_access
from motley.cluster.service.startup.join_cluster import join_cluster, missing_setting
from motley.cluster.service.startup.ray_settings import node_settings
from motley.cluster.service.startup.serve_command import check
from motley.cluster.service_errors import ConfigurationError


def test_what_nodes_lack_is_told_with_the_remedy() -> None:
    wanted = node_settings()
    well = {"RAY_AUTH_MODE": "token", **{setting.name: setting.value for setting in wanted}}
    assert {SPREAD, "FORWARDED_ALLOW_IPS"} < well.keys()
    assert well["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == HOOK, "Serve's own paths want no key"
    assert missing_setting(wanted, [("a", well), ("b", well)]) is None
    former = {**well, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": FORMER_HOOK}
    assert missing_setting(wanted, [("a", former)]) is None, "nodes that an earlier version's remedy has started"
    for setting in wanted:
        told = missing_setting(wanted, [("a", well), ("b", {**well, setting.name: None})])
        assert told is not None
        assert "node b" in told
        assert f"{setting.name}={setting.value or chr(39) * 2}" in told
    assert "RAY_AUTH_MODE=token" in str(missing_setting(wanted, [("a", {**well, "RAY_AUTH_MODE": "disabled"})]))
    assert "without it" in str(missing_setting(wanted, [("a", {**well, "RAY_SERVE_ENABLE_HA_PROXY": "1"})]))


def test_nobody_listens_there() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"--address 127\.0\.0\.1:9: nobody listens there"),
        join_cluster("127.0.0.1:9", {}),
    ):
        pytest.fail("joined")


def test_an_address_is_for_fleet_files() -> None:
    with pytest.raises(ConfigurationError, match="--address: it is accepted with a fleet file only"):
        check(ServeOptions(address="auto"))


def test_a_certificate_on_a_cluster_is_the_control_planes(tmp_path: Path) -> None:
    """Its pods reach the control plane, KEDA's operator too; before HTTP and gRPC something else ends TLS."""
    certificates, keys = Certificates(tmp_path), tmp_path / "keys.yaml"
    write_keys(keys, [StoredKey("alice", hash_key("mk-alice"))])
    given = ServeOptions(address="auto", api_keys=keys, tls_cert=certificates.cert, tls_key=certificates.key)
    with pytest.raises(ConfigurationError, match="--admin-host"):
        check_access(given)
    reached = replace(given, admin_host="0.0.0.0")
    for options in (reached, replace(reached, host="0.0.0.0", tls_terminated_upstream=True)):
        check_access(options)
        assert choose_endpoint(options).tls is not None
    with pytest.raises(ConfigurationError, match=r"--host .*in the clear"):
        check_access(replace(reached, host="0.0.0.0"))
    with pytest.raises(ConfigurationError, match=r"--admin-host .*in the clear"):
        check_access(replace(reached, tls_cert=None, tls_key=None))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        check_access(replace(reached, address=None, tls_terminated_upstream=True))
