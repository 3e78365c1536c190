"""Certificate of the edge, checked before anything is started."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...service_errors import ConfigurationError

MINIMUM = "TLSv1.2"


@dataclass(frozen=True, slots=True)
class EdgeTls:
    """PEM files of the edge. `client_ca`: clients need a certificate that it signed; None: they need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def bind(self, folder: Path) -> str:
        """Return the TLS words of HAProxy's `bind`. Links the files into `folder`, where HAProxy looks for the key."""
        cert = folder / "edge.pem"
        _link(cert, self.cert)
        _link(folder / "edge.pem.key", self.key)
        options = f"ssl crt {cert} ssl-min-ver {MINIMUM}"
        if self.client_ca is not None:
            ca = folder / "clients.pem"
            _link(ca, self.client_ca)
            options += f" ca-file {ca} verify required"
        return options


def choose_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> EdgeTls | None:
    """Return the TLS files; None without a certificate. Raises ConfigurationError naming the flag and what is wrong
    with its file.
    """
    if cert is None and key is None:
        if client_ca is not None:
            raise _bad("--client-ca", "give --tls-cert and --tls-key too")
        return None
    if cert is None or key is None:
        given, missing = (f"--tls-key {key}", "--tls-cert") if cert is None else (f"--tls-cert {cert}", "--tls-key")
        raise _bad(given, f"a certificate and its key go together; give {missing} too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _try(f"--tls-cert {cert}", lambda: context.load_verify_locations(cert))
    _try(f"--tls-key {key}", lambda: context.load_cert_chain(cert, key, password=_no_password))
    if client_ca is not None:
        _try(f"--client-ca {client_ca}", lambda: context.load_verify_locations(client_ca))
    return EdgeTls(cert.resolve(), key.resolve(), client_ca.resolve() if client_ca is not None else None)


def _no_password() -> str:
    raise ConfigurationError(
        "--tls-key: the key is protected by a password; give one without", param="tls_key", code="bad_tls"
    )


def _try(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as error:  # ssl.SSLError is one
        raise _bad(what, f"{error.strerror or error}".lower()) from None


def _link(path: Path, target: Path) -> None:
    if not path.is_symlink():
        os.symlink(target, path)


def _bad(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{what}: {why}", param=what.split()[0].lstrip("-").replace("-", "_"), code="bad_tls")
