"""Clusters that others have started: what their nodes lack is told, with the remedy."""

from __future__ import annotations

import pytest

from motley.cluster.edge.hook import HOOK, SPREAD
from motley.cluster.failures import ConfigurationError
from motley.cluster.join import joined, lacking
from motley.cluster.options import ServeOptions
from motley.cluster.serve import check
from motley.cluster.settings import node_settings


def test_what_nodes_lack_is_told_with_the_remedy() -> None:
    wanted = node_settings()
    well = {"RAY_AUTH_MODE": "token", **{setting.name: setting.value for setting in wanted}}
    assert {SPREAD, "FORWARDED_ALLOW_IPS"} < well.keys()
    assert well["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == HOOK, "Serve's own paths want no key"
    assert lacking(wanted, [("a", well), ("b", well)]) is None
    for setting in wanted:
        told = lacking(wanted, [("a", well), ("b", {**well, setting.name: None})])
        assert told is not None
        assert "node b" in told
        assert f"{setting.name}={setting.value or chr(39) * 2}" in told
    assert "RAY_AUTH_MODE=token" in str(lacking(wanted, [("a", {**well, "RAY_AUTH_MODE": "disabled"})]))
    assert "without it" in str(lacking(wanted, [("a", {**well, "RAY_SERVE_ENABLE_HA_PROXY": "1"})]))


def test_nobody_listens_there() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"--address 127\.0\.0\.1:9: nobody listens there"),
        joined("127.0.0.1:9", {}),
    ):
        pytest.fail("joined")


def test_an_address_is_for_fleet_files() -> None:
    with pytest.raises(ConfigurationError, match="--address: for a fleet file"):
        check(ServeOptions(address="auto"))
