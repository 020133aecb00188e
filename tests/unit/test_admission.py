"""A signature does not grow old: what is admitted, and what is not, after what has been committed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from echo_planes.errors import WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.wire.admission import Admission
from echo_planes.weights.wire.manifest import PublicationKey, key_of
from tests.unit.wire import FULL, manifest_for


def full(version: int, lineage: str = "L0") -> Manifest:
    key = structs.replace(FULL, version=version, lineage=lineage)
    return replace(manifest_for(b"", 0, key), digest=f"xxh3:{lineage}.{version}")


def patch(version: int, base: int, lineage: str = "L0", base_digest: str = "") -> Manifest:
    key = PublicationKey(lineage, version, "compact", base)
    digest = base_digest or f"xxh3:{lineage}.{base}"
    return replace(manifest_for(b"", 0, key), base_digest=digest, digest=f"xxh3:{lineage}.{version}")


def refused(admission: Admission, manifest: Manifest, why: str) -> None:
    for call in (
        lambda: admission.check(key_of(manifest), manifest.base_digest),
        lambda: admission.check_manifest(manifest),
        lambda: admission.committed(manifest),
    ):
        with pytest.raises(WeightsError, match=why):
            call()


def test_versions_go_forward_only() -> None:
    admission = Admission()
    for manifest in (full(3), patch(4, 3), patch(6, 4), full(6)):
        admission.check(key_of(manifest), manifest.base_digest)
        admission.committed(manifest)
    assert (admission.lineage, admission.newest_version) == ("L0", 6)
    refused(admission, full(5), "older")
    refused(admission, patch(5, 4), "older")
    assert admission.newest_version == 6
    admission.check_manifest(patch(6, 4))  # the same again, in another encoding


def test_a_base_known_under_another_digest_is_refused() -> None:
    admission = Admission()
    admission.committed(full(3))
    refused(admission, patch(4, 3, base_digest="xxh3:other"), "patches")
    admission.check_manifest(patch(5, 4))  # version 4 may be on its way
    admission.check_manifest(patch(4, 3))


def test_digests_of_a_lineage_are_remembered_until_another_is_followed() -> None:
    admission = Admission()
    for version in (3, 4):
        admission.committed(full(version))
    refused(admission, patch(5, 3, base_digest="xxh3:other"), "patches")
    admission.follow("L1")
    admission.check_manifest(patch(5, 3, "L1", "xxh3:other"))  # what L0's version 3 was says nothing of L1's


def test_the_digests_of_the_last_1024_versions_are_remembered() -> None:
    admission = Admission()
    for version in range(1024):
        admission.committed(full(version))
    refused(admission, patch(1024, 0, base_digest="xxh3:other"), "patches")
    admission.committed(full(1024))
    admission.check_manifest(patch(1025, 0, base_digest="xxh3:other"))
    refused(admission, patch(1025, 1, base_digest="xxh3:other"), "patches")


def test_a_version_has_one_digest() -> None:
    admission = Admission()
    admission.committed(full(3))
    with pytest.raises(WeightsError, match="cannot be"):
        admission.check_manifest(replace(full(3), digest="xxh3:other"))
    with pytest.raises(WeightsError, match="cannot be"):
        admission.committed(replace(full(3), digest="xxh3:other"))


def test_a_lineage_that_was_replaced_never_comes_back() -> None:
    admission = Admission()
    admission.committed(full(9))
    admission.check_manifest(full(2, "L1"))
    admission.committed(full(2, "L1"))
    refused(admission, full(10), "void")
    refused(admission, patch(10, 9), "void")
    with pytest.raises(WeightsError, match="void"):
        admission.follow("L0")
    assert (admission.lineage, admission.newest_version) == ("L1", 2)


def test_a_fresh_node_can_be_told_which_lineage_is_the_present_one() -> None:
    admission = Admission()
    assert (admission.lineage, admission.newest_version) == ("", -1)
    admission.follow("L0")
    assert (admission.lineage, admission.newest_version) == ("L0", -1)
    admission.follow("L1")
    admission.follow("L1")
    refused(admission, full(10), "void")
    admission.committed(full(1, "L1"))


def test_a_node_that_is_told_of_a_resume_takes_its_lower_versions() -> None:
    admission = Admission()
    admission.committed(full(9))
    admission.follow("L1")
    assert admission.newest_version == -1
    admission.committed(full(2, "L1"))
    assert admission.newest_version == 2


def test_digests_of_another_lineage_do_not_count() -> None:
    admission = Admission()
    for version in (2, 3):
        admission.committed(full(version))
    admission.check_manifest(patch(4, 3, "L1"))
    admission.committed(full(3, "L1"))
    admission.check_manifest(patch(4, 3, "L1"))
    admission.check_manifest(patch(4, 2, "L1"))
    assert admission.newest_version == 3


def test_memory_does_not_grow_without_end() -> None:
    admission = Admission()
    for version in range(3000):
        admission.committed(full(version))
    refused(admission, patch(3001, 2999, base_digest="xxh3:other"), "patches")
    admission.check(PublicationKey("L0", 3001, "compact", 5), "xxh3:other")  # forgotten: checked at install


def test_where_the_lineage_is_known_no_other_is_let_in() -> None:
    admission = Admission(only="L1")
    with pytest.raises(WeightsError, match="is of lineage L0, this run's is L1"):
        admission.check(PublicationKey("L0", 9, "full", -1), "")
    admission.check(PublicationKey("L1", 1, "full", -1), "")
    assert admission.lineage == ""
