"""`motley keys`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motley.cli.app import run
from motley.cluster.security.auth.key_file import KeyFile, read_keys


def new(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["keys", "new", *arguments, "--file", str(path)]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_is_shown_once_and_works_until_it_is_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    first, second = new(path, capsys, "alice"), new(path, capsys, "bob", "--days", "1")
    keys = KeyFile(path)
    assert (keys.tenant_of(first), keys.tenant_of(second)) == ("alice", "bob")
    assert first not in path.read_text()
    assert run(["keys", "list", "--file", str(path), "--json"]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(shown)["keys"]
    assert [(row["tenant"], row["expires"] is None) for row in rows] == [("alice", True), ("bob", False)]
    assert first not in shown
    assert run(["keys", "revoke", first, "--file", str(path)]) == 0
    assert run(["keys", "revoke", rows[1]["id"], "--file", str(path)]) == 0
    assert read_keys(path) == ()


def test_all_keys_of_a_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    for tenant in ("alice", "alice", "bob"):
        new(path, capsys, tenant)
    assert run(["keys", "revoke", "alice", "--tenant", "--file", str(path)]) == 0
    assert [key.tenant for key in read_keys(path)] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["new", "a b"], 1, "a b"),
        (["new", "alice", "--days", "0"], 2, "days"),
        (["list"], 1, "motley keys new"),
        (["revoke", "nobody"], 2, "no such key"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, named: str
) -> None:
    assert run(["keys", *arguments, "--file", str(tmp_path / "keys.yaml")]) == status
    [line] = capsys.readouterr().err.strip().splitlines()
    assert named in line
