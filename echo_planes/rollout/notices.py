"""Spot notices: a cloud announces through its metadata service that it will take this machine away.

`watch` runs on the machine itself. The clouds define the addresses and answers (AWS: instance metadata v2,
`spot/instance-action`; Google: `instance/preempted`; Azure: scheduled events 2020-07-01).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp

from echo_planes.errors import ClusterError

Cloud = Literal["aws", "gcp", "azure"]

BASE_URLS: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
AWS_TOKEN, AWS_ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
AWS_TOKEN_TTL_S = 21600
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_NOTICE_S = 30.0  # from Google's notice to the end of the machine
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_ENDS = ("Preempt", "Terminate")  # the other events leave the machine where it is
MAX_ANSWER_BYTES = 64 * 1024
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)  # raised where a malformed answer is read


@dataclass(frozen=True, slots=True)
class Notice:
    """Announcement that the cloud will take this machine away."""

    action: str  # the cloud's term: terminate, stop, hibernate, Preempt, ...
    deadline_unix_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a metadata service."""

    status: int
    body: str


# --- reading answers -----------------------------------------------------------------------------


def read_aws(answer: Answer) -> Notice | None:
    """Return the notice in an answer of `spot/instance-action`, which is a 404 until there is a notice.

    Raises:
        ClusterError: the answer is not one that the cloud gives.
    """
    if answer.status == 404:
        return None
    told = _json(_ok(answer, "aws"), "aws")
    try:
        return Notice(str(told["action"]), _unix_s(datetime.fromisoformat(told["time"])))
    except MALFORMED as error:
        raise _strange("aws", answer) from error


def read_gcp(answer: Answer, now_unix_s: float) -> Notice | None:
    """Return the notice in an answer of `instance/preempted`: TRUE or FALSE.

    The answer has no time, so the deadline is `GCP_NOTICE_S` seconds from now.

    Raises:
        ClusterError: the answer is not one that the cloud gives.
    """
    word = _ok(answer, "gcp").body.strip()
    if word not in ("TRUE", "FALSE"):
        raise _strange("gcp", answer)
    return Notice("preempted", now_unix_s + GCP_NOTICE_S) if word == "TRUE" else None


def read_azure(answer: Answer, machine: str, now_unix_s: float) -> Notice | None:
    """Return the earliest notice for `machine` in the scheduled events, which may list other machines too.

    Raises:
        ClusterError: the answer is not one that the cloud gives.
    """
    told = _json(_ok(answer, "azure"), "azure")
    try:
        notices = [
            # An event without a time has begun.
            Notice(event["EventType"], _unix_s(parsedate_to_datetime(at)) if at else now_unix_s)
            for event in told["Events"]
            if event["EventType"] in AZURE_ENDS and machine in list(event["Resources"])
            for at in (str(event["NotBefore"]),)
        ]
    except MALFORMED as error:
        raise _strange("azure", answer) from error
    return min(notices, key=lambda notice: notice.deadline_unix_s, default=None)


def _unix_s(moment: datetime) -> float:
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    return moment.timestamp()


def _ok(answer: Answer, cloud: Cloud) -> Answer:
    if answer.status != 200:
        raise _strange(cloud, answer)
    return answer


def _json(answer: Answer, cloud: Cloud) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise _strange(cloud, answer) from error


def _strange(cloud: Cloud, answer: Answer) -> ClusterError:
    return ClusterError(
        f"spot notices: the metadata service of '{cloud}' answered {answer.status} {answer.body[:80]!r}, "
        "which is no answer of that cloud; correct the cloud or the address, or watch for no notices"
    )


# --- asking --------------------------------------------------------------------------------------


class MetadataService:
    """Client of one cloud's metadata service.

    Args:
        session: HTTP session; its owner closes it.
        cloud: cloud whose service is asked.
        limit_s: longest wait for one HTTP answer, seconds.
        now_unix_s: the machine's wall clock, because clouds give times of day.
        base_url: address of the service; None: the cloud's usual one.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        cloud: Cloud,
        limit_s: float,
        now_unix_s: Callable[[], float],
        base_url: str | None = None,
    ) -> None:
        self._session = session
        self._cloud: Cloud = cloud
        self._limit = aiohttp.ClientTimeout(total=limit_s)
        self._now_unix_s = now_unix_s
        self._base_url = (base_url or BASE_URLS[cloud]).rstrip("/")
        self._token: str | None = None  # aws
        self._machine: str | None = None  # azure

    async def ask(self) -> Notice | None:
        """Return the notice, or None if there is none.

        Raises:
            ClusterError: there is no answer, or not one that the cloud gives.
        """
        if self._cloud == "aws":
            return await self._ask_aws()
        if self._cloud == "gcp":
            answer = await self._get(GCP_PREEMPTED, {"Metadata-Flavor": "Google"})
            return read_gcp(answer, self._now_unix_s())
        header = {"Metadata": "true"}
        if self._machine is None:
            self._machine = _ok(await self._get(AZURE_NAME, header), "azure").body.strip()
        return read_azure(await self._get(AZURE_EVENTS, header), self._machine, self._now_unix_s())

    async def _ask_aws(self) -> Notice | None:
        answer = Answer(401, "")
        if self._token is not None:
            answer = await self._get(AWS_ACTION, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:  # no token yet, or an expired one
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
            self._token = _ok(await self._get(AWS_TOKEN, lifetime, method="PUT"), "aws").body.strip()
            answer = await self._get(AWS_ACTION, {"X-aws-ec2-metadata-token": self._token})
        return read_aws(answer)

    async def _get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        url = self._base_url + path
        try:
            async with self._session.request(
                method, url, headers=headers, timeout=self._limit, allow_redirects=False
            ) as response:
                body = b""
                async for piece in response.content.iter_chunked(MAX_ANSWER_BYTES):
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ClusterError(
                            f"spot notices: {url} answers with more than {MAX_ANSWER_BYTES} bytes, which no "
                            "metadata service does; correct the address"
                        )
                return Answer(response.status, body.decode(errors="replace"))
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            raise ClusterError(
                f"spot notices: no answer from {url}: {error!r}; correct the cloud or the address, or watch "
                "for no notices"
            ) from error


async def watch(service: MetadataService, every_s: float, max_failures: int) -> Notice:
    """Ask until there is a notice, and return it.

    Args:
        service: the metadata service.
        every_s: seconds from one answer to the next question.
        max_failures: questions in a row that may fail.

    Raises:
        ClusterError: more questions in a row failed; the error is the last one's.
    """
    failures = 0
    while True:
        try:
            notice = await service.ask()
        except ClusterError:
            failures += 1
            if failures > max_failures:
                raise
        else:
            failures = 0
            if notice is not None:
                return notice
        await asyncio.sleep(every_s)
