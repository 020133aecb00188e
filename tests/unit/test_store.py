"""A store: what is put in comes out, what is damaged or missing is not offered, what fails leaves nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import ClusterError, ConfigError, WeightsError
from echo_planes.types import Codec
from echo_planes.weights.store.archivist import Archivist
from echo_planes.weights.store.catch_up import plan_path
from echo_planes.weights.store.objects import Objects, StoreUnreachableError, check_store, open_objects
from echo_planes.weights.store.reading import Store, object_name, read_public_key
from echo_planes.weights.store.writing import StoreWriter
from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.signing import Signer, Verifier
from tests.unit.s3_stub import ACCESS_KEY, S3Stub, s3_stub
from tests.unit.store_publications import (
    LIMITS,
    SIGNER,
    VERIFIER,
    bytes_of,
    manifest_of,
    publication,
    put,
    sign,
)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Stub]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_stub() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store's place, as a person writes it."""
    if request.param == "folder":
        return str(tmp_path / "new" / "store")
    return str(request.getfixturevalue("s3").url())


def writer_at(place: str, **options: int) -> StoreWriter:
    return StoreWriter(open_objects(place), VERIFIER, LIMITS, **options)


def reader_at(place: str) -> Store:
    return Store(open_objects(place), VERIFIER, LIMITS)


def versions(store: Store) -> list[tuple[int, int]]:
    return [(entry.manifest.base_version, entry.manifest.version) for entry in store.index()]


def test_what_is_put_in_comes_out(place: str) -> None:
    check_store(place, writes=True)
    writer = writer_at(place)
    writer.claim(SIGNER.public_bytes())
    writer.claim(SIGNER.public_bytes())
    made = [publication(0), publication(1, 0), publication(2, 1), publication(2)]
    assert [put(writer, signed).reason for signed in made] == ["", "", "", ""]
    check_store(place, writes=False)

    store = reader_at(place)
    entries = store.index()
    assert [entry.signed for entry in entries] == [signed.manifest for signed in made]
    for entry, signed in zip(entries, made, strict=True):
        stored = store.open(entry)
        assert stored.segments == signed.segments
        assert stored.signed_manifest == signed.manifest
        assert bytes_of(stored) == signed.payload
    assert read_public_key(open_objects(place)) == SIGNER.public_bytes()
    assert not store.bad


def test_an_index_sees_what_comes_and_goes(place: str) -> None:
    writer, store = writer_at(place, keep_patches=2, keep_snapshots=1), reader_at(place)
    assert store.index() == []
    put(writer, publication(0))
    assert versions(store) == [(-1, 0)]
    for version in range(1, 5):
        put(writer, publication(version, version - 1))
    put(writer, publication(4))
    for version in range(5, 8):
        put(writer, publication(version, version - 1))
    assert len(versions(store)) == 9
    pruned = writer.prune()
    assert pruned.reason == ""
    assert len(pruned.removed) == 5
    assert versions(store) == versions(writer) == [(-1, 4), (4, 5), (5, 6), (6, 7)]
    objects = open_objects(place)
    assert len(objects.list("objects")) == 4
    assert len(objects.list("publications")) == 4 * 3


def test_the_same_publication_twice_is_stored_once(place: str) -> None:
    writer = writer_at(place)
    first, again = put(writer, publication(0)), put(writer_at(place), publication(0))
    assert first.stored
    assert again.stored
    assert again.entry == first.entry
    assert len(writer.index()) == 1


def test_publications_with_equal_bytes_share_an_object_until_the_last_is_gone(tmp_path: Path) -> None:
    writer = writer_at(str(tmp_path), keep_patches=1, keep_snapshots=1)
    same = [sign(manifest_of(version, version - 1), b"no change") for version in (1, 2)]
    put(writer, publication(0))
    put(writer, same[0])
    put(writer, publication(1))
    put(writer, same[1])
    assert len(open_objects(str(tmp_path)).list("objects")) == 3
    writer.prune()
    assert versions(writer) == [(-1, 1), (1, 2)]
    assert bytes_of(writer.open(writer.index()[-1])) == b"no change"


def test_what_fails_takes_no_bytes_from_an_entry_with_the_same_payload(place: str) -> None:
    writer = writer_at(place)
    first, second = (sign(manifest_of(version, version - 1), b"no change") for version in (1, 2))
    put(writer, first)

    def breaking() -> Iterator[bytes]:
        yield b"no"
        raise OSError(errno.EIO, "the disk")

    assert not writer.put(second.manifest, second.segments, breaking()).stored
    assert not writer.put(second.manifest, second.segments, [b"changed!!"]).stored
    assert bytes_of(reader_at(place).open(writer.index()[0])) == b"no change"
    assert put(writer, second).stored
    assert [bytes_of(reader_at(place).open(entry)) for entry in writer.index()] == 2 * [b"no change"]


def test_two_uploads_of_one_payload_do_not_meet(place: str) -> None:
    writer = writer_at(place)
    first, second = (sign(manifest_of(version, version - 1), b"no change") for version in (1, 2))
    second_writes, first_is_done = threading.Event(), threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"no "
        other.start()
        second_writes.wait(0.05)
        yield b"change"

    def breaking() -> Iterator[bytes]:
        second_writes.set()
        first_is_done.wait(5.0)
        raise OSError(errno.EIO, "the disk")
        yield b""

    other = threading.Thread(target=writer.put, args=(second.manifest, second.segments, breaking()))
    assert writer.put(first.manifest, first.segments, slow()).stored
    first_is_done.set()
    other.join()
    assert versions(reader_at(place)) == [(0, 1)]
    assert bytes_of(reader_at(place).open(writer.index()[0])) == b"no change"


def test_an_empty_payload(tmp_path: Path) -> None:
    writer = writer_at(str(tmp_path))
    assert put(writer, sign(manifest_of(0), b"")).stored
    assert bytes_of(reader_at(str(tmp_path)).open(writer.index()[0])) == b""


# --- damage --------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flipped_byte_is_found_and_the_rest_is_still_offered(tmp_path: Path) -> None:
    writer = writer_at(str(tmp_path))
    for signed in (publication(0), publication(1, 0), publication(1)):
        put(writer, signed)
    patch = writer.index()[1]
    folder = tmp_path / "publications" / patch.name
    for path in (folder / "segments.json", folder / "manifest.json", tmp_path / object_name(patch.manifest)):
        whole = path.read_bytes()
        for position in range(0, len(whole), 7):
            path.write_bytes(whole[:position] + bytes((whole[position] ^ 0x11,)) + whole[position + 1 :])
            store = reader_at(str(tmp_path))
            for entry in store.index():
                if entry.name == patch.name:  # else the index has found it already
                    with pytest.raises(WeightsError):
                        bytes_of(store.open(entry))
            assert versions(store) == [(-1, 0), (-1, 1)]
            assert list(store.bad) == [patch.name]
        path.write_bytes(whole)


@pytest.mark.parametrize("what", ["object", "segments.json", "cut", "grown"])
def test_what_is_missing_or_of_another_size_leads_to_the_next_best_path(tmp_path: Path, what: str) -> None:
    writer = writer_at(str(tmp_path))
    for signed in (
        publication(0, payload_bytes=400),
        publication(1, 0, payload_bytes=80),
        publication(1, payload_bytes=900),
    ):
        put(writer, signed)
    store = reader_at(str(tmp_path))
    path = plan_path(None, "L0", 1, store.index())
    assert [entry.manifest.codec for entry in path] == ["full", "compact"]
    blob = tmp_path / object_name(path[1].manifest)
    if what == "object":
        blob.unlink()
    elif what == "segments.json":
        (tmp_path / "publications" / path[1].name / what).unlink()
    else:
        blob.write_bytes(blob.read_bytes()[:-1] if what == "cut" else b"x" + blob.read_bytes())
    with pytest.raises(WeightsError, match=r"missing|bytes|damaged"):
        bytes_of(store.open(path[1]))
    path = plan_path(None, "L0", 1, store.index())
    assert [(entry.manifest.codec, entry.manifest.version) for entry in path] == [("full", 1)]


def test_without_ready_a_publication_is_not_there(tmp_path: Path) -> None:
    writer = writer_at(str(tmp_path))
    entry = put(writer, publication(0)).entry
    assert entry
    (tmp_path / "publications" / entry.name / "READY").unlink()
    assert reader_at(str(tmp_path)).index() == []
    assert put(writer_at(str(tmp_path)), publication(0)).stored  # as after a crash in mid-write
    assert versions(reader_at(str(tmp_path))) == [(-1, 0)]


def test_a_stranger_s_publications_are_not_offered(tmp_path: Path) -> None:
    put(writer_at(str(tmp_path)), publication(0))
    stranger = Store(open_objects(str(tmp_path)), Verifier(Signer.generate().public_bytes()), LIMITS)
    assert stranger.index() == []
    assert "forged" in next(iter(stranger.bad.values()))


def test_a_publication_under_another_s_name_is_not_offered(tmp_path: Path) -> None:
    entry = put(writer_at(str(tmp_path)), publication(0)).entry
    assert entry
    folder = tmp_path / "publications" / entry.name
    folder.rename(folder.with_name(entry.name.replace("L0.0.", "L0.7.")))
    store = reader_at(str(tmp_path))
    assert store.index() == []
    assert "belongs to another" in next(iter(store.bad.values()))


def test_a_huge_manifest_or_header_file_is_not_read(tmp_path: Path) -> None:
    entry = put(writer_at(str(tmp_path)), publication(0)).entry
    assert entry
    folder = tmp_path / "publications" / entry.name
    (folder / "segments.json").write_bytes(b"[" + b" " * 50_000 + b"]")
    store = reader_at(str(tmp_path))
    with pytest.raises(WeightsError, match="at most"):
        store.open(store.index()[0])
    (folder / "manifest.json").write_bytes(b" " * 50_000)
    store = reader_at(str(tmp_path))
    assert store.index() == []
    assert "at most" in store.bad[entry.name]


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\nb"])
def test_names_stay_inside_the_store(tmp_path: Path, name: str) -> None:
    objects = open_objects(str(tmp_path))
    for attempt in (lambda: objects.read(name, 9), lambda: objects.list(name), lambda: objects.delete(name)):
        with pytest.raises(WeightsError, match="no name"):
            attempt()


# --- what cannot be written ----------------------------------------------------------------------


class FailingObjects(Objects):
    """Writes fail from the n-th object on, after half of its bytes; deletes may fail too."""

    def __init__(self, place: str, error: OSError) -> None:
        healthy = open_objects(place)
        super().__init__(healthy._fs, healthy._root, renames=healthy._renames)
        self.error = error
        self.left = 10**9

    def write(self, name: str, pieces: Any) -> None:
        self.left -= 1

        def failing() -> Iterator[bytes]:
            for piece in pieces:
                yield bytes(piece)
                if self.left < 0:
                    raise self.error

        super().write(name, failing())


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("good_writes", range(4))
def test_a_store_that_fills_up_keeps_what_it_has_and_nothing_of_what_did_not_fit(
    place: str, good_writes: int
) -> None:
    objects = FailingObjects(place, FULL)
    writer = StoreWriter(objects, VERIFIER, LIMITS)
    put(writer, publication(0))
    before = sorted(open_objects(place).list("objects") + open_objects(place).list("publications"))
    objects.left = good_writes
    outcome = put(writer, publication(1, 0))
    assert not outcome.stored
    assert "No space left" in outcome.reason
    assert "\n" not in outcome.reason
    after = sorted(open_objects(place).list("objects") + open_objects(place).list("publications"))
    assert after == before
    assert versions(reader_at(place)) == [(-1, 0)]
    objects.left = 10**9
    assert put(writer, publication(1, 0)).stored  # there is room again
    assert versions(reader_at(place)) == [(-1, 0), (0, 1)]


@pytest.mark.parametrize("damage", ["flip", "short", "long", "raises"])
def test_only_the_signed_payload_is_stored(place: str, damage: str) -> None:
    signed = publication(0)

    def payload() -> Iterator[bytes]:
        data = bytearray(signed.payload)
        data[5] ^= damage == "flip"
        yield bytes(data[: -1 if damage == "short" else None])
        if damage == "long":
            yield b"x"
        if damage == "raises":
            raise WeightsError("the spool is gone")

    writer = writer_at(place)
    outcome = writer.put(signed.manifest, signed.segments, payload())
    assert not outcome.stored
    assert "payload" in outcome.reason or "spool" in outcome.reason
    assert open_objects(place).list("objects") == []
    assert writer.index() == []


def test_headers_that_do_not_belong_to_the_manifest_are_refused(tmp_path: Path) -> None:
    signed, other = publication(0), publication(1, 0)
    writer = writer_at(str(tmp_path))
    for segments in (signed.segments[:-1], signed.segments[::-1], other.segments, ()):
        assert not writer.put(signed.manifest, segments, [signed.payload]).stored
    assert not (tmp_path / "objects").exists()


def test_a_store_of_another_key_is_not_mixed_up(place: str) -> None:
    writer_at(place).claim(SIGNER.public_bytes())
    with pytest.raises(ConfigError, match="belongs to another key"):
        writer_at(place).claim(Signer.generate().public_bytes())


def test_pruning_a_store_that_refuses_says_so(s3: S3Stub) -> None:
    writer = writer_at(s3.url(), keep_patches=1, keep_snapshots=1)
    for version in range(3):
        put(writer, publication(version))
    s3.mode = "readonly"
    pruned = writer.prune()
    assert pruned.removed == ()
    assert "ACCESS_DENIED" in pruned.reason
    assert len(versions(reader_at(s3.url()))) == 3


def test_what_a_dead_writer_left_is_swept(place: str) -> None:
    writer = writer_at(place)
    kept = publication(0)
    put(writer, kept)
    objects = open_objects(place)
    before = sorted(objects.list("objects") + objects.list("publications"))
    objects.write("objects/" + "ab" * 32, [b"half a snapshot"])
    objects.write("objects/" + "cd" * 32 + ".partial", [b"a quarter"])
    objects.write("publications/00000007-L0.9.full.-1/segments.json", [b"[]"])
    again = writer_at(place)
    assert len(again.sweep().removed) == 3
    assert sorted(objects.list("objects") + objects.list("publications")) == before
    assert bytes_of(again.open(again.index()[0])) == kept.payload
    assert again.sweep().removed == ()


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "publications").mkdir()
    for name in (".nfs000", "7-by-hand"):
        (tmp_path / "publications" / name).write_text("not ours")
    writer = writer_at(str(tmp_path))
    assert writer.sweep().removed == ()
    assert put(writer, publication(0)).stored
    assert put(writer, publication(1, 0)).stored
    assert versions(writer) == [(-1, 0), (0, 1)]
    assert sorted(path.read_text() for path in (tmp_path / "publications").glob("*") if path.is_file()) == [
        "not ours",
        "not ours",
    ]


def test_what_waits_for_a_slow_store_is_bounded_by_bytes() -> None:
    archivist = Archivist()

    def publish(version: int, codec: Codec, payload_bytes: int) -> set[int]:
        base = -1 if codec == "full" else version - 1
        archivist.published(PublicationKey("L0", version, codec, base), payload_bytes, 1000)
        return {key.version for key in archivist.holds}

    assert publish(0, "full", 1010) == {0}
    assert archivist.next_publication()  # and now the store is slow
    assert publish(1, "compact", 400) == {0, 1}
    assert publish(2, "full", 1010) == {0, 2}
    assert not archivist.broken  # the full one that waits is the snapshot
    assert publish(3, "compact", 400) == {0, 3}
    assert archivist.broken
    assert archivist.num_skipped == 2


def test_a_sweep_keeps_payloads_that_an_unreadable_entry_may_name(tmp_path: Path) -> None:
    entry = put(writer_at(str(tmp_path)), publication(0)).entry
    assert entry
    manifest = tmp_path / "publications" / entry.name / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{}")
    again = writer_at(str(tmp_path))
    assert again.sweep().removed == ()
    manifest.write_bytes(whole)
    store = reader_at(str(tmp_path))
    assert bytes_of(store.open(store.index()[0])) == publication(0).payload


# --- what a person gets to read ------------------------------------------------------------------


def one_line_of(error: Exception, *words: str) -> None:
    assert "\n" not in str(error)
    assert "weights.store" in str(error)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("gs://bucket/x", "gs:// is not supported"),
        ("s3:///x", "no bucket"),
        ("s3://bucket/x?endpoint=a", "unknown option 'endpoint'"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/a/../b", "plain names"),
        ("s3://bucket/x?scheme=ftp", "ftp"),
        ("a\0b", "NUL"),
    ],
)
def test_a_wrong_place(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_store(url, writes=True)
    one_line_of(caught.value, words)
    assert "secret@" not in str(caught.value)


def test_a_folder_that_cannot_be_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below", tmp_path / ("x" * 1000)):
        with pytest.raises((ConfigError, ClusterError)) as caught:
            check_store(str(place), writes=True)
        one_line_of(caught.value, str(place)[:60])
    with pytest.raises(ConfigError) as missing:
        check_store(str(tmp_path / "missing"), writes=False)
    one_line_of(missing.value, "no such folder")
    with pytest.raises(ClusterError) as full:
        check_store(str(tmp_path / "new"), writes=True, need_bytes=10**18)
    one_line_of(full.value, "MB free", "one full snapshot")
    for number, words in ((errno.EROFS, "cannot be written"), (errno.ENOSPC, "free some space")):

        def refuse(*arguments: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Objects, "write", refuse)
        with pytest.raises(ClusterError) as caught_write:
            check_store(str(tmp_path / "new"), writes=True)
        one_line_of(caught_write.value, words)


def test_a_bucket_that_cannot_be_a_store(s3: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(url: str, writes: bool = True) -> Exception:
        with pytest.raises((ConfigError, ClusterError)) as caught:
            check_store(url, writes=writes, timeout_s=1.0)
        return caught.value

    one_line_of(refusal(s3.url().replace("s3://bucket", "s3://other")), "make the bucket")
    s3.mode = "readonly"
    one_line_of(refusal(s3.url()), "what they may do")
    s3.mode = "full"
    one_line_of(refusal(s3.url()), "free some space")
    s3.mode = "silent"
    error = refusal(s3.url())
    assert isinstance(error, ClusterError)
    one_line_of(error, "can be reached")
    s3.mode = ""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    for writes in (True, False):
        error = refusal(s3.url(), writes)
        assert isinstance(error, ConfigError)
        one_line_of(error, "check AWS_ACCESS_KEY_ID")


def test_a_bucket_that_goes_away_is_an_outcome_and_comes_back(s3: S3Stub) -> None:
    objects = open_objects(s3.url(), request_timeout_s=1.0, max_attempts=1)
    writer = StoreWriter(objects, VERIFIER, LIMITS)
    assert put(writer, publication(0)).stored
    entry, stored = writer.index()[0], writer.open(writer.index()[0])
    s3.mode = "silent"
    outcome = put(writer, publication(1, 0))
    assert not outcome.stored
    assert "Timeout" in outcome.reason
    for attempt in (writer.index, lambda: writer.open(entry), lambda: stored.read(0)):
        with pytest.raises(StoreUnreachableError):
            attempt()
    s3.mode = ""
    assert versions(writer) == [(-1, 0)]  # nothing was marked bad for it
    assert bytes_of(writer.open(entry)) == publication(0).payload
    assert put(writer, publication(1, 0)).stored


def test_a_payload_of_many_parts_goes_through_s3(s3: S3Stub) -> None:
    signed = sign(manifest_of(0), bytes(range(256)) * 1200, segment_bytes=100_000)
    writer = writer_at(s3.url())
    assert put(writer, signed).stored
    assert bytes_of(writer.open(writer.index()[0])) == signed.payload
