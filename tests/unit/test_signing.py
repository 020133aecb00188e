"""Signatures: who holds the key may speak, nobody else, and a wrong key file is told in one line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from echo_planes.errors import ConfigError, WeightsError
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment, header_bytes, manifest_bytes
from echo_planes.weights.wire.signing import Signer, Verifier
from tests.unit.wire import FULL, PATCH, SIGNER, header_of, manifest_for

VERIFIER = Verifier(SIGNER.public_bytes())
HEADER = header_of(b"x" * 100, key=PATCH)
MANIFEST = manifest_for(b"x" * 100, 1, PATCH)


def pem(private: Any, encryption: Any = None) -> bytes:
    data: bytes = private.private_bytes(
        ser.Encoding.PEM, ser.PrivateFormat.PKCS8, encryption or ser.NoEncryption()
    )
    return data


def key_file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "key.pem"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_what_was_signed_is_believed() -> None:
    VERIFIER.check_segment(SIGNER.segment(HEADER))
    VERIFIER.check_manifest(SIGNER.manifest(MANIFEST))


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 1},
        {"offset_bytes": 1},
        {"size_bytes": 99},
        {"chunk_bytes": 65},
        {"chunk_hashes": b"\1" * 64},
        {"base_digest": "xxh3:" + "f" * 32},
        {"key": structs.replace(PATCH, version=9)},
        {"key": structs.replace(PATCH, base_version=6)},
        {"key": structs.replace(PATCH, codec="fast")},
        {"key": structs.replace(PATCH, lineage="L1")},
    ],
)
def test_every_field_of_a_header_is_signed(fields: dict[str, Any]) -> None:
    signature = SIGNER.segment(HEADER).signature
    with pytest.raises(WeightsError, match="forged"):
        VERIFIER.check_segment(SignedSegment(structs.replace(HEADER, **fields), signature))


@pytest.mark.parametrize(
    "fields",
    [
        {"lineage": "L1"},
        {"version": 9},
        {"num_updates": 9},
        {"codec": "fast"},
        {"base_version": 6},
        {"base_digest": "xxh3:" + "f" * 32},
        {"digest": "xxh3:" + "f" * 32},
        {"payload_digest": "b3:" + "f" * 64},
        {"payload_bytes": 99},
        {"dense_bytes": 99},
        {"changed_elements": 9},
        {"total_elements": 99},
        {"num_segments": 9},
    ],
)
def test_every_field_of_a_manifest_is_signed(fields: dict[str, Any]) -> None:
    signature = SIGNER.manifest(MANIFEST).signature
    with pytest.raises(WeightsError, match="forged"):
        VERIFIER.check_manifest(SignedManifest(replace(MANIFEST, **fields), signature))


def test_another_key_and_no_signature_are_refused() -> None:
    other = Signer.generate()
    for signature in (other.segment(HEADER).signature, b"", b"\0" * 64, SIGNER.manifest(MANIFEST).signature):
        with pytest.raises(WeightsError):
            VERIFIER.check_segment(SignedSegment(HEADER, signature))
    for signature in (other.manifest(MANIFEST).signature, b"", b"\0" * 65, SIGNER.segment(HEADER).signature):
        with pytest.raises(WeightsError):
            VERIFIER.check_manifest(SignedManifest(MANIFEST, signature))


@pytest.mark.parametrize("signature", [b"", b"\0" * 63, b"\0" * 65])
def test_what_is_not_signed_is_told_from_what_is_forged(signature: bytes) -> None:
    with pytest.raises(WeightsError, match="segment 0 of version 8 has no signature"):
        VERIFIER.check_segment(SignedSegment(HEADER, signature))
    with pytest.raises(WeightsError, match="manifest of version 8 has no signature"):
        VERIFIER.check_manifest(SignedManifest(MANIFEST, signature))


def test_what_is_signed_begins_with_its_kind_and_format() -> None:
    private = Ed25519PrivateKey.from_private_bytes(SIGNER.private_bytes())
    header, manifest = header_bytes(HEADER), manifest_bytes(MANIFEST)
    assert SIGNER.segment(HEADER).signature == private.sign(b"echo_planes/segment/1\0" + header)
    assert SIGNER.manifest(MANIFEST).signature == private.sign(b"echo_planes/manifest/1\0" + manifest)
    with pytest.raises(WeightsError, match="forged"):
        VERIFIER.check_segment(SignedSegment(HEADER, private.sign(header)))
    with pytest.raises(WeightsError, match="forged"):
        VERIFIER.check_manifest(SignedManifest(MANIFEST, private.sign(manifest)))


def test_what_is_not_well_formed_is_neither_signed_nor_believed() -> None:
    wrong = structs.replace(HEADER, key=structs.replace(FULL, lineage="a b"))
    with pytest.raises(WeightsError):
        SIGNER.segment(wrong)
    with pytest.raises(WeightsError):
        VERIFIER.check_segment(SignedSegment(wrong, SIGNER.segment(HEADER).signature))


def test_a_key_survives_its_file_and_its_bytes(tmp_path: Path) -> None:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    signer = Signer.from_file(key_file(tmp_path, pem(private)))
    assert signer.public_bytes() == public
    assert Signer.from_file(key_file(tmp_path, pem(private), 0o640)).public_bytes() == public
    assert Signer.from_private_bytes(signer.private_bytes()).public_bytes() == public


def wrong_key_files(folder: Path) -> dict[str, Path]:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
    files = {
        "No such file": folder / "nowhere.pem",
        "not a regular file": folder,
    }
    for why, data, mode in (
        ("public key", public, 0o600),
        ("not Ed25519", pem(ec.generate_private_key(ec.SECP256R1())), 0o600),
        ("is not Ed25519", pem(rsa.generate_private_key(65537, 1024)), 0o600),
        ("encrypted", pem(private, ser.BestAvailableEncryption(b"secret")), 0o600),
        ("not a private key", b"", 0o600),
        ("is not a private key in PEM form", b"\xff" * 100, 0o600),
        ("chmod 600", pem(private), 0o644),
        ("mode 602", pem(private), 0o602),
        ("mode 620", pem(private), 0o620),
    ):
        inside = folder / why.replace(" ", "_")
        inside.mkdir()
        files[why] = key_file(inside, data, mode)
    return files


def test_a_wrong_key_file_is_told_in_one_line(tmp_path: Path) -> None:
    for why, path in wrong_key_files(tmp_path).items():
        with pytest.raises(ConfigError, match=why) as caught:
            Signer.from_file(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_pipe_as_key_file_is_no_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        Signer.from_file(tmp_path / "pipe")


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_told(length: int) -> None:
    with pytest.raises(ConfigError, match=f"{length}"):
        Verifier(bytes(length))
    with pytest.raises(ConfigError, match=f"{length}"):
        Signer.from_private_bytes(bytes(length))


def test_a_kept_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    made = Signer.kept_in(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Signer.kept_in(file).public_bytes() == made.public_bytes()
    with pytest.raises(ConfigError, match="cannot be written"):
        Signer.kept_in(tmp_path / "nowhere" / "key.pem")
