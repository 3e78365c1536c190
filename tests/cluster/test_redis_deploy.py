"""The Redis of deploy/redis: over TLS, for one user, and for what Motley does."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from certificates import Certificates
from redis_over_tls import tls_by
from redis_stores import SERVERS
from serve_process import free_port, wait_for

from motley.cluster.fleet.deployed.prefix_sharing import PrefixSharing, prefix_access_factory
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.security.edge.ports import is_listening
from motley.replicas.kv.store.prefix_store import ValueQuery

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "redis"
PASSWORD = "not-what-the-example-has"
VALUE = b"value" * 1000

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@dataclass(frozen=True)
class Deployed:
    """folder: with what deploy/redis has, and certificates. own_tls: the server does it, rather than HAProxy."""

    folder: Path
    port: int
    own_tls: bool

    def url(self, host: str = "localhost", user: str = f"motley:{PASSWORD}", ca: Path | None = None) -> str:
        return f"rediss://{user}@{host}:{self.port}?ssl_ca_certs={ca or self.folder / 'ca.pem'}"


def certify(folder: Path, *hosts: str) -> None:
    subprocess.run(["./certificates.sh", *hosts], cwd=folder, check=True, capture_output=True)


def start(binary: str, folder: Path, port: int) -> tuple[subprocess.Popen[bytes], bool]:
    """A redis-server by redis.conf; one that was built without TLS by the rest of it, on a socket. Whether it does TLS.

    It listens on loopback alone, and has less memory: it is a test's.
    """
    conf, log = folder / "redis.conf", folder / "log"
    given = ["--bind", "127.0.0.1", "127.0.0.2", "--maxmemory", "64mb", "--logfile", str(log)]

    def run(*more: str) -> subprocess.Popen[bytes]:
        command = [binary, "redis.conf", *given, *more]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("wb"))

    process = run("--tls-port", str(port))
    wait_for(lambda: process.poll() is not None or is_listening("127.0.0.1", port), "redis-server")
    if process.poll() is None:
        return process, True
    said = (folder / "said").read_text() + (log.read_text() if log.exists() else "")
    no_tls = "Failed finding TLS support" in said or ("Bad directive" in said and ">>> 'tls-" in said)
    assert no_tls, f"all but TLS is understood: {said}"
    lines = conf.read_text().splitlines()
    conf.write_text("\n".join(line for line in lines if not line.startswith("tls-")) + "\n")
    path = folder / "redis.sock"
    process = run("--unixsocket", str(path))
    wait_for(lambda: process.poll() is not None or path.exists(), "redis-server")
    assert process.poll() is None, (folder / "said").read_text() + log.read_text()
    return process, False


@pytest.fixture(scope="module", params=SERVERS)
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed") / "redis"
    shutil.copytree(DEPLOY, folder)
    certify(folder, "localhost", "127.0.0.1")
    users = folder / "users.acl"
    users.write_text(users.read_text().replace("change-me", PASSWORD))
    port = free_port()
    process, own_tls = start(SERVERS[request.param].path, folder, port)
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        if not own_tls:
            port = stack.enter_context(tls_by(folder, folder / "redis.sock"))
        yield Deployed(folder, port, own_tls)


def store_of(url: str) -> RedisStore:
    """Return the store that a replica is given by `prefix_cache.store`."""
    cache = {"store": url, "tenant_memory": "1MiB"}
    spec = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}], "prefix_cache": cache})
    make = prefix_access_factory(spec.prefix_cache, PrefixSharing(secret=b"s" * 32))
    assert make is not None
    store = make().store
    assert isinstance(store, RedisStore)
    return store


def test_prefixes_are_stored_and_read_there(deployed: Deployed) -> None:
    """And forgotten: with all that Motley asks of a Redis the user of the ACL is content."""
    for host in ("localhost", "127.0.0.1"):
        store = store_of(deployed.url(host))
        try:
            wait_for(lambda store=store: store._connections.alive, "a connection")
            wanted, deadline = ValueQuery(host.encode(), len(VALUE)), time.monotonic() + 20
            assert store.claim(wanted, deadline)
            assert store.put(wanted.key, [VALUE], "ann")
            store.flush(deadline)
            [found] = store.get([wanted], deadline)
            assert found is not None
            assert bytes(found[0]) == VALUE
            [parts] = store.get([ValueQuery(wanted.key, len(VALUE), ((0, 7), (9, 20)))], deadline)
            assert parts is not None
            assert [bytes(part) for part in parts] == [VALUE[:7], VALUE[9:20]]
            assert store.count_stored([wanted], "ann", deadline) == 1
            store.forget("ann")
            wait_for(lambda store=store: not store._epochs.pending_forgets(), "Redis to know")
            assert not store.stats().errors
            assert store.stats().stored == 1
        finally:
            store.close()


@pytest.mark.parametrize("wrong", ["authority", "host", "password", "user"])
def test_nobody_else_is_let_in_and_nothing_is_told_to_another_server(
    deployed: Deployed, wrong: str, tmp_path: Path
) -> None:
    url = {
        "authority": deployed.url(ca=Certificates(tmp_path).ca),
        "host": deployed.url("127.0.0.2"),  # its certificate is not for that
        "password": deployed.url(user="motley:change-me"),
        "user": deployed.url(user=""),
    }[wrong]
    store = store_of(url)
    try:
        wait_for(lambda: store.stats().errors, "a refusal")
        assert not store._connections.alive
        assert store.get([ValueQuery(b"k", 1)], time.monotonic() + 5) == [None]
    finally:
        store.close()


def test_the_user_may_do_what_motley_does_and_no_more(deployed: Deployed) -> None:
    with redis.Redis.from_url(deployed.url(), ssl_check_hostname=True) as client:
        assert client.ping()
        for words in (("CONFIG", "GET", "*"), ("KEYS", "*"), ("FLUSHALL",), ("GET", "of another"), ("EVAL", "", "0")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


def test_without_tls_nobody_is_heard(deployed: Deployed) -> None:
    with redis.Redis(port=deployed.port, socket_timeout=10) as client, pytest.raises(redis.exceptions.RedisError):
        client.ping()


def test_what_is_secret_is_its_owners_alone(deployed: Deployed) -> None:
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((deployed.folder / name).stat().st_mode) & 0o77 == 0
    assert not list(deployed.folder.glob("*.csr"))


def test_another_certificate_is_of_the_same_authority(tmp_path: Path) -> None:
    """So that nodes need nothing new when one runs out."""
    shutil.copy(DEPLOY / "certificates.sh", tmp_path)
    certify(tmp_path, "one.internal", "10.0.0.7", "fd00::7")
    first = {name: (tmp_path / name).read_bytes() for name in ("ca.pem", "server.pem")}
    told = openssl(tmp_path, "x509", "-in", "server.pem", "-noout", "-ext", "subjectAltName")
    assert "DNS:one.internal, IP Address:10.0.0.7, IP Address:FD00" in told
    certify(tmp_path, "two.internal")
    assert (tmp_path / "ca.pem").read_bytes() == first["ca.pem"]
    assert (tmp_path / "server.pem").read_bytes() != first["server.pem"]
    assert "OK" in openssl(tmp_path, "verify", "-x509_strict", "-CAfile", "ca.pem", "server.pem")


@pytest.mark.parametrize("hosts", [[], ["a,DNS:b"], [""], ["a\nb"]])
def test_what_is_no_host_gets_no_certificate(hosts: list[str], tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "certificates.sh", tmp_path)
    ended = subprocess.run(["./certificates.sh", *hosts], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 2
    assert os.listdir(tmp_path) == ["certificates.sh"]


def openssl(folder: Path, *words: str) -> str:
    return subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, text=True).stdout
