"""Node processes that speak TLS: through a chain, against a parent that lies, and through proxies."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import to_builtins

from echo_planes.weights.chain.events import PeerJoined, Report
from echo_planes.weights.wire.frames import ChunkFrame, ManifestFrame, PingFrame, SegmentFrame, encode_frame
from tests.integration.weight_nodes import (
    LIMIT_S,
    Fleet,
    Proxy,
    Signed,
    as_node,
    free_port,
    payload_at,
    port_of,
    publication,
    run,
    until_true,
)

CHUNK_BYTES = 32 * 1024


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def make_certificates(folder: Path) -> dict[str, str]:
    """An authority, and a certificate of it for loopback and `learner.test`, as a node's settings."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, *extensions: Any
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )
        for extension in extensions:
            critical = isinstance(extension, x509.BasicConstraints)
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, node = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = x509.SubjectAlternativeName([loopback, x509.DNSName("learner.test")])
    secret = node.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {
        "tls_ca": certificate("authority", authority, authority, x509.BasicConstraints(True, None)),
        "tls_cert": certificate("node", node, authority, names),
        "tls_key": secret,
    }
    for name, content in files.items():
        (folder / f"{name}.pem").write_bytes(content)
    return {name: str(folder / f"{name}.pem") for name in files}


class LyingParent:
    """A peer that takes part in the chain over TLS, has everything, and serves altered bytes.

    Args:
        address: of the sender.
        certificates: as `make_certificates` gives.
    """

    def __init__(self, address: str, certificates: dict[str, str], signed: Signed, name: str) -> None:
        self.num_lies = 0
        self.orders: list[dict[str, Any]] = []
        self._name = name
        self._sender = address
        self._certificates = certificates
        self._signed = signed
        self._offered = asyncio.Event()

    async def __aenter__(self) -> LyingParent:
        app = web.Application()
        app.router.add_post("/v1/feed", self._feed)
        app.router.add_get("/v1/publications/{key}/payload", self._range)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self._certificates["tls_cert"], self._certificates["tls_key"])
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=server).start()
        client = ssl.create_default_context(cafile=self._certificates["tls_ca"])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=client),
            headers=as_node(self._name),
            timeout=aiohttp.ClientTimeout(10),
        )
        await self._tell("join", PeerJoined(self._name, f"https://127.0.0.1:{port}", ""))
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *why: object) -> None:
        self._heart.cancel()
        await asyncio.gather(self._heart, return_exceptions=True)
        await self._session.close()
        await self._runner.cleanup()

    def offer(self) -> None:
        """From now on the altered publication is in the feed."""
        self._offered.set()

    async def feed_status(self) -> int:
        """Status of the sender's answer when this peer asks it for a feed."""
        async with self._session.post(f"{self._sender}/v1/feed?stream=0&of=1", json={}) as response:
            return response.status

    async def _beat(self) -> None:
        while True:
            key = self._signed.key if self._offered.is_set() else None
            num_chunks = sum(segment.header.num_chunks for segment, _ in self._signed.segments)
            size = self._signed.manifest.manifest.payload_bytes
            figures = (num_chunks, size, 1e9, 0, 0.0, False, True, -1, -1, False)
            report = Report(self._name, "sender", key, *figures)
            await self._tell("report", report)
            await asyncio.sleep(0.1)

    async def _tell(self, what: str, event: PeerJoined | Report) -> None:
        message = {"events": [to_builtins(event)]}
        async with self._session.post(f"{self._sender}/v1/tracker/{what}", json=message) as response:
            self.orders = (await response.json()).get("orders", [])

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while not self._offered.is_set():
                await response.write(encode_frame(PingFrame()))
                await asyncio.sleep(0.1)
            for segment, payload in self._signed.segments:
                await response.write(encode_frame(SegmentFrame(segment)))
                header = segment.header
                for index in range(header.num_chunks):
                    start = index * header.chunk_bytes
                    data = self._altered(payload[start : start + header.chunk_bytes].tobytes())
                    await response.write(encode_frame(ChunkFrame(header.key, header.index, index, data)))
            await response.write(encode_frame(ManifestFrame(self._signed.manifest)))
            while True:
                await response.write(encode_frame(PingFrame()))
                await asyncio.sleep(0.1)
        return response

    async def _range(self, request: web.Request) -> web.Response:
        span = request.http_range
        payload = b"".join(part.tobytes() for _, part in self._signed.segments)
        return web.Response(status=206, body=self._altered(payload[span]))

    def _altered(self, data: bytes) -> bytes:
        self.num_lies += 1
        return bytes([data[0] ^ 1]) + data[1:]


class ForwardProxy(Proxy):
    """An HTTP proxy that alone knows where `learner.test` is: here. CONNECT, and requests by absolute URL."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []  # the first line of each connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode()
        self.asked.append(line)
        method, target, _ = line.split()
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        if url.hostname != "learner.test":
            writer.close()
            return
        there, out = await asyncio.open_connection("127.0.0.1", url.port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            out.write(head)
        self._join(reader, writer, there, out)


def digest_of(payload: bytes) -> str:
    return f"b3:{blake3(payload).hexdigest()}"


def test_a_publication_travels_a_chain_over_tls(certificates: dict[str, str]) -> None:
    async def story() -> None:
        async with Fleet(**certificates) as fleet:
            for name in ("w0", "w1"):
                worker = await fleet.add(name, **certificates)
                assert worker.address.startswith("https://")
            parents = await fleet.until_obeyed(2, LIMIT_S)
            assert sorted(parents.values()) != ["sender", "sender"]  # a chain: one relays to the other
            signed = publication(fleet.signer, 1, 1_000_000, chunk_bytes=CHUNK_BYTES)
            await fleet.publish(signed)
            trusting = ssl.create_default_context(cafile=certificates["tls_ca"])
            for name, worker in fleet.workers.items():
                had = await fleet.until_complete(name, signed, LIMIT_S)
                assert had["payload_digest"] == signed.payload_digest
                assert had["damaged_chunks"] == 0
                assert (
                    digest_of(await payload_at(worker.address, signed, name, trusting))
                    == signed.payload_digest
                )

    run(story)


def test_a_worker_that_does_not_know_the_authority_says_so_and_stays_out(
    certificates: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        async with Fleet(**certificates) as fleet:
            without = {name: path for name, path in certificates.items() if name != "tls_ca"}
            worker = await fleet.add("w0", **without)

            async def troubled() -> bool:
                return bool((await worker.status())["trouble"])

            await until_true(troubled, LIMIT_S, "trouble")
            status = await worker.status()
            assert "weights.tls_ca" in status["trouble"]
            assert "\n" not in status["trouble"]
            assert status["parent"] is None
            assert (await fleet.status())["peers"] == {}

    run(story)
    told = [line for line in capfd.readouterr().err.splitlines() if "weights.tls_ca" in line]
    assert len(told) == 1  # not once for each attempt
    assert "w0" in told[0]


def test_plain_http_to_a_tls_node_is_refused(certificates: dict[str, str]) -> None:
    async def story() -> None:
        async with Fleet(**certificates) as fleet:
            plain = fleet.address.replace("https://", "http://")
            worker = await fleet.add("w0", sender=plain)

            async def troubled() -> bool:
                return plain in (await worker.status())["trouble"]

            await until_true(troubled, LIMIT_S, "trouble")
            assert (await fleet.status())["peers"] == {}
            async with aiohttp.ClientSession(headers=as_node("reader")) as session:
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"{plain}/v1/status", timeout=aiohttp.ClientTimeout(10))

    run(story)


def test_a_parent_that_alters_signed_bytes_over_tls_loses_its_child(certificates: dict[str, str]) -> None:
    async def story() -> None:
        async with Fleet(**certificates) as fleet:
            signed = publication(fleet.signer, 1, 500_000, chunk_bytes=CHUNK_BYTES)
            worker = await fleet.add("w0", **certificates)
            await fleet.until_obeyed(1, LIMIT_S)
            async with LyingParent(fleet.address, certificates, signed, "liar") as liar:
                parents = await fleet.until_obeyed(2, LIMIT_S)
                assert parents == {"liar": "sender", "w0": "liar"}  # the newest is first
                liar.offer()
                await fleet.publish(signed)
                had = await fleet.until_complete("w0", signed, LIMIT_S)

                async def left() -> bool:
                    return (await fleet.status())["peers"] == {"w0": "sender", "liar": "w0"}

                await until_true(left, LIMIT_S, "the liar to be nobody's parent")
                assert liar.num_lies > 0
                assert had["damaged_chunks"] > 0
                assert had["payload_digest"] == signed.payload_digest
                # One child's word expels nobody: the bytes do not show who altered them.
                assert not any(order["kind"] == "Drop" for order in liar.orders)
                assert await liar.feed_status() == 200
            trusting = ssl.create_default_context(cafile=certificates["tls_ca"])
            assert (
                digest_of(await payload_at(worker.address, signed, "w0", trusting)) == signed.payload_digest
            )

    run(story)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nodes_reach_their_sender_through_the_proxy_of_the_environment(
    scheme: str, certificates: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login anybody password anything\n")
    monkeypatch.setenv("NETRC", str(netrc))  # logins of the user, which have no place beside the token

    async def story() -> None:
        tls = certificates if scheme == "https" else {}
        async with ForwardProxy() as proxy, Fleet(**tls) as fleet:
            monkeypatch.setenv(f"{scheme}_proxy", f"http://{proxy.place}")
            port = port_of(fleet.address)
            for name in ("w0", "w1"):
                await fleet.add(name, sender=f"{scheme}://learner.test:{port}", **tls)
            parents = await fleet.until_obeyed(2, LIMIT_S)
            assert sorted(parents.values()) != ["sender", "sender"]
            signed = publication(fleet.signer, 1, 500_000, chunk_bytes=CHUNK_BYTES)
            await fleet.publish(signed)
            for name in fleet.workers:
                had = await fleet.until_complete(name, signed, LIMIT_S)
                assert had["payload_digest"] == signed.payload_digest
            # The sender was reached through it alone; the other worker, on loopback, without it.
            asked = f"CONNECT learner.test:{port} " if tls else f"POST http://learner.test:{port}/v1/"
            assert proxy.asked
            assert all(line.startswith(asked) for line in proxy.asked)

    run(story)


def test_what_needs_no_proxy_is_reached_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with ForwardProxy() as proxy, Fleet() as fleet:
            monkeypatch.setenv("http_proxy", f"http://{proxy.place}")
            await fleet.add("w0")  # its sender is on loopback
            await fleet.until_obeyed(1, LIMIT_S)
            monkeypatch.setenv("no_proxy", ".test")
            worker = await fleet.add("w1", sender="http://learner.test:1")

            async def troubled() -> bool:
                return "learner.test" in (await worker.status())["trouble"]

            await until_true(troubled, LIMIT_S, "trouble: nobody but the proxy knows that name")
            assert proxy.asked == []

    run(story)
