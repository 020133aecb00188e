"""A tiny S3 in memory, as much of it as `pyarrow.fs.S3FileSystem` asks for, on a loopback port.

Objects, ranges, listings (ListObjectsV2) and multipart uploads; no signatures are checked, but the name of
the access key is. `mode` makes it misbehave: "full" and "readonly" refuse to write, "silent" never answers.
It answers each PUT after `put_s` seconds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
ACCESS_KEY = "stub-key"


class S3Stub(ThreadingHTTPServer):
    """The server. `objects` maps keys to bytes; tests may look at it and change it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.mode = ""
        self.put_s = 0.0
        self.released = threading.Event()  # ends the silence
        self.requests: list[str] = []

    def url(self, prefix: str = "run") -> str:
        return f"s3://{BUCKET}/{prefix}?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{self.server_port}"


@contextmanager
def s3_stub() -> Iterator[S3Stub]:
    """A running stub."""
    server = S3Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: S3Stub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits for a delayed acknowledgement

    def setup(self) -> None:
        super().setup()
        self.close_connection = False

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _any(self) -> None:
        body = self._body()
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.mode == "silent":
            self.server.released.wait(60)
            return
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            return self._error(403, "InvalidAccessKeyId", "The access key does not exist.")
        if bucket != BUCKET:
            return self._error(404, "NoSuchBucket", "The specified bucket does not exist.")
        if self.server.mode == "full" and self.command in ("PUT", "POST"):
            return self._error(507, "InsufficientStorage", "The store is full.")
        if self.server.mode == "readonly" and self.command in ("PUT", "POST", "DELETE"):
            return self._error(403, "AccessDenied", "This key may only read.")
        getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "list-type" in query:
            return self._list(query)
        data = self.server.objects.get(key)
        if data is None:
            return self._error(404, "NoSuchKey", "The specified key does not exist.")
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match:
            return self._answer(200, data)
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        self._answer(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _head(self, key: str, query: dict[str, str], body: bytes) -> None:
        if not key:
            return self._answer(200, b"")
        data = self.server.objects.get(key)
        if data is None:
            return self._answer(404, b"")
        self._answer(200, data, head_only=True)

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        time.sleep(self.server.put_s)
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.server.objects[key] = body
        self._answer(200, b"", {"ETag": '"stub"'})

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "delete" in query:
            for name in re.findall(rb"<Key>(.*?)</Key>", body):
                self.server.objects.pop(name.decode(), None)
            return self._answer(200, b"<DeleteResult/>")
        if "uploads" in query:
            upload = f"upload{len(self.server.uploads)}"
            self.server.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>"
            text += f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, text.encode())
        parts = self.server.uploads.pop(query["uploadId"])
        self.server.objects[key] = b"".join(parts[number] for number in sorted(parts))
        self._answer(200, b"<CompleteMultipartUploadResult><ETag>stub</ETag></CompleteMultipartUploadResult>")

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        self.server.objects.pop(key, None)
        self._answer(204, b"")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for key in sorted(self.server.objects):
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    keys.append(key)
        keys = keys[: int(query.get("max-keys", "1000"))]
        text = f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
        text += f"<KeyCount>{len(keys) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        for key in keys:
            size = len(self.server.objects[key])
            text += f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
            text += "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for folder in sorted(folders):
            text += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        self._answer(200, (text + "</ListBucketResult>").encode())

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return _unchunk(data) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return _unchunk(data) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, head_only: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if not head_only and self.command != "HEAD":
            self.wfile.write(data)


def _unchunk(data: bytes) -> bytes:
    """The payload of an `aws-chunked` body: its chunks carry checksums behind them."""
    out, position = b"", 0
    while True:
        end = data.index(b"\r\n", position)
        size = int(data[position:end].split(b";")[0], 16)
        if size == 0:
            return out
        out += data[end + 2 : end + 2 + size]
        position = end + 2 + size + 2
