"""API keys: made, stored as hashes, read back, compared; and who may bind and call with and without them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.security.auth import key_file
from motley.cluster.security.auth.api_keys import (
    MAX_KEYS,
    PREFIX,
    KeyRing,
    Scope,
    StoredKey,
    check_tenant,
    hash_key,
    new_key,
    read_expiry,
)
from motley.cluster.security.auth.call_guard import CallGuard, check_bind, credentials
from motley.cluster.security.auth.key_file import KeyFile, edit_keys, read_keys, write_keys
from motley.cluster.service.startup.access_options import (
    check_access,
    choose_ingress_config,
    choose_internal_client,
)
from motley.cluster.service_errors import ConfigurationError, Unauthenticated

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
KEYS = st.builds(
    StoredKey,
    NAMES,
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.none() | st.integers(0, 4_000_000_000).map(float),
    st.sampled_from(get_args(Scope)),
)


def stored(tenant: str, key: str, expires: float | None = None) -> StoredKey:
    return StoredKey(tenant, hash_key(key), expires)


def test_keys_are_random_and_known_by_their_prefix() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) == len(PREFIX) + 43 for key in keys), "256 bits in base64"


def test_a_ring_knows_whose_key_it_is() -> None:
    a, b, c = new_key(), new_key(), new_key()
    ring = KeyRing([stored("alice", a), stored("alice", b), stored("bob", c)])
    assert [ring.tenant_of(key) for key in (a, b, c)] == ["alice", "alice", "bob"]
    for wrong in ("", "x", a[:-1], a + "x", a.upper(), f" {a}", hash_key(a), "\udcff", "x" * 10_000):
        assert ring.tenant_of(wrong) is None


def test_an_admins_key_opens_the_control_plane_and_nothing_else(tmp_path: Path) -> None:
    tenant, admin = new_key(), new_key()
    path = tmp_path / "keys.yaml"
    with edit_keys(path) as keys:
        keys += [stored("alice", tenant), StoredKey("ops", hash_key(admin), scope="admin")]
    both = KeyFile(path)
    assert (both.tenant_of(tenant), both.admin_of(tenant)) == ("alice", None)
    assert (both.tenant_of(admin), both.admin_of(admin)) == (None, "ops")
    assert KeyRing([StoredKey("ops", hash_key(admin), 1000.0, scope="admin")]).admin_of(admin, now=1000.0) is None
    path.write_text(path.read_text().replace("scope: admin", "scope: god"))
    with pytest.raises(ConfigurationError, match="scope 'god' is not accepted"):
        read_keys(path)
    with edit_keys(tmp_path / "admins.yaml") as keys:
        keys.append(StoredKey("ops", hash_key(admin), scope="admin"))
    with pytest.raises(ConfigurationError, match="no tenant's keys"):
        check_access(ServeOptions(api_keys=tmp_path / "admins.yaml"))


def test_the_admin_port_is_off_loopback_with_keys_and_tls_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--admin-host 0\.0\.0\.0 would let"):
        check_access(ServeOptions(admin_host="0.0.0.0"))
    check_access(ServeOptions(admin_host="::1"))


def test_every_entry_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [new_key() for _ in range(5)]
    ring = KeyRing(stored("t", key) for key in keys)
    compared: list[str] = []

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("motley.cluster.security.auth.api_keys.hmac.compare_digest", compare)
    for key in (keys[0], keys[4], "wrong", "x" * 10_000):
        compared.clear()
        ring.tenant_of(key)
        assert compared == [hash_key(one) for one in keys], "whichever it is, and when it is none"


def test_keys_end() -> None:
    key = new_key()
    ring = KeyRing([stored("alice", key, expires=1000.0)])
    assert ring.tenant_of(key, now=999.9) == "alice"
    assert ring.tenant_of(key, now=1000.0) is None


def test_one_key_of_two_tenants_is_refused() -> None:
    key = new_key()
    with pytest.raises(ConfigurationError, match=r"alice.*|bob.*"):
        KeyRing([stored("alice", key), stored("bob", key)])
    with pytest.raises(ConfigurationError, match=str(MAX_KEYS)):
        KeyRing(StoredKey("t", f"{number:064x}") for number in range(MAX_KEYS + 1))


@pytest.mark.parametrize("name", ["", "a b", "_motley", "-x", "x" * 65, "é", "a/b", "a\n"])
def test_names_of_tenants(name: str) -> None:
    with pytest.raises(ConfigurationError, match="tenant"):
        check_tenant(name)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@settings(max_examples=25)
@given(keys=st.lists(KEYS, max_size=20, unique_by=lambda key: key.sha256))
def test_what_is_written_is_read_back(
    suffix: str, tmp_path_factory: pytest.TempPathFactory, keys: list[StoredKey]
) -> None:
    path = tmp_path_factory.mktemp("keys") / f"keys.{suffix}"
    write_keys(path, keys)
    assert sorted(read_keys(path), key=str) == sorted(keys, key=str)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_written_by_hand(tmp_path: Path) -> None:
    one, two, three = (hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two", "three"))
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants:\n  alice: {one}\n  bob:\n  - {two}\n  - {{sha256: {three}, expires: 2030-01-01}}\n")
    path.chmod(0o644)
    assert read_keys(path) == (
        StoredKey("alice", one),
        StoredKey("bob", two),
        StoredKey("bob", three, read_expiry("2030-01-01T00:00:00Z", "")),
    )
    path.write_text(json.dumps({"tenants": {"alice": [one]}}))
    assert read_keys(path) == (StoredKey("alice", one),)


HEX = "0" * 64


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "tenants"),
        ("[]", "tenants"),
        ("tenants: 1", "tenants"),
        (f"tenants: {{a: ['{HEX}']}}\nmore: 1", "tenants"),
        ("tenants: {a: [key]}", "SHA-256"),
        (f"tenants: {{a: ['{HEX.replace('0', 'A')}']}}", "SHA-256"),
        ("tenants: {a: [1]}", r"a\[0\]"),
        ("tenants: {a: [{expires: 2030-01-01}]}", r"a\[0\]"),
        (f"tenants: {{a: [{{sha256: '{HEX}', expire: 2030-01-01}}]}}", "expire"),
        (f"tenants: {{a: [{{sha256: '{HEX}', expires: soon}}]}}", "soon"),
        *(
            (f"tenants: {{a: [{{sha256: '{HEX}', expires: {bad}}}]}}", told)
            for bad, told in (
                (".nan", "nan"),
                (".inf", "inf"),
                ("1.0e+300", "1e"),
                ("true", "True"),
                ("-1", "-1"),
                ("0x10", "16"),
                ("1" + "0" * 400, "1000"),
                ("9" * 5000, "neither YAML"),
                ("2027-02-30", "neither YAML"),
                ("'0001-01-01T00:00:00+23:59'", "from 1970 to 9999"),
                ("'1969-12-31'", "from 1970 to 9999"),
                ("'9999-12-31T23:59:59-23:59'", "from 1970 to 9999"),
            )
        ),
        (f"tenants: {{'a b': ['{HEX}']}}", "a b"),
        (f"tenants: {{_motley: ['{HEX}']}}", "_motley"),
        (f"tenants: {{a: ['{HEX}'], a: ['{'1' * 64}']}}", "twice"),
        ("tenants: {a: [", "YAML"),
        ("!!python/object/apply:os.system ['true']", "YAML"),
        ("\x00", "YAML"),
    ],
)
def test_files_that_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named) as caught:
        read_keys(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [])
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_keys(path)


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="motley keys new"):
        read_keys(tmp_path / "keys.yaml")
    path = tmp_path / "large.yaml"
    path.write_bytes(b" " * (key_file.MAX_BYTES + 1))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="larger"):
        read_keys(path)


def test_a_change_is_seen_and_a_bad_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "RELOAD_S", 0.0)
    path, old, new = tmp_path / "keys.yaml", new_key(), new_key()
    write_keys(path, [stored("alice", old)])
    own = new_key()
    keys = KeyFile(path, [stored("_motley", own)])
    assert (keys.tenant_of(old), keys.tenant_of(new)) == ("alice", None)
    with edit_keys(path) as list_:
        list_[:] = [stored("bob", new)]
    assert (keys.tenant_of(old), keys.tenant_of(new), keys.tenant_of(own)) == (None, "bob", "_motley")
    for spoil in (lambda: path.write_text("tenants: {"), path.unlink):
        caplog.clear()
        spoil()
        assert (keys.tenant_of(new), keys.tenant_of(old)) == ("bob", None)
        assert str(path) in caplog.text
    write_keys(path, [stored("alice", old)])
    assert keys.tenant_of(old) == "alice"


def test_an_edit_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [stored("alice", "k")])
    before = path.read_bytes()
    key = stored("bob", "l")
    with pytest.raises(ConfigurationError), edit_keys(path) as keys:
        keys += [key, key]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["keys.yaml"]


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], set()),
        ([("authorization", "Bearer k")], {"k"}),
        ([("Authorization", "bearer  k ")], {"k"}),
        ([("X-API-Key", "k")], {"k"}),
        ([("authorization", "Bearer k"), ("x-api-key", "k")], {"k"}),
        ([("authorization", "Bearer k"), ("x-api-key", "l")], {"k", "l"}),
        ([("authorization", "Bearer k"), ("authorization", "Bearer l")], {"k", "l"}),
        ([("authorization", "Basic k")], {""}),
        ([("authorization", "k")], {""}),
        ([("api-key", "k"), ("cookie", "k")], set()),
    ],
)
def test_where_keys_are_looked_for(headers: list[tuple[str, str]], found: set[str]) -> None:
    assert credentials(headers) == found


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def test_the_answer_is_the_same_whatever_was_wrong() -> None:
    good, old = new_key(), new_key()
    guard = CallGuard(KeyRing([stored("alice", good), stored("bob", old, expires=time.time() - 1)]))
    assert guard.tenant("10.0.0.1", bearer(good), host="example.com") == "alice"
    bad = [[], bearer(""), bearer("x"), bearer(old), bearer(good) + bearer(old), [("authorization", good)]]
    told = set()
    for headers in bad:
        with pytest.raises(Unauthenticated) as caught:
            guard.tenant("127.0.0.1", headers, host="localhost")
        told.add((caught.value.message, caught.value.code, caught.value.param))
    assert len(told) == 1


def test_health_is_closed_unless_opened() -> None:
    ring = KeyRing([stored("alice", "k")])
    with pytest.raises(Unauthenticated):
        CallGuard(ring).tenant("127.0.0.1", [], health=True)
    open_ = CallGuard(ring, open_health=True)
    assert open_.tenant("10.0.0.1", [], health=True) == ""
    assert open_.tenant("10.0.0.1", bearer("k"), health=True) == "alice"
    with pytest.raises(Unauthenticated):
        open_.tenant("127.0.0.1", [])


@pytest.mark.parametrize(
    ("host", "keys", "tls", "upstream", "code"),
    [
        ("127.0.0.1", False, False, False, None),
        ("127.0.0.1", True, False, False, None),
        ("127.0.0.1", False, True, False, "keys_required"),
        ("127.0.0.1", False, False, True, "keys_required"),
        ("0.0.0.0", False, False, False, "keys_required"),
        ("0.0.0.0", True, False, False, "tls_required"),
        ("0.0.0.0", True, True, False, None),
        ("::", True, False, True, None),
        ("0.0.0.0", False, True, False, "keys_required"),
    ],
)
def test_what_may_be_bound(host: str, keys: bool, tls: bool, upstream: bool, code: str | None) -> None:
    try:
        check_bind(host, keys=keys, tls=tls, tls_upstream=upstream)
        found = None
    except ConfigurationError as error:
        found = error.code
    assert found == code


ORIGINS = [
    "example.com",
    "https://",
    "https://a.example/",
    "https://a.example/x",
    "ftp://a.example",
    "null",
    "https://u@a",
]


@pytest.mark.parametrize("origins", [[one] for one in ORIGINS] + [["*", "https://a.example"]])
def test_origins_that_are_none(origins: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="--cors-origin"):
        check_access(ServeOptions(cors_origins=tuple(origins)))
    check_access(ServeOptions(cors_origins=("https://a.example", "http://localhost:3000")))
    check_access(ServeOptions(cors_origins=("*",)))


def test_a_service_that_nobody_could_call_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [])
    with pytest.raises(ConfigurationError, match="motley keys new"):
        check_access(ServeOptions(api_keys=path))
    write_keys(path, [stored("alice", "k")])
    check_access(ServeOptions(api_keys=path))
    with pytest.raises(ConfigurationError, match="--tls-terminated-upstream"):
        check_access(ServeOptions(api_keys=path, host="0.0.0.0"))
    check_access(ServeOptions(api_keys=path, host="0.0.0.0", tls_terminated_upstream=True))


def test_what_travels_to_the_ingress_holds_no_key(tmp_path: Path) -> None:
    options = ServeOptions(api_keys=tmp_path / "keys.yaml")
    inside = choose_internal_client(options, None)
    ingress_config = choose_ingress_config(options, inside, tmp_path)
    assert ingress_config.own_key is not None
    assert ingress_config.own_key.sha256 == hash_key(inside.key)
    assert inside.key not in repr(ingress_config)
    assert choose_internal_client(ServeOptions(), None).key == ""
    assert choose_ingress_config(ServeOptions(), choose_internal_client(ServeOptions(), None), tmp_path).own_key is None
