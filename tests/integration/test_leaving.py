"""Requests that end before their answer does: cancelled while queued, in prefill, in decode; or by their deadline."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from tests.integration.conftest import NARROW
from tests.support import servers, tiny_qwen3
from tests.support.metrics import eventually, usually_within
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import Wire

CAPITAL = case("capital")
QUICK: dict[str, Any] = {
    "chat": {"messages": list(CAPITAL.messages), "chat_template_kwargs": CAPITAL.template_kwargs},
    "sampling": {"max_tokens": 1},
}
WHEEL = {
    "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    "chat_template_kwargs": {"enable_thinking": False},
}
ENDLESS: dict[str, Any] = {"chat": WHEEL, "sampling": {"ignore_eos": True}}  # until the context is full
LONG_PROMPT: dict[str, Any] = {
    "text_input": "a" * 12_000,
    "sampling": {"max_tokens": 1},
}  # 1,500 steps of the narrow engine
FREED_WITHIN = 0.25  # seconds from a cancel to an engine that is free


@pytest.fixture(autouse=True)
async def idle(triton: Triton) -> None:
    """Begin with engines that have nothing to do."""
    await eventually(lambda: triton.load(servers.TINY) + triton.load(NARROW) == 0, "nothing to do")


async def waits(triton: Triton, number: int) -> None:
    """Wait until so many requests stand in the narrow engine's queue."""
    await eventually(lambda: waiting(triton) == number, f"{number} requests wait")


def waiting(triton: Triton) -> float:
    """How many requests stand in the narrow engine's queue."""
    return triton.gauge("vllm:num_requests_waiting", NARROW)


class TestCancel:
    """Whoever cancels the RPC gives the engine back."""

    async def test_in_decode(self, narrow: Wire) -> None:
        """The only place in the engine is free at once: what waited for it has its first token within 250 ms."""

        async def freed() -> float:
            async with narrow.open(**ENDLESS) as endless, narrow.open(**QUICK) as next_one:
                await endless.until(20)
                left = endless.cancel()
                answer = (await next_one.rest()).ok()
            assert CAPITAL.expected.startswith(answer.text())
            return answer.responses[0].at - left

        await usually_within(FREED_WITHIN, freed)

    async def test_in_prefill(self, triton: Triton, narrow: Wire) -> None:
        """A prompt that is still being read is dropped in the middle."""
        whole = (await narrow.ask(**LONG_PROMPT)).ok()
        assert whole.ended - whole.began > 2 * FREED_WITHIN, "the prompt is too short for this test"

        async def freed() -> float:
            async with narrow.open(**LONG_PROMPT) as reading:
                await eventually(lambda: triton.load(NARROW) == 1, "it is read")
                async with narrow.open(**QUICK) as next_one:
                    left = reading.cancel()
                    answer = (await next_one.rest()).ok()
                assert await reading.receive() is None, "it was read to its end"
            return answer.responses[0].at - left

        await usually_within(FREED_WITHIN, freed)

    async def test_while_queued(self, triton: Triton, narrow: Wire) -> None:
        """One that never started leaves the queue, and the one that runs does not notice."""

        async def freed() -> float:
            async with narrow.open(**ENDLESS) as endless:
                await endless.until(20)
                async with narrow.open(**QUICK) as queued:
                    await waits(triton, 1)
                    queued.cancel()
                    took = await eventually(lambda: waiting(triton) == 0, "it left the queue")
                text = await endless.until(len(endless.answer.text()) + 20)
                assert text == tiny_qwen3.wheel(len(text))
            return took

        await usually_within(FREED_WITHIN, freed)

    @pytest.mark.parametrize("characters", [1, 200])
    async def test_the_running_count_goes_back_to_zero(self, triton: Triton, wire: Wire, characters: int) -> None:
        """Many at once, on the engine with room for many: Triton's own metrics port says so within 250 ms."""

        async def freed() -> float:
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(self.read_and_leave(wire, characters))
            return await eventually(lambda: triton.load() == 0, "nothing runs")

        await usually_within(FREED_WITHIN, freed)

    @staticmethod
    async def read_and_leave(wire: Wire, characters: int) -> None:
        """Read the beginning of the endless answer."""
        async with wire.open(**ENDLESS) as call:
            await call.until(characters)
            call.cancel()

    async def test_before_anything_came(self, triton: Triton, wire: Wire) -> None:
        """Cancelling at once leaves nothing running, whether or not the request had arrived."""
        for pause in (0.0, 0.001, 0.003, 0.01, 0.03):
            async with wire.open(**ENDLESS) as call:
                await asyncio.sleep(pause)
                call.cancel()
        await asyncio.sleep(0.1)  # a request that was on its way may be counted only now
        await eventually(lambda: triton.load() == 0, "nothing runs")
        assert (await wire.ask(**QUICK)).ok()

    async def test_several_choices(self, triton: Triton, wire: Wire) -> None:
        """All choices of a request go with it."""
        async with wire.open(chat=WHEEL, sampling={"n": 4, "ignore_eos": True}) as call:
            await call.until(50)
            await eventually(lambda: triton.load() == 4, "four run")
            call.cancel()
        await eventually(lambda: triton.load() == 0, "nothing runs")

    async def test_a_reader_who_vanishes(self, triton: Triton, wire: Wire) -> None:
        """A closed connection is as good as a cancelled call."""
        from tests.support.wire import connect

        async with connect(triton.grpc, servers.TINY) as other, other.open(**ENDLESS) as call:
            await call.until(20)
            await other.close()
        await eventually(lambda: triton.load() == 0, "nothing runs")

    async def test_it_is_counted(self, triton: Triton, wire: Wire) -> None:
        """Cancelled requests, and the tokens that were made for nobody, which are few."""
        names = ("tritonstream:requests_cancelled_total", "tritonstream:tokens_wasted_total")
        await triton.settled()
        before = [triton.gauge(name) for name in names]
        for _ in range(3):
            await self.read_and_leave(wire, 30)
        await eventually(lambda: triton.gauge(names[0]) == before[0] + 3, "three cancelled requests are counted")
        wasted = triton.gauge(names[1]) - before[1]
        assert 0 < wasted < 3 * 200

    async def test_the_answer_of_others_is_untouched(self, wire: Wire) -> None:
        """While neighbours leave, a story is told to its end."""
        story = case("story")
        told = asyncio.create_task(
            wire.ask(chat={"messages": list(story.messages), "chat_template_kwargs": story.template_kwargs})
        )
        for characters in range(1, 60, 6):
            await self.read_and_leave(wire, characters)
        assert (await told).ok().text() == story.expected

    async def test_whole_answers_can_be_left_too(self, triton: Triton, wire: Wire) -> None:
        """stream=false sends nothing until the end, and is watched all the same."""
        async with wire.open(**ENDLESS, stream=False) as call:
            await eventually(lambda: triton.load() == 1, "it runs")
            call.cancel()
        await eventually(lambda: triton.load() == 0, "nothing runs")


class TestDeadline:
    """deadline_ms, from the moment the server reads the request."""

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_it_ends_the_answer(self, triton: Triton, wire: Wire, *, stream: bool) -> None:
        """The error says so, the text until then was delivered, the engine is free."""

        async def took() -> float:
            answer = await wire.ask(**ENDLESS, stream=stream, parameters={"deadline_ms": 400})
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert answer.details.startswith("deadline_ms=400")
            assert answer.ended - answer.began > 0.35
            assert stream or answer.text() == ""
            assert tiny_qwen3.wheel(len(answer.text())) == answer.text()
            texts.append(answer.text())
            return answer.ended - answer.began

        texts: list[str] = []
        await usually_within(1.0, took)
        assert any(texts) == stream
        await eventually(lambda: triton.load() == 0, "nothing runs")

    async def test_it_counts_in_the_queue(self, narrow: Wire) -> None:
        """One that never started is told in time too."""

        async def took() -> float:
            async with narrow.open(**ENDLESS) as endless:
                await endless.until(10)
                answer = await narrow.ask(**QUICK, parameters={"deadline_ms": "300"})
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert answer.details.startswith("deadline_ms=300")
            assert len(answer.responses) == 1
            assert answer.ended - answer.began > 0.25
            return answer.ended - answer.began

        await usually_within(0.8, took)

    async def test_it_is_the_one_final_response(self, wire: Wire) -> None:
        """The error comes last, has the final flag, and nothing else has it."""
        answer = await wire.ask(**ENDLESS, parameters={"deadline_ms": 200})
        assert [response.final for response in answer.responses] == [False] * (len(answer.responses) - 1) + [True]
        assert [response.error != "" for response in answer.responses] == [
            response.final for response in answer.responses
        ]

    async def test_whoever_asks_for_a_real_status_gets_it(self, wire: Wire) -> None:
        """Triton has no deadline among its codes: it is CANCELLED, and says why."""
        answer = await wire.ask(**ENDLESS, parameters={"deadline_ms": 100}, real_status=True)
        assert answer.status is grpc.StatusCode.CANCELLED
        assert "DEADLINE_EXCEEDED: deadline_ms=100" in answer.status_details

    async def test_an_answer_in_time_is_not_touched(self, wire: Wire) -> None:
        """A deadline that is far away changes nothing."""
        answer = await wire.ask(**QUICK | {"sampling": None}, parameters={"deadline_ms": 60_000})
        assert answer.ok().text() == CAPITAL.expected

    async def test_it_is_counted(self, triton: Triton, wire: Wire) -> None:
        """A missed deadline is not a cancelled request."""
        names = ("tritonstream:requests_expired_total", "tritonstream:requests_cancelled_total")
        await triton.settled()
        before = [triton.gauge(name) for name in names]
        await wire.ask(**ENDLESS, parameters={"deadline_ms": 100})
        await eventually(lambda: triton.gauge(names[0]) == before[0] + 1, "it is counted")
        assert triton.gauge(names[1]) == before[1]


class TestPriority:
    """priority, where the engine schedules by it."""

    async def test_the_more_urgent_goes_first(self, triton: Triton, narrow: Wire) -> None:
        """Of two that wait, the lower number is taken first, though it came second."""
        ended: dict[str, float] = {}

        async def ask(name: str, priority: int) -> None:
            (await narrow.ask(**QUICK, parameters={"request_priority": priority})).ok()
            ended[name] = time.monotonic()

        async with (
            narrow.open(**ENDLESS, parameters={"request_priority": -10}) as endless,
            asyncio.TaskGroup() as group,
        ):
            await endless.until(10)
            group.create_task(ask("later", 5))
            await waits(triton, 1)
            group.create_task(ask("sooner", 1))
            await waits(triton, 2)
            endless.cancel()
        assert ended["sooner"] < ended["later"]
