"""Who may ask, and for how much: keys, limits, sizes, times, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.conftest import Start
from tests.conformance.test_http import BODY, curl
from tests.support import servers
from tests.support.identity import Identity
from tests.support.metrics import eventually, scrape
from tests.support.servers import TINY
from tools.gateway import GatewayProcess

ENDLESS: dict[str, Any] = BODY | {"stream": True, "ignore_eos": True, "max_tokens": 16_000}
WITHIN = 60.0


def make_key(name: str, *limits: str) -> tuple[str, str]:
    """Make a key with the real command; returns the secret, and the table for the keys file."""
    command = [sys.executable, "-m", "tritonstream_gateway", "key", name, *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr.split()[-1], done.stdout


def bearer(secret: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"authorization": f"Bearer {secret}"}


@contextlib.asynccontextmanager
async def streaming(url: str, headers: dict[str, str] | None = None) -> Any:
    """An open stream that has begun, if only with a comment, and goes on for long."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=WITHIN) as http,
        http.stream("POST", "/v1/chat/completions", json=ENDLESS, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()
        await anext(lines)
        yield lines


class TestKeys:
    """API keys."""

    @pytest.fixture
    def keyed(self, start: Start, tmp_path: Path) -> Iterator[tuple[GatewayProcess, dict[str, str]]]:
        """A gateway that knows three keys, two of them with limits."""
        tables = {
            "free": make_key("free"),
            "one": make_key("one", "--max-concurrency", "1"),
            "few": make_key("few", "--tokens-per-minute", "60"),
        }
        keys = tmp_path / "keys.toml"
        keys.write_text("".join(table for _, table in tables.values()))
        assert all(secret not in keys.read_text() for secret, _ in tables.values())
        front = start("--keys", str(keys), "--workers", "2", "--log-requests", "--keep-alive", "0.05")
        yield front, {name: secret for name, (secret, _) in tables.items()}

    async def test_keys_and_their_limits(
        self, keyed: tuple[GatewayProcess, dict[str, str]], triton: servers.Triton
    ) -> None:
        """No key or a wrong one is 401; each key has its own limits over all workers, and 429 says when to return."""
        front, secrets = keyed
        async with httpx.AsyncClient(base_url=front.url, timeout=WITHIN) as http:

            async def ask(name: str, **more: Any) -> httpx.Response:
                return await http.post("/v1/chat/completions", json=BODY | more, headers=bearer(secrets[name]))

            for headers in ({}, bearer("ts-wrong"), {"authorization": "Basic eDp5"}):
                for reply in (
                    await http.post("/v1/chat/completions", json=BODY, headers=headers),
                    await http.get("/v1/models", headers=headers),
                ):
                    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await http.get("/health/ready")).status_code == 200
            assert (await ask("free")).status_code == 200
            with triton.engine_paused(TINY):  # so that it stays open, however long this takes
                async with streaming(front.url, bearer(secrets["one"])):
                    for _ in range(4):  # whichever worker it reaches
                        refused = await ask("one")
                        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                        assert int(refused.headers["retry-after"]) >= 1
                    async with streaming(front.url, bearer(secrets["free"])):  # it has status 200: others are let in
                        pass
            await eventually(lambda: triton.load() == 0, "the stream that was left is over")
            assert (await ask("one")).status_code == 200
            assert (await ask("few", max_tokens=64, ignore_eos=True)).status_code == 200
            refused = await ask("few")
            assert refused.status_code == 429
            assert "60 tokens a minute" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        log = front.log.read_text()
        assert "key=free" in log
        assert not any(secret in log for secret in secrets.values())

    def test_the_client_knows_these_errors(self, keyed: tuple[GatewayProcess, dict[str, str]]) -> None:
        """OpenAI's client raises AuthenticationError, and answers with a right key."""
        front, secrets = keyed
        arguments: Any = {"model": TINY, "messages": BODY["messages"], "max_tokens": 1}
        with (
            openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(**arguments)
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key=secrets["free"], max_retries=0) as client:
            assert client.chat.completions.create(**arguments).choices


async def test_more_than_may_be_open_or_wait_is_503(start: Start, triton: servers.Triton) -> None:
    """Before any event: the caller can go elsewhere, or come again when Retry-After says."""
    full = start("--max-open", "2", "--workers", "2", "--keep-alive", "0.05")
    with triton.engine_paused(TINY):  # so that they stay open, however long this takes
        async with (
            streaming(full.url),
            streaming(full.url),
            httpx.AsyncClient(timeout=WITHIN) as http,
        ):
            opened = scrape(f"{full.url}/metrics", "tritonstream_gateway_open")
            assert opened.value("tritonstream_gateway_open_requests") == 2
            refused = await http.post(f"{full.url}/v1/chat/completions", json=BODY | {"stream": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    waiting = start("--max-waiting", "3")
    async with httpx.AsyncClient(base_url=waiting.url, timeout=WITHIN) as http:
        with triton.engine_paused(TINY):
            asked = [asyncio.create_task(http.post("/v1/chat/completions", json=BODY)) for _ in range(5)]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().status_code for task in done} == {503}
        replies = [await task for task in asked]
        assert sorted(one.status_code for one in replies) == [200, 200, 200, 503, 503], [one.text for one in replies]
        page = scrape(f"{waiting.url}/metrics", "tritonstream_gateway_rejected")
        assert page.value("tritonstream_gateway_rejected_total", reason="waiting") == 2


def test_size_and_time_of_a_body(start: Start) -> None:
    """Too large is 413, said or found out; too slow is 408; neither reaches Triton."""
    front = start("--max-body", "2000", "--body-timeout", "0.5")
    large = json.dumps(BODY | {"pad": "x" * 3_000})
    chat = f"{front.url}/v1/chat/completions"
    assert curl(chat, body=large)[0] == 413
    assert curl(chat, "-H", "Transfer-Encoding: chunked", "-H", "Expect:", body=large)[0] == 413
    assert curl(chat, body=BODY)[0] == 200
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WITHIN) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in connection.recv(4_096).split(b"\r\n")[0]


def test_an_answer_that_takes_too_long_is_408(start: Start, triton: servers.Triton) -> None:
    """The deadline of a request is the server's too: the engine does not go on."""
    front = start("--request-timeout", "1")
    began = time.monotonic()
    with triton.engine_paused(TINY):
        status, _, text = curl(f"{front.url}/v1/chat/completions", body=BODY)
    assert (status, json.loads(text)["error"]["code"]) == (408, "timeout")
    assert time.monotonic() - began >= 1


def test_tls(start: Start, tmp_path: Path) -> None:
    """With a certificate the gateway speaks HTTPS alone."""
    identity = Identity.make("gateway.example")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(identity.certificate)
    key.write_bytes(identity.key)
    front = start("--tls-certificate", str(certificate), "--tls-key", str(key), scheme="https")
    port = front.url.rpartition(":")[2]
    named = ("--cacert", str(certificate), "--resolve", f"gateway.example:{port}:127.0.0.1")
    status, _, text = curl(f"https://gateway.example:{port}/v1/models", *named)
    assert (status, json.loads(text)["object"]) == (200, "list")
    with pytest.raises(subprocess.CalledProcessError):
        curl(f"{front.url}/v1/models")  # nobody vouches for the certificate
