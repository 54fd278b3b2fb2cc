"""Load tests as a performance engineer runs them: real locust against the real stack, and against what goes wrong.

No test looks at how fast anything was: the machine may be busy. What is asserted is what was counted, and the end.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import loadtests, processes, servers
from tests.support.loadtests import LoadTest, load_test, ran
from tests.support.metrics import eventually
from tests.support.servers import NARROW, TINY, Triton
from tools import gateway, generators, server

WITHIN = 60.0
UNREACHABLE, LATE, DIED = "ServerUnavailable (network)", "DeadlineExceeded (network)", "DriverDied"
SUCCESSES = "vllm:request_success_total"

pytestmark = pytest.mark.timeout(400)


def of_triton(triton: Triton, model: str = TINY) -> list[str]:
    """The arguments that name a model of the server, and its metrics."""
    return ["--model", model, "--metrics-url", triton.server.metrics_url]


async def ended(run: LoadTest, *, requests: int = 0, failures: int = 0) -> int:
    """Let it count so many requests and failures at least, ask it to end, and return its exit code."""
    await eventually(lambda: run.counted[0] >= requests and run.counted[1] >= failures, "it counts on", WITHIN)
    return await asyncio.to_thread(run.end)


def check_totals(run: LoadTest, *, at_least: int) -> int:
    """Assert that nothing failed, and that locust's rows and the result say the same; returns how many there were."""
    requests = run.result["requests"]
    assert requests["failed"] == requests["unfinished"] == 0
    complete = int(requests["complete"])
    assert complete >= at_least
    assert int(run.rows["Aggregated"]["Request Count"]) == complete
    assert int(run.rows["answer"]["Request Count"]) == complete
    assert sum(point["completed"] for point in run.result["timeline"]) == pytest.approx(complete)
    return complete


async def test_two_workers_count_what_the_server_counts(triton: Triton, tmp_path: Path) -> None:
    """Every answer of two processes is once in locust's rows, once in the result and once in the server's counter."""
    await triton.settled(within=WITHIN)
    before = triton.gauge(SUCCESSES)
    arguments = [*of_triton(triton), "--processes", "2", "-u", "4", "-r", "4", "-s", "60"]
    arguments += ["--prompts", str(loadtests.known(tmp_path)), "--max-tokens", "48"]
    arguments += ["--slo", "ttft_p95<60s, error_rate<1%, output_tokens_per_s>0"]
    with load_test("steady", triton.grpc, tmp_path, *arguments) as run:
        code = await ended(run, requests=30)
    assert code == 0, run.output
    complete = check_totals(run, at_least=30)
    await triton.settled(within=WITHIN)
    assert triton.gauge(SUCCESSES) - before == complete
    # Streaming's measures are rows of locust's own, and charts in its report; "Aggregated" knows nothing of them.
    assert int(run.rows["answer: TTFT ms"]["Request Count"]) == complete
    assert int(run.rows["answer: lateness ms"]["Request Count"]) == complete
    assert int(run.rows["answer: ITL ms"]["Request Count"]) == run.result["measures"]["itl"]["count"] > complete
    assert float(run.rows["answer: tokens/s"]["Average Response Time"]) > 0
    assert 0 < int(run.rows["server: queue time ms"]["Request Count"]) <= complete
    for wanted in ("answer: TTFT ms", "server: queue time ms", "<b>Inter-token latency, ms</b>", "<polyline"):
        assert wanted in run.html
    assert run.result["slo"]["kept"]
    assert run.result["measures"]["ttft"]["max"] * 1e3 == pytest.approx(
        float(run.rows["answer: TTFT ms"]["Max Response Time"])
    )


async def test_workers_of_a_master_elsewhere_add_up_as_well(triton: Triton, tmp_path: Path) -> None:
    """Started each by its own command, as on several machines: the master alone knows what is asked, and counts all."""
    await triton.settled(within=WITHIN)
    before, port = triton.gauge(SUCCESSES), str(server.free_port())
    arguments = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2"]
    arguments += [*of_triton(triton), "-u", "4", "-r", "4", "-s", "60"]
    arguments += ["--prompts", str(loadtests.known(tmp_path)), "--max-tokens", "16"]
    with load_test("steady", triton.grpc, tmp_path, *arguments) as run, loadtests.workers("steady", 2, port) as workers:
        assert await ended(run, requests=10) == 0, run.output
        await asyncio.to_thread(workers.wait)
    complete = check_totals(run, at_least=10)
    await triton.settled(within=WITHIN)
    assert triton.gauge(SUCCESSES) - before == complete


async def test_an_open_loop_does_not_wait_for_answers(triton: Triton, tmp_path: Path) -> None:
    """While the server answers nobody, requests go on being sent: a closed loop would stop at one for each user."""
    users = 20
    for seconds in (5, 20):  # the second one is for a machine that stood still in the first
        arguments = [*of_triton(triton), "-u", str(users), "-r", str(users), "-t", f"{seconds}s", "-s", "0"]
        with triton.engine_paused(TINY):
            code, run = await asyncio.to_thread(ran, "open_loop", triton.grpc, tmp_path, *arguments)
        requests = run.result["requests"]
        assert requests["complete"] == 0
        if requests["unfinished"] > 2 * users:
            break
    assert requests["unfinished"] > 2 * users, run.output
    assert code == 0, run.output  # nothing failed, and no objective was given
    await eventually(lambda: triton.load() == 0, "who was left waiting is aborted")


async def test_bursts_wait_for_nobody_and_cut_nobody_off(triton: Triton, tmp_path: Path) -> None:
    """A rate that falls while nobody is answered leaves open what was asked, and rises again when it is due."""
    arguments = [*of_triton(triton), "--max-tokens", "4", "--bursts", "2", "--period", "6", "--burst-seconds", "2"]
    arguments += ["--base-rate", "1", "--burst-rate", "8", "-s", "3"]
    with load_test("burst", triton.grpc, tmp_path, *arguments) as run:
        with triton.engine_paused(TINY):
            await eventually(lambda: run.output.count("updating to 8 users") == 2, "both bursts came", WITHIN)
            assert run.counted == (0, 0)
        code = await asyncio.to_thread(run.wait)
    assert code == 0, run.output
    complete = check_totals(run, at_least=8)
    assert sum(point["offered"] for point in run.result["timeline"]) == pytest.approx(complete)


async def test_leaving_readers_are_counted_apart(triton: Triton, tmp_path: Path) -> None:
    """Who leaves in the middle is no failure; the server hears of each and goes on with nobody."""
    await triton.settled(within=WITHIN)
    before = triton.gauge("tritonstream:requests_cancelled_total")
    arguments = [*of_triton(triton), "-u", "4", "-r", "4", "-s", "2", "--leave-share", "1"]
    arguments += ["--prompts", str(loadtests.endless(tmp_path))]
    with load_test("cancelling", triton.grpc, tmp_path, *arguments) as run:
        await ended(run, requests=4)
    requests = run.result["requests"]
    assert requests["failed"] == requests["complete"] == 0
    assert requests["left"] >= 4
    assert int(run.rows["answer (left)"]["Request Count"]) == requests["left"]
    await eventually(lambda: triton.load() == 0, "nothing runs for who has left")
    await triton.settled(within=WITHIN)
    cancelled = triton.gauge("tritonstream:requests_cancelled_total") - before
    assert requests["left"] <= cancelled <= requests["left"] + requests["unfinished"]


async def test_a_ramp_finds_where_the_server_stops(triton: Triton, tmp_path: Path) -> None:
    """A model that takes one request at a time carries little; the result says how much, and it can be drawn."""
    for seconds in (2, 10):  # the second one is for a machine that stood still in the first
        arguments = [*of_triton(triton, NARROW), "-s", "1", "--max-tokens", "16", "--step-seconds", str(seconds)]
        arguments += ["--from-rate", "1", "--to-rate", "120", "--steps", "4", "--arrivals", "constant"]
        code, run = await asyncio.to_thread(ran, "ramp", triton.grpc, tmp_path, *arguments)
        steps = run.result["steps"]
        if len(steps) >= 2:
            break
    assert 2 <= len(steps) <= 4, run.output
    most = max(steps, key=lambda step: step["offered"])
    assert not most["carried"], steps
    assert run.result["knee"] is None or run.result["knee"]["offered"] < most["offered"]
    assert code == 0, run.output
    await eventually(lambda: triton.load(NARROW) == 0, "who was left waiting is aborted", WITHIN)
    command = [sys.executable, "-m", "loadtests.kit.plot", str(tmp_path / "result.json")]
    await asyncio.to_thread(subprocess.run, command, check=True, cwd=loadtests.ROOT)
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


async def test_a_wrong_model_is_named(triton: Triton, tmp_path: Path) -> None:
    """Every request fails by that kind, and the exit code says that the objective was broken."""
    arguments = ["--model", "Nobody", "-u", "4", "-r", "4", "--slo", "error_rate<50%"]
    with load_test("steady", triton.grpc, tmp_path, *arguments) as run:
        code = await ended(run, requests=1)
    assert code == 1, run.output
    requests = run.result["requests"]
    assert requests["failed"] == requests["requests"] > 0
    assert list(run.result["errors"]) == ["ModelNotFound (caller)"]
    assert "Nobody" in run.result["errors"]["ModelNotFound (caller)"]["first"]
    assert "BROKEN  error_rate<50%  (100.000%)" in run.output


@pytest.mark.parametrize("scheme", ["", "http://"], ids=["grpc", "openai"])
async def test_five_hundred_users_and_nobody_there(scheme: str, tmp_path: Path) -> None:
    """An unreachable port fails each of them, again and again, and hangs none."""
    arguments = ["-u", "500", "-r", "500", "--slo", "error_rate<1%"]
    with load_test("steady", f"{scheme}127.0.0.1:{server.free_port()}", tmp_path, *arguments) as run:
        code = await ended(run, requests=1_000)
    assert code == 1, run.output
    requests = run.result["requests"]
    assert requests["failed"] == requests["requests"] > 0
    assert list(run.result["errors"]) == [UNREACHABLE]
    assert int(run.rows["Aggregated"]["Failure Count"]) == requests["failed"]


async def test_five_hundred_users_of_a_server_that_freezes(tmp_path: Path) -> None:
    """In the midst of their answers: each waits as long as a request may take, and goes on when the server does."""
    arguments = ["-u", "500", "-r", "500", "--deadline", "2", "--model", "any"]
    with generators.fast_server(1, tokens=8, pace=0.1) as url:
        (frozen,) = (one for one in psutil.Process().children() if "tools.fastserver" in one.cmdline())
        with load_test("steady", url, tmp_path, *arguments) as run:
            await eventually(lambda: run.counted[0] > 500, "there are answers", WITHIN)
            assert run.counted[1] == 0
            frozen.suspend()
            await eventually(lambda: run.counted[1] >= 500, "they failed", WITHIN)
            frozen.resume()
            requests, failures = run.counted
            await eventually(lambda: run.counted[0] - run.counted[1] > requests - failures + 500, "they go on", WITHIN)
            await asyncio.to_thread(run.end)
    assert list(run.result["errors"]) == [LATE]
    assert run.result["requests"]["unfinished"] == 0


async def test_the_receiving_process_may_die(triton: Triton, tmp_path: Path) -> None:
    """Who waited on it is told, another takes its place, and the test goes on."""
    arguments = [*of_triton(triton), "-u", "3", "-r", "3", "--prompts", str(loadtests.endless(tmp_path))]
    arguments += ["--max-tokens", "200"]
    with load_test("steady", triton.grpc, tmp_path, *arguments) as run:
        await eventually(lambda: run.counted[0] > 0, "there are answers", WITHIN)
        (driver,) = _drivers(run.process.pid)
        driver.kill()
        await eventually(lambda: run.counted[1] > 0, "its requests failed", WITHIN)
        requests, failures = run.counted
        await eventually(lambda: run.counted[0] - run.counted[1] > requests - failures, "there are answers", WITHIN)
        code = await asyncio.to_thread(run.end)
    assert code == 1, run.output  # locust's own: there were failures, and no objective allows them
    assert list(run.result["errors"]) == [DIED]
    assert 1 <= run.result["errors"][DIED]["count"] <= 3


def _drivers(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if "loadtests.kit.driver" in process.cmdline()]


async def test_the_web_ui_shows_rows_and_charts(triton: Triton, tmp_path: Path) -> None:
    """A page of charts hangs together with locust's own, and the report that it offers has them too."""
    port = server.free_port()
    arguments = [*of_triton(triton), "-u", "2", "-r", "2", "--prompts", str(loadtests.known(tmp_path))]
    arguments += ["--max-tokens", "16", "--autostart", "--web-host", "127.0.0.1", "--web-port", str(port)]
    with load_test("steady", triton.grpc, tmp_path, *arguments, headless=False) as run:
        page = _page(f"http://127.0.0.1:{port}")
        await eventually(lambda: "answer: TTFT ms" in page("/stats/requests"), "there are rows", WITHIN)
        assert page("/streaming").count("<polyline") > 4
        assert "Streaming charts" in page("/")
        assert "<b>TTFT, ms</b>" in page("/stats/report")
        assert await asyncio.to_thread(run.end) == 0


def _page(url: str) -> Callable[[str], str]:
    def get(path: str) -> str:
        try:
            with urllib.request.urlopen(url + path, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    return get


async def test_arguments_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    """Before anything is asked, by name, value and what is wanted."""
    for arguments, said in (
        (["--slo", "ttft_p95<800"], "ttft_p95 is given in us, ms, s or m, got 'no unit' in 'ttft_p95<800'"),
        (["--rate-per-user", "0"], "--rate-per-user must be above 0, got 0"),
        (["--prompts", "/nowhere.jsonl"], "--prompts /nowhere.jsonl cannot be read"),
    ):
        code, run = await asyncio.to_thread(ran, "open_loop", "127.0.0.1:1", tmp_path, *arguments)
        assert code == 1
        assert f"error: {said}" in run.output


async def test_one_core_receives_eight_thousand_messages_a_second() -> None:
    """By the CPU that they cost, the better of two tries: the machine may be busy with something else."""
    speeds = []
    for _ in range(2):
        speed = await asyncio.to_thread(generators.of_locust, streams=200, seconds=5, tokens=64, pace=0.03, servers=1)
        speeds.append(speed)
        if speed.messages > 1_000 and speed.messages_per_cpu_s >= 8_000:
            return
    raise AssertionError(f"less than 8,000 messages per CPU second: {speeds}")


def check_killed(run: LoadTest, users: int) -> None:
    """Assert that every open request failed by its kind, and every new one, and nobody hangs."""
    requests = run.result["requests"]
    assert requests["complete"] > 0
    assert requests["unfinished"] <= users
    assert UNREACHABLE in run.result["errors"]
    assert sum(error["count"] for error in run.result["errors"].values()) == requests["failed"]
    assert run.result["slo"]["kept"] is False


async def test_a_gateway_is_loaded_over_sse_until_it_is_killed(triton: Triton, tmp_path: Path) -> None:
    """The same rows over SSE, in conversations that go on from what it answered; its death ends no load test."""
    arguments = [*of_triton(triton), "-u", "4", "-r", "4", "--max-tokens", "24", "--slo", "error_rate<1%"]
    log = tmp_path / "gateway.log"
    with gateway.launch(
        triton.grpc, triton.server.metrics_url, log=log, grace=5, arguments=["--workers", "1"]
    ) as front:
        front.wait_ready()
        with load_test("chat", front.url, tmp_path, *arguments) as run:
            await eventually(lambda: run.counted[0] - run.counted[1] >= 10, "there are answers", WITHIN)
            front.kill()
            code = await ended(run, failures=12)
    assert code == 1, run.output
    check_killed(run, 4)
    complete = run.result["requests"]["complete"]
    assert {run.rows[f"turn {turn}"]["Type"] for turn in (1, 2)} == {"openai"}
    assert int(run.rows["Aggregated"]["Request Count"]) == run.result["requests"]["requests"]
    assert run.result["tokens"]["prompt"] > run.result["tokens"]["output"] == 24 * complete
    assert int(run.rows["server: queue time ms"]["Request Count"]) > 0
    await eventually(lambda: triton.load() == 0, "nothing runs for who was cut off")


async def test_a_triton_that_is_killed_ends_no_load_test(
    tiny_model: Path, nothing_left: set[Path], tmp_path: Path
) -> None:
    """In the midst of long answers of sixteen users."""
    arguments = ["-u", "16", "-r", "16", "--prompts", str(loadtests.endless(tmp_path))]
    arguments += ["--max-tokens", "100", "--slo", "error_rate<1%"]
    with servers.serving(tmp_path / "repository", {TINY: servers.ENGINE | {"model": str(tiny_model)}}) as doomed:
        nothing_left |= processes.shared_memory(processes.marked(os.environ[processes.MARK]))
        with load_test("steady", doomed.grpc, tmp_path, *arguments) as run:
            await eventually(lambda: run.counted[0] - run.counted[1] >= 1, "there are answers", WITHIN)
            doomed.server.kill()
            code = await ended(run, failures=32)
    assert code == 1, run.output
    check_killed(run, 16)
