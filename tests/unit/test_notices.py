"""Spot notices: what the clouds' answers mean, and asking a metadata service (on loopback) for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.errors import ClusterError
from echo_planes.rollout.notices import (
    GCP_NOTICE_S,
    MAX_ANSWER_BYTES,
    Answer,
    Cloud,
    MetadataService,
    Notice,
    read_aws,
    read_azure,
    read_gcp,
    watch,
)

NOW_S = 1_000_000.0
AT_S = datetime(2026, 11, 20, 8, 22, tzinfo=UTC).timestamp()
LIMIT_S = 30.0


def event(**fields: Any) -> dict[str, Any]:
    usual = {"EventType": "Preempt", "Resources": ["vm_3"], "NotBefore": "Fri, 20 Nov 2026 08:22:00 GMT"}
    return {**usual, **fields}


def azure(*events: dict[str, Any]) -> Notice | None:
    return read_azure(Answer(200, json.dumps({"Events": list(events)})), "vm_3", NOW_S)


# --- what the answers mean -----------------------------------------------------------------------


def test_aws_has_nothing_there_until_there_is_a_notice() -> None:
    assert read_aws(Answer(404, "<html>Not Found</html>")) is None
    told = '{"action": "terminate", "time": "2026-11-20T08:22:00Z"}'
    assert read_aws(Answer(200, told)) == Notice("terminate", AT_S)


def test_google_says_no_time() -> None:
    assert read_gcp(Answer(200, "FALSE\n"), NOW_S) is None
    assert read_gcp(Answer(200, "TRUE"), NOW_S) == Notice("preempted", NOW_S + GCP_NOTICE_S)


def test_azure_tells_of_other_machines_and_other_events_too() -> None:
    assert azure() is None
    assert azure(event(Resources=["vm_2"]), event(EventType="Reboot")) is None
    later = event(NotBefore="Fri, 20 Nov 2026 09:00:00 GMT", EventType="Terminate")
    assert azure(later, event()) == Notice("Preempt", AT_S)
    assert azure(event(NotBefore="")) == Notice("Preempt", NOW_S)  # it has begun


READERS: dict[str, Callable[[Answer], Notice | None]] = {
    "aws": read_aws,
    "gcp": lambda answer: read_gcp(answer, NOW_S),
    "azure": lambda answer: read_azure(answer, "vm_3", NOW_S),
}


@pytest.mark.parametrize("cloud", READERS)
@pytest.mark.parametrize(
    "answer", [Answer(500, "oops"), Answer(200, "<html>login</html>"), Answer(200, "[]")]
)
def test_what_no_cloud_says_is_refused_with_its_words(cloud: str, answer: Answer) -> None:
    with pytest.raises(ClusterError, match=re.escape(f"'{cloud}' answered {answer.status} {answer.body!r}")):
        READERS[cloud](answer)


@pytest.mark.parametrize("time", ["soon", "2026-11-20T08:22:00", None, 7])
def test_a_time_without_a_zone_is_none(time: object) -> None:
    with pytest.raises(ClusterError):
        read_aws(Answer(200, json.dumps({"action": "stop", "time": time})))
    with pytest.raises(ClusterError):
        azure(event(NotBefore=time))


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
events = st.fixed_dictionaries(
    {},
    optional={
        "EventType": st.just("Preempt") | json_values,
        "Resources": st.just(["vm_3"]) | json_values,
        "NotBefore": json_values,
    },
)
odd = st.fixed_dictionaries(
    {}, optional={"action": json_values, "time": json_values, "Events": st.lists(events) | json_values}
)


@given(body=odd.map(json.dumps) | json_values.map(json.dumps) | st.text())
def test_no_answer_breaks_a_reader(body: str) -> None:
    for read in READERS.values():
        try:
            assert isinstance(read(Answer(200, body)), Notice | None)
        except ClusterError:
            continue  # told in one line


# --- asking --------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def metadata(handler: Handler) -> AsyncIterator[Callable[..., MetadataService]]:
    """A metadata service on loopback; yields how to make what asks it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:

            def service(cloud: Cloud, limit_s: float = LIMIT_S) -> MetadataService:
                return MetadataService(session, cloud, limit_s, lambda: NOW_S, site.name)

            yield service
    finally:
        await runner.cleanup()


def watched(cloud: Cloud, handler: Handler, max_failures: int = 0) -> Notice:
    async def scenario() -> Notice:
        async with metadata(handler) as service, asyncio.timeout(LIMIT_S):
            return await watch(service(cloud), every_s=0.001, max_failures=max_failures)

    return asyncio.run(scenario())


def test_aws_is_asked_with_a_token_that_is_renewed() -> None:
    tokens = iter(["old", "new"])
    asked: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "PUT" and request.path == "/latest/api/token":
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            return web.Response(text=next(tokens))
        token = request.headers["X-aws-ec2-metadata-token"]
        asked.append((request.path, token))
        if token == "old":
            return web.Response(status=401 if len(asked) > 2 else 404)
        return web.json_response({"action": "stop", "time": "2026-11-20T08:22:00Z"})

    assert watched("aws", handler) == Notice("stop", AT_S)
    assert asked == [
        ("/latest/meta-data/spot/instance-action", token) for token in ("old", "old", "old", "new")
    ]


def test_aws_that_takes_no_token_is_told() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="token") if request.method == "PUT" else web.Response(status=401)

    with pytest.raises(ClusterError, match="answered 401"):
        watched("aws", handler)


def test_google_is_asked_in_its_own_way() -> None:
    answers = iter(["FALSE", "FALSE", "TRUE"])

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Metadata-Flavor"] == "Google"
        assert request.path == "/computeMetadata/v1/instance/preempted"
        return web.Response(text=next(answers))

    assert watched("gcp", handler).action == "preempted"
    assert next(answers, None) is None


def test_azure_is_asked_for_the_machines_name_first() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Metadata"] == "true"
        assert request.query["api-version"]
        if request.path == "/metadata/instance/compute/name":
            return web.Response(text="vm_3")
        return web.json_response({"Events": [event(Resources=["vm_2"]), event(EventType="Terminate")]})

    assert watched("azure", handler) == Notice("Terminate", AT_S)


def test_some_questions_may_go_wrong_but_not_too_many_in_a_row() -> None:
    asked: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(len(asked))
        if len(asked) % 3 == 0:
            return web.Response(text="TRUE" if len(asked) == 6 else "FALSE")
        return web.Response(status=503)

    assert watched("gcp", handler, max_failures=2).action == "preempted"
    asked.clear()
    with pytest.raises(ClusterError, match="answered 503"):
        watched("gcp", handler, max_failures=1)
    assert len(asked) == 2


def test_a_flood_a_silence_and_a_closed_door_are_told() -> None:
    async def flood(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (MAX_ANSWER_BYTES + 1))

    with pytest.raises(ClusterError, match="more than"):
        watched("gcp", flood)

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    with pytest.raises(ClusterError, match="answered 302"):
        watched("gcp", elsewhere)

    async def silence() -> None:
        ended = asyncio.Event()

        async def never(request: web.Request) -> web.Response:
            await ended.wait()
            return web.Response()

        async with metadata(never) as service:
            try:
                async with asyncio.timeout(LIMIT_S):
                    await service("gcp", limit_s=0.05).ask()
            finally:
                ended.set()

    with pytest.raises(ClusterError, match="no answer from"):
        asyncio.run(silence())

    async def closed() -> None:
        async with aiohttp.ClientSession() as session:
            await MetadataService(session, "aws", LIMIT_S, lambda: NOW_S, "http://127.0.0.1:1").ask()

    with pytest.raises(ClusterError, match="no answer from"):
        asyncio.run(closed())
