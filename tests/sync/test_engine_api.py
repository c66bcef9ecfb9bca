"""Errors of the control client, against a real HTTP server on this machine."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from knit.common.net import free_port
from knit.sync.engine_api import EngineCallError, EngineClient, Fault
from knit.types import EngineAddress


class Handler(BaseHTTPRequestHandler):
    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(200, b'{"weight_version": "7"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/begin_weight_update":
            self._answer(400, b'{"success": false, "message": "a session\\nis already open"}')
        elif self.path == "/end_weight_update":
            self._answer(500, b"Internal Server Error " * 100)
        elif self.path == "/pause_generation":
            time.sleep(1.0)
            self.connection.close()
        else:
            self.connection.close()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[EngineClient]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(EngineAddress("engine-3", f"http://127.0.0.1:{server.server_port}"))
    yield client
    client.close()
    server.shutdown()
    server.server_close()


def test_the_version_is_what_the_engine_reports(client):
    assert client.version(5) == "7"


def test_a_refusal_names_engine_endpoint_and_the_engines_text(client):
    with pytest.raises(EngineCallError) as e:
        client.begin_update(5)
    assert e.value.fault is Fault.REFUSED
    assert "engine engine-3" in str(e.value)
    assert "/begin_weight_update: answered HTTP 400: a session is already open" in str(e.value)


def test_a_long_text_is_cut(client):
    with pytest.raises(EngineCallError, match="Internal Server Error") as e:
        client.end_update(5)
    assert len(str(e.value)) < 700


def test_a_broken_connection_counts_as_gone(client):
    with pytest.raises(EngineCallError) as e:
        client.resume(5)
    assert e.value.fault is Fault.GONE


def test_silence_ends_at_the_deadline(client):
    started = time.monotonic()
    with pytest.raises(EngineCallError, match=r"/pause_generation: did not answer within 0\.2 s") as e:
        client.pause("retract", 0.2)
    assert e.value.fault is Fault.SILENT
    assert time.monotonic() - started < 0.9


def test_nobody_listening_counts_as_gone():
    client = EngineClient(EngineAddress("engine-0", f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(EngineCallError, match="engine-0") as e:
        client.version(5)
    assert e.value.fault is Fault.GONE


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(EngineCallError("engine a /x: text", "a", Fault.GONE)))
    assert (str(error), error.engine, error.fault) == ("engine a /x: text", "a", Fault.GONE)
