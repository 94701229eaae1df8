"""Signing keys: Ed25519 (the default, whose signatures are deterministic) and ECDSA over P-256.

Keys are plain PEM files that openssl reads: PKCS #8 for the private key, SPKI for the public one. A key is known by its
id, the digest of the DER form of its public half. A passphrase comes from the environment or a callable, never from a
prompt.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from npubundle.blob import read_small
from npubundle.digest import sha256_of
from npubundle.dsse import Envelope, Signature, pae
from npubundle.errors import Error, FileError, os_failure

KeyKind: TypeAlias = Literal["ed25519", "ecdsa-p256"]
KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

UNLOCK_VARIABLE = "NPUCC_KEY_PASSPHRASE"
MAX_KEY_FILE = 64 << 10
MAX_PASSPHRASE = 1023

_Private: TypeAlias = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
_Public: TypeAlias = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey
_ECDSA = ec.ECDSA(hashes.SHA256())


class KeyFileError(Error):
    """A key cannot be read, decrypted or used."""

    code = "key"


class Signer(Protocol):
    """Whatever can sign for a key: a `PrivateKey`, or an adapter to a key-management service."""

    @property
    def key_id(self) -> str:
        """The id of the key: the digest of its public half in DER form."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature over `data`."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key to verify with. Two are equal if they are the same key."""

    key_id: str
    kind: KeyKind
    pem: bytes
    _key: _Public = field(repr=False, compare=False)

    @classmethod
    def from_pem(cls, pem: bytes, *, where: str) -> PublicKey:
        """Read an SPKI PEM; `where` names its source in messages. Raises `KeyFileError`."""
        if b"PRIVATE KEY-----" in pem:
            raise KeyFileError("this is a private key where a public key belongs", where=where, remedy="use KEY.pub")
        if b"-----BEGIN PUBLIC KEY-----" not in pem:
            raise KeyFileError("this is not a public key in PEM form (BEGIN PUBLIC KEY)", where=where)
        try:
            key = serialization.load_pem_public_key(pem)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyFileError("this public key cannot be read", where=where) from error
        return _public_key(key, where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PublicKey:
        """Read a public key file, such as KEY.pub."""
        return cls.from_pem(read_small(Path(path), MAX_KEY_FILE, KeyFileError), where=str(path))

    def verify(self, sig: bytes, data: bytes) -> bool:
        """Whether `sig` is this key's signature over `data`."""
        try:
            if isinstance(self._key, ed25519.Ed25519PublicKey):
                self._key.verify(sig, data)
            else:
                self._key.verify(sig, data, _ECDSA)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A key to sign with; a `Signer`."""

    public: PublicKey
    _key: _Private = field(repr=False, compare=False)

    @property
    def key_id(self) -> str:
        """The id of the key: the digest of its public half in DER form."""
        return self.public.key_id

    def sign(self, data: bytes) -> bytes:
        """Return a signature over `data`: 64 bytes (Ed25519), or DER (ECDSA over SHA-256)."""
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(data)
        return self._key.sign(data, _ECDSA)

    def pem(self, passphrase: bytes | None = None) -> bytes:
        """Return the key as PKCS #8 PEM, encrypted if there is a passphrase."""
        if passphrase and len(passphrase) > MAX_PASSPHRASE:
            raise KeyFileError(f"the passphrase is longer than {MAX_PASSPHRASE} bytes")
        cipher = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher)

    @classmethod
    def load(cls, path: str | os.PathLike[str], passphrase: Callable[[], bytes | None] | None = None) -> PrivateKey:
        """Read a private key file; `passphrase` is asked only if the key is encrypted (default: the environment)."""
        pem = read_small(Path(path), MAX_KEY_FILE, KeyFileError)
        where = str(path)
        if b"PRIVATE KEY-----" not in pem:
            public = b"PUBLIC KEY-----" in pem
            what = "a public key where a private key belongs" if public else "not a private key in PEM form"
            raise KeyFileError(f"this is {what}", where=where, remedy="make a key with `npucc keygen --out KEY`")
        secret = None
        if b"ENCRYPTED" in pem:
            secret = (passphrase or passphrase_from_environment)()
            if secret is None:
                raise KeyFileError("this key is encrypted", where=where, remedy=f"set {UNLOCK_VARIABLE}")
        try:
            key = serialization.load_pem_private_key(pem, secret)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if secret is not None:
                raise KeyFileError("wrong passphrase, or a damaged key", where=where) from error
            raise KeyFileError("this private key cannot be read", where=where) from error
        return _private_key(key, where)


def generate(kind: KeyKind = "ed25519") -> PrivateKey:
    """Make a new key."""
    key: _Private = (
        ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
    )
    return _private_key(key, "generated key")


def save(key: PrivateKey, path: str | os.PathLike[str], passphrase: bytes | None = None) -> tuple[Path, Path]:
    """Write `path` (private, mode 0600) and `path`.pub; overwrite nothing, and leave both files or neither.

    Raises `FileError` if either exists or cannot be written.
    """
    private, public = Path(path), Path(f"{os.fspath(path)}.pub")
    made: list[Path] = []
    try:
        for target, data, mode in ((private, key.pem(passphrase), 0o600), (public, key.public.pem, 0o644)):
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(target)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        for target in made:
            target.unlink()
        if isinstance(error, FileExistsError):
            raise FileError("the key file exists; nothing was written", where=str(error.filename)) from error
        raise os_failure(error, "write the key") from error
    return private, public


def sign_envelope(signer: Signer, payload_type: str, payload: bytes) -> Envelope:
    """Sign a payload and put it in an envelope."""
    return Envelope(payload_type, payload, (Signature(signer.key_id, signer.sign(pae(payload_type, payload))),))


def passphrase_from_environment() -> bytes | None:
    """Return the passphrase that the environment holds (`NPUCC_KEY_PASSPHRASE`), or None."""
    value = os.environ.get(UNLOCK_VARIABLE)
    return os.fsencode(value) if value else None


def exposure(path: str | os.PathLike[str]) -> str | None:
    """Say who else may read a private key file, or None: a warning only, as mounted secrets are often readable."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        return f"the private key {path} has mode {mode:04o}; others may read it (chmod 600 {path})"
    return None


def _public_key(key: object, where: str) -> PublicKey:
    kind: KeyKind
    if isinstance(key, ed25519.Ed25519PublicKey):
        kind = "ed25519"
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        kind = "ecdsa-p256"
    else:
        raise _unsupported(key, where)
    encoding, form = serialization.Encoding, serialization.PublicFormat.SubjectPublicKeyInfo
    return PublicKey(sha256_of(key.public_bytes(encoding.DER, form)), kind, key.public_bytes(encoding.PEM, form), key)


def _private_key(key: object, where: str) -> PrivateKey:
    if isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        return PrivateKey(_public_key(key.public_key(), where), key)
    raise _unsupported(key, where)


def _unsupported(key: object, where: str) -> KeyFileError:
    if isinstance(key, ec.EllipticCurvePublicKey):
        name = f"an ECDSA key over {key.curve.name}"
    elif isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        name = "an RSA key"
    else:
        name = f"a key of the unsupported type {type(key).__name__}"
    return KeyFileError(f"this is {name}; bundles are signed with Ed25519 or ECDSA P-256", where=where)
