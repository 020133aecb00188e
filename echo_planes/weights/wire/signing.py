"""Ed25519 signatures of segment headers and manifests: proof of their origin and integrity.

A signature covers a prefix that names the kind of message and its format, then the message's canonical bytes
(`manifest.py`). So a signature of one kind is never valid for another.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from echo_planes.errors import ConfigError, WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.wire.manifest import (
    SIGNATURE_BYTES,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    header_bytes,
    manifest_bytes,
)

KEY_BYTES = 32  # of a public key, and of a private one
_SEGMENT = b"echo_planes/segment/1\0"
_MANIFEST = b"echo_planes/manifest/1\0"
_MAX_KEY_FILE_BYTES = 64 * 1024
_HOW = "make one with `openssl genpkey -algorithm ed25519 -out KEY.pem` and `chmod 600 KEY.pem`"


class Signer:
    """Signer with one private key. Make it with one of the class methods."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> Signer:
        """Make a signer with a new key, from the operating system's random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Signer:
        """Make a signer with the key in an unencrypted PEM file (PKCS #8).

        Only its owner may write the file, and only owner and group may read it: keys that are mounted into
        containers need the latter.

        Raises:
            ConfigError: the file is missing, unreadable, not an Ed25519 private key, or open to others.
        """
        file = Path(path)
        data = _read_key_file(file)
        if b"PUBLIC KEY" in data:
            raise ConfigError(f"key file {file} holds a public key; signing needs the private one: {_HOW}")
        try:
            private = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            why = "is encrypted" if isinstance(error, TypeError) else "is not a private key in PEM form"
            raise ConfigError(f"key file {file} {why}: {_HOW}") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(f"key file {file} holds a key that is not Ed25519: {_HOW}")
        return cls(private)

    @classmethod
    def kept_in(cls, path: str | os.PathLike[str]) -> Signer:
        """Make a signer with the key in that file, after writing a new key there if the file is missing.

        Raises:
            ConfigError: as `from_file`, or the file cannot be written.
        """
        file = Path(path)
        if not file.exists():
            signer = cls.generate()
            pem = signer._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            try:
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                    stream.write(pem)
            except OSError as error:
                raise ConfigError(f"key file {file} cannot be written ({error.strerror})") from error
        return cls.from_file(file)

    @classmethod
    def from_private_bytes(cls, private: bytes) -> Signer:
        """Make a signer with the key that `private_bytes` returned.

        Raises:
            ConfigError: it is not 32 bytes long.
        """
        if len(private) != KEY_BYTES:
            raise ConfigError(f"an Ed25519 private key has {KEY_BYTES} bytes, this one {len(private)}")
        return cls(Ed25519PrivateKey.from_private_bytes(private))

    def private_bytes(self) -> bytes:
        """Return the private key, 32 bytes: a secret that only the run's own processes may get."""
        return self._private.private_bytes_raw()

    def public_bytes(self) -> bytes:
        """Return the public key that a `Verifier` needs, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def segment(self, header: SegmentHeader) -> SignedSegment:
        """Return the header with its signature.

        Raises:
            WeightsError: the header is not well formed.
        """
        return SignedSegment(header, self._private.sign(_SEGMENT + header_bytes(header)))

    def manifest(self, manifest: Manifest) -> SignedManifest:
        """Return the manifest with its signature.

        Raises:
            WeightsError: the manifest is not well formed.
        """
        return SignedManifest(manifest, self._private.sign(_MANIFEST + manifest_bytes(manifest)))


class Verifier:
    """Verifier of signatures by the holder of one public key.

    Args:
        public: the key, 32 bytes.

    Raises:
        ConfigError: the key is not 32 bytes long.
    """

    def __init__(self, public: bytes) -> None:
        if len(public) != KEY_BYTES:
            raise ConfigError(f"an Ed25519 public key has {KEY_BYTES} bytes, this one {len(public)}")
        self._public = Ed25519PublicKey.from_public_bytes(public)

    def check_segment(self, signed: SignedSegment) -> None:
        """Check that the holder of the key signed this header.

        Raises:
            WeightsError: it is forged, altered, unsigned, or not well formed.
        """
        what = f"segment {signed.header.index} of version {signed.header.key.version}"
        self._check(signed.signature, _SEGMENT + header_bytes(signed.header), what)

    def check_manifest(self, signed: SignedManifest) -> None:
        """Check that the holder of the key signed this manifest.

        Raises:
            WeightsError: it is forged, altered, unsigned, or not well formed.
        """
        what = f"the manifest of version {signed.manifest.version}"
        self._check(signed.signature, _MANIFEST + manifest_bytes(signed.manifest), what)

    def _check(self, signature: bytes, message: bytes, what: str) -> None:
        if len(signature) != SIGNATURE_BYTES:
            raise WeightsError(f"{what} has no signature")
        try:
            self._public.verify(signature, message)
        except InvalidSignature as error:
            raise WeightsError(f"{what} is forged: its signature is not by the learner's key") from error


def _read_key_file(file: Path) -> bytes:
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe could block for ever
            raise ConfigError(f"key file {file} is not a regular file: {_HOW}")
        with file.open("rb") as stream:
            data = stream.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"key file {file} cannot be read ({error.strerror}): {_HOW}") from error
    if mode & (stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"key file {file} has mode {stat.S_IMODE(mode):03o}, so others may read or change the secret: "
            f"chmod 600 {file}"
        )
    return data
