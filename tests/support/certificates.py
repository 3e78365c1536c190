"""An authority, a server's certificate and a client's, for TLS in tests."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = datetime.timedelta(days=1)


class Certificates:
    """Files in `folder`: ca.pem, server.pem and .key (for localhost and 127.0.0.1), client.pem and .key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(_pem(self._signed(self._name, self._key.public_key(), authority=True)))
        self.cert, self.key = self._issue("server")
        self.client_cert, self.client_key = self._issue("client")

    def client_context(self, *, own: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if own:
            context.load_cert_chain(self.client_cert, self.client_key)
        return context

    def channel_credentials(self, *, own: bool = True) -> grpc.ChannelCredentials:
        pair = (self.client_key.read_bytes(), self.client_cert.read_bytes()) if own else (None, None)
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), *pair)

    def _issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        cert_path, key_path = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_path.write_bytes(_pem(self._signed(_name(name), key.public_key())))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def _signed(self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = x509.CertificateBuilder(self._name, name, key, x509.random_serial_number(), now - VALID, now + VALID)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
