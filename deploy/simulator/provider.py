"""A provider token, for tests and measurements that talk to the simulator without an APNs library."""

import base64
import json
import time
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature


def _segment(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def provider_token(
    key_file: str | Path, key_id: str, team_id: str, issued_at: object = None, algorithm: str = "ES256"
) -> str:
    """A JWT as APNs wants it. `issued_at`: seconds since the epoch, now by default; not checked, nor `algorithm`."""
    key = serialization.load_pem_private_key(Path(key_file).read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{key_file}: not an elliptic curve key")
    head = {"alg": algorithm, "kid": key_id}
    claims = {"iss": team_id, "iat": int(time.time()) if issued_at is None else issued_at}
    signed = _segment(json.dumps(head).encode()) + b"." + _segment(json.dumps(claims).encode())
    r, s = decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA256())))
    return (signed + b"." + _segment(r.to_bytes(32) + s.to_bytes(32))).decode()
