"""The table of group ids, against a list and a dict."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from echo_planes.data.store import ids as module
from echo_planes.data.store.ids import GroupIds


@pytest.mark.parametrize("seed", range(8))
def test_says_what_a_list_and_a_dict_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_RECENT", 4)
    rng = random.Random(seed)
    names = [f"L{rng.randrange(3)}.{rng.randrange(400)}" for _ in range(300)] + ["", "prüfung", "人"]
    table, texts, places = GroupIds(), list[str](), dict[str, int]()
    for _ in range(400):
        move = rng.random()
        some = rng.choices(names, k=rng.randrange(6))
        if move < 0.6:  # ids come again where their group was lost: the later counts
            for name in some:
                places[name] = len(texts)
                texts.append(name)
            table.extend(some)
        elif move < 0.8:
            at = len(texts) + rng.randrange(4)
            texts += [""] * (at + 1 - len(texts))
            texts[at] = places_name = rng.choice(names)
            places[places_name] = at
            table.put(at, places_name)
        elif move < 0.9:
            texts += [""] * rng.randrange(3)
            table.grow_to(len(texts))
        for name in rng.choices(names, k=10):
            assert table.find(name) == places.get(name)
    assert list(table) == texts
    assert table[3:9] == texts[3:9]
    assert [table.sequence(name) for name in places] == list(places.values())
    with pytest.raises(KeyError):
        table.sequence("never")


def test_equal_hashes_are_told_apart_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_RECENT", 0)
    monkeypatch.setattr(module, "hash", lambda text: len(text), raising=False)
    table = GroupIds()
    table.extend([f"{number:03}" for number in range(50)])
    table.extend(["more"])
    assert [table.find(f"{number:03}") for number in range(51)] == [*range(50), None]


def test_an_id_takes_little_beside_its_text() -> None:
    tracemalloc.start()
    table = GroupIds()
    for start in range(0, 200_000, 8):
        table.extend([f"L0.{number}" for number in range(start, start + 8)])
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # With what is in the dict until it is sorted in; a list and dict: 150.
    assert size_bytes / len(table) < 85
