"""Certificates for TLS on loopback: a CA with a good certificate, and those that a client must refuse."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate (with its chain) and its unencrypted PKCS#8 key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Everything that a TLS test needs; each pair serves for both ends."""

    ca: Path
    good: Pair
    """For localhost, 127.0.0.1 and ::1, of ``ca``."""
    wrong_name: Pair
    """For wrong.example, of ``ca``."""
    expired: Pair
    """For localhost, of ``ca``, ended yesterday."""
    client: Pair
    """A client's, of ``ca``."""
    other_ca: Path
    unknown: Pair
    """For localhost, of ``other_ca``: nobody trusts it."""


class Authority:
    """A CA that lives in one folder."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * _DAY)
            .not_valid_after(now + 30 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, hosts: tuple[str, ...], *, days: int = 30) -> Pair:
        """Issue a certificate for these names and addresses; with negative ``days`` it has ended already."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_subject(hosts[0]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pem = serialization.Encoding.PEM
        pair.certificate.write_bytes(certificate.public_bytes(pem) + self._certificate.public_bytes(pem))
        pair.key.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        pair.key.chmod(0o600)
        return pair


def make_certificates(directory: Path) -> Certificates:
    """Make all of them in a folder; a few milliseconds."""
    ca, other = Authority(directory, "ca"), Authority(directory, "other-ca")
    local = ("localhost", "127.0.0.1", "::1")
    return Certificates(
        ca=ca.file,
        good=ca.issue("good", local),
        wrong_name=ca.issue("wrong-name", ("wrong.example",)),
        expired=ca.issue("expired", local, days=-1),
        client=ca.issue("client", ("client.example",)),
        other_ca=other.file,
        unknown=other.issue("unknown", local),
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
