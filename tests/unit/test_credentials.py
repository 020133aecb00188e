"""Credentials of nodes: whom each opens a door to, and what a worker is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.config.plain_yaml import parse_yaml
from echo_planes.config.schema import Config
from echo_planes.config.weights import WeightsConfig
from echo_planes.loop.loading import dump_config, load_config
from echo_planes.weights.link import WeightLink, listening_host
from echo_planes.weights.wire.credentials import MAX_NAME, bearer, credential, is_bearer, may_enter

SECRET = "s" * 64


def test_a_credential_opens_one_door_for_one_name() -> None:
    w0, w1 = (credential(SECRET, name) for name in ("w0", "w1"))
    assert may_enter(bearer(w0), "w0", SECRET)
    assert not may_enter(bearer(w0), "w1", SECRET)
    at_w1 = credential(w1, "w0")  # what w0 shows to its parent w1
    assert may_enter(bearer(at_w1), "w0", w1)
    for name, key in (("w0", SECRET), ("w1", SECRET), ("w1", w1), ("w0", w0)):
        assert not may_enter(bearer(at_w1), name, key), (name, key)
    assert not may_enter(bearer(SECRET), "w0", SECRET)  # the secret itself is nobody's credential


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\nb", "\udcff"])
def test_a_name_that_is_none_never_enters(name: str) -> None:
    assert not may_enter(bearer(credential(SECRET, name)), name, SECRET)


@given(st.binary(max_size=80))
def test_any_bytes_are_an_answer_and_not_an_error(raw: bytes) -> None:
    given = raw.decode("utf-8", "surrogateescape")  # as headers are decoded
    assert not is_bearer(given, SECRET)
    assert not may_enter(given, "w0", SECRET)
    assert not may_enter(bearer("x"), given, SECRET)


@pytest.mark.parametrize(
    ("words", "joined", "machine"),
    [([], False, "127.0.0.1"), ([], True, "10.0.0.7"), (["weights.host=192.0.2.1"], True, "192.0.2.1")],
)
def test_nodes_listen_where_others_reach_them_also_after_a_resume(
    words: list[str], joined: bool, machine: str
) -> None:
    """A joined cluster may get its second machine later, and a resume reads every default from its record."""
    first = load_config(words)
    resumed = Config.model_validate(parse_yaml(dump_config(first), "config.yaml"))
    for config in (first, resumed):
        host = listening_host(config.weights, joined=joined)
        link = WeightLink("L0", SECRET, "0" * 64, "", 10, config.weights, host, sender="http://x:1")
        assert link.sender_settings("10.0.0.7", bytes(32)).host == machine
        assert link.of_worker("w", 0).worker_settings("w", 0, "10.0.0.7", "").host == machine


def test_a_worker_is_given_its_own_credential_and_not_the_secret() -> None:
    run = WeightLink("L0", SECRET, "0" * 64, str(Path("/store")), 10, WeightsConfig(), sender="http://x:1")
    link = run.of_worker("gpu", 2)
    settings = link.worker_settings("gpu", 2, "127.0.0.1", "")
    assert settings.node_id == "gpu.2"
    assert may_enter(bearer(settings.token), "gpu.2", SECRET)
    assert SECRET not in repr(link) + settings.to_json()
    assert settings.lineage == "L0"
    other = run.of_worker("gpu", 3).worker_settings("gpu", 3, "127.0.0.1", "")
    assert other.token != settings.token  # another incarnation is another node
    sender = run.sender_settings("127.0.0.1", bytes(32))
    assert (sender.token, sender.starved_s) == (SECRET, WeightsConfig().starved_s)
