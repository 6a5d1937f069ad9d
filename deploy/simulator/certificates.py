"""Keys and certificates: a CA, server certificates good and bad, a client certificate, and an APNs AuthKey.

Files in the state directory are used again when they are there, so a simulator that is started again is the same
APNs to its clients.
"""

import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_VALIDITY = 3650 * _DAY


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PKCS #8, as Apple's .p8 files are."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
    )


def new_ca(common_name: str) -> Identity:
    key, name = new_key(), _name(common_name)
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key, now - _DAY, now + _VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Identity(certificate, key)


def _alternative_names(names: Sequence[str]) -> x509.SubjectAlternativeName:
    entries: list[x509.GeneralName] = []
    for name in names:
        try:
            entries.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            entries.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(entries)


def issue(
    ca: Identity | None,
    common_name: str,
    names: Sequence[str],
    server: bool,
    starts_in: datetime.timedelta = -_DAY,
    ends_in: datetime.timedelta = _VALIDITY,
) -> Identity:
    """A leaf certificate; `ca` None: signed by itself."""
    key = new_key()
    subject = _name(common_name)
    issuer = subject if ca is None else ca.certificate.subject
    signer = key if ca is None else ca.key
    now = datetime.datetime.now(datetime.UTC)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(subject, issuer, key, now + starts_in, now + ends_in)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names:
        builder = builder.add_extension(_alternative_names(names), critical=False)
    return Identity(builder.sign(signer, hashes.SHA256()), key)


def server_identity(kind: str, ca: Identity, names: Sequence[str]) -> Identity:
    """`kind`: good, wrong_name, expired, not_yet_valid, unknown_ca, self_signed."""
    if kind == "wrong_name":
        return issue(ca, "elsewhere.invalid", ["elsewhere.invalid"], server=True)
    if kind == "expired":
        return issue(ca, names[0], names, server=True, starts_in=-3 * _DAY, ends_in=-_DAY)
    if kind == "not_yet_valid":
        return issue(ca, names[0], names, server=True, starts_in=_DAY, ends_in=3 * _DAY)
    if kind == "unknown_ca":
        return issue(new_ca("Unknown CA"), names[0], names, server=True)
    return issue(None if kind == "self_signed" else ca, names[0], names, server=True)


def _write(path: Path, content: bytes) -> Path:
    """Readable by the owner only; complete or not there at all."""
    beside = path.with_name(path.name + ".new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    beside.replace(path)
    return path


def _read(path: Path) -> Identity:
    pem = path.read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{path}: not an elliptic curve key")
    return Identity(x509.load_pem_x509_certificate(pem), key)


def public_key_of(path: Path) -> ec.EllipticCurvePublicKey:
    """Of a .p8 or a public-key PEM. Raises ValueError for anything but a P-256 key."""
    pem = path.read_bytes()
    key = (
        serialization.load_pem_public_key(pem)
        if b"PUBLIC KEY" in pem
        else serialization.load_pem_private_key(pem, None).public_key()
    )
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise ValueError(f"{path}: ES256 needs a P-256 key")
    return key


class Authority:
    """The files of one state directory: ca.pem, ca-key.pem, client.pem, other-client.pem, AuthKey_<key id>.p8."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = list(names)
        directory.mkdir(parents=True, exist_ok=True)
        both = directory / "ca-key.pem"
        if not both.exists():
            ca = new_ca("APNs simulator CA")
            _write(both, key_pem(ca.key) + certificate_pem(ca.certificate))
        self._ca = _read(both)
        self.ca_file = _write(directory / "ca.pem", certificate_pem(self._ca.certificate))
        self.client_cert_file = self._client("client.pem", self._ca)
        self.unknown_client_cert_file = self._client("other-client.pem", None)

    def _client(self, file_name: str, ca: Identity | None) -> Path:
        path = self._directory / file_name
        if not path.exists():
            client = issue(ca, "Apple Push Services: simulator", [], server=False)
            _write(path, key_pem(client.key) + certificate_pem(client.certificate))
        return path

    def auth_key(self, key_id: str) -> Path:
        """The .p8 of this key id, made when it is not there yet."""
        path = self._directory / f"AuthKey_{key_id}.p8"
        return path if path.exists() else _write(path, key_pem(new_key()))

    def server_context(self, kind: str, given: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """TLS 1.2 and 1.3, ALPN h2, our CA for client certificates. `given`: certificate chain and key files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        context.load_verify_locations(self.ca_file)
        if kind == "good" and given is not None:
            context.load_cert_chain(*given)
            return context
        path = self._directory / f"server-{kind}.pem"
        identity = server_identity(kind, self._ca, self._names)
        _write(path, key_pem(identity.key) + certificate_pem(identity.certificate))
        context.load_cert_chain(path)
        return context
