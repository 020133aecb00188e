"""The log of dissemination."""

from __future__ import annotations

import pytest

from echo_planes.reporting.broadcasts import MAX_OLDER, NEWEST, BroadcastLog, summary_of
from echo_planes.types import BroadcastStats, InstallReport, Manifest


def manifest(version: int, payload_bytes: int = 500, changed: int = 1000) -> Manifest:
    codec = "compact" if version else "full"
    return Manifest(
        "L0", version, version, codec, version - 1, "", "d", "", payload_bytes, 4000, changed, 2000
    )


def installed(worker: str, version: int, ok: bool = True, pause_s: float = 0.1) -> InstallReport:
    return InstallReport(worker, version, "d", ok, 0.2, pause_s=pause_s)


def test_a_broadcast_ends_when_ten_elevenths_of_the_workers_have_installed() -> None:
    book = BroadcastLog()
    book.on_published(manifest(1), 0.5, now_s=10.0)
    for i in range(10):  # ceil(11 / 1.1) = 10 of 11
        assert book.newest() == {}
        book.on_installed(installed(f"w{i}", 1), num_active=11, now_s=12.0 + i)
    assert book.newest()["t_bcast_s"] == pytest.approx(11.0)
    book.on_installed(installed("w10", 1), num_active=11, now_s=99.0)
    assert book.newest()["t_bcast_s"] == pytest.approx(11.0)


def test_refusals_repeats_and_unknown_versions_do_not_count() -> None:
    book = BroadcastLog()
    book.on_published(manifest(1), 0.5, now_s=0.0)
    book.on_installed(installed("w0", 1, ok=False), num_active=2, now_s=1.0)
    book.on_installed(installed("w0", 1), num_active=2, now_s=2.0)
    book.on_installed(installed("w0", 1), num_active=2, now_s=3.0)
    book.on_installed(installed("w1", 7), num_active=2, now_s=4.0)
    assert book.newest() == {}
    book.on_installed(installed("w1", 1), num_active=2, now_s=5.0)
    assert book.newest()["t_bcast_s"] == pytest.approx(5.0)


def test_a_peer_at_fault_is_news_once_for_each_version() -> None:
    book = BroadcastLog()
    for version in (1, 2):
        book.on_published(manifest(version), 0.0, now_s=0.0)

    def told(version: int, *at_fault: str) -> list[tuple[int, str]]:
        return book.on_broadcasts([BroadcastStats(version, "compact", 500, 2, 1, None, 1, (), at_fault)])

    assert told(1) == []
    assert told(1, "w3 is silent") == [(1, "w3 is silent")]
    assert told(1, "w3 is silent", "w4 is slow") == [(1, "w4 is slow")]
    assert told(2, "w3 is silent") == [(2, "w3 is silent")]
    assert told(9, "w3 is silent") == []  # of an earlier part of the run


def test_a_row_says_what_a_publication_weighed_and_how_it_travelled() -> None:
    book = BroadcastLog()
    book.on_published(manifest(3), 0.5, now_s=1.0)
    book.on_published(manifest(3, payload_bytes=4000), 0.1, now_s=9.0)  # published again: the first counts
    book.on_broadcasts([BroadcastStats(3, "compact", 500, 2, 2, 0.75, 1, (2.5e6, 1.25e6))])
    book.on_broadcasts([BroadcastStats(8, "compact", 500, 2, 2, 0.75, 1, ())])
    for worker, pause_s in (("w0", 0.3), ("w1", 0.1)):
        book.on_installed(installed(worker, 3, pause_s=pause_s), num_active=2, now_s=2.0)
    (row,) = book.rows()
    assert row == book.newest()
    assert (row["published_version"], row["codec"], row["payload_bytes"]) == (3, "compact", 500)
    assert (row["changed_share"], row["bytes_per_changed"], row["patch_ratio"]) == (0.5, 0.5, 8.0)
    assert (row["t_extract_s"], row["t_bcast_s"], row["t_network_s"]) == (0.5, 1.0, 0.75)
    assert (row["hop_mbit_min"], row["repairs"], row["pause_s"]) == (10.0, 1, 0.2)


def test_the_summary_is_about_patches_where_it_says_so() -> None:
    book = BroadcastLog()
    assert summary_of(book.rows())["patch_ratio_median"] is None
    book.on_published(manifest(0, payload_bytes=4000, changed=2000), 0.5, now_s=0.0)
    book.on_published(manifest(1, payload_bytes=400), 0.1, now_s=5.0)
    assert summary_of(book.rows())["patch_ratio_median"] == 10.0
    assert summary_of(book.rows())["bytes_per_changed_median"] == 0.4


def test_the_median_of_two_publications_is_between_them() -> None:
    book = BroadcastLog()
    for version, seconds in ((0, 1.0), (1, 3.0)):
        book.on_published(manifest(version), seconds, now_s=0.0)
    assert summary_of(book.rows())["t_extract_s_median"] == 2.0


def test_a_publication_without_changes_has_no_bytes_per_change() -> None:
    book = BroadcastLog()
    book.on_published(manifest(1, payload_bytes=40, changed=0), 0.1, now_s=0.0)
    assert book.rows()[0]["bytes_per_changed"] is None


def test_of_a_long_run_the_older_rows_are_thinned_out_and_repairs_add_up() -> None:
    log, published = BroadcastLog(), NEWEST + 3 * MAX_OLDER
    for version in range(published):
        log.on_published(manifest(version), 0.5, now_s=float(version))
        log.on_installed(installed("w0", version), num_active=1, now_s=version + 0.25)
        log.on_broadcasts([BroadcastStats(version, "compact", 500, 1, 1, 0.2, 1, ())])
        assert log.newest()["published_version"] == version
    rows = log.rows()
    versions = [row["published_version"] for row in rows]
    assert len(rows) <= NEWEST + MAX_OLDER
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-NEWEST:]) == (0, list(range(published - NEWEST, published)))
    assert summary_of(rows)["broadcast_repairs"] == published
    assert summary_of(rows)["t_bcast_s_median"] == 0.25
