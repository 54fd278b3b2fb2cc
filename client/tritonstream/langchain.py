"""LangChain's ChatOpenAI, with the model's reasoning: `ChatOpenAI` itself drops what OpenAI's own API does not have.

    from tritonstream.langchain import ChatTritonstream

    chat = ChatTritonstream(model="Qwen3-0.6B", base_url="http://127.0.0.1:9000/v1", api_key="EMPTY")
    chat.invoke("What is 8 plus 5?").additional_kwargs["reasoning_content"]

It needs `langchain-openai`, which this package does not install.
"""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI

REASONING = "reasoning_content"


class ChatTritonstream(ChatOpenAI):
    """ChatOpenAI whose messages, whole and streamed, hold the reasoning in `additional_kwargs["reasoning_content"]`."""

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        choices = chunk.get("choices") or chunk.get("chunk", {}).get("choices") or ()
        for choice in choices[:1]:
            thought = (choice.get("delta") or {}).get(REASONING)
            if generation is not None and thought:
                generation.message.additional_kwargs[REASONING] = thought
        return generation

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        found = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation, choice in zip(result.generations, found["choices"], strict=True):
            if thought := choice["message"].get(REASONING):
                generation.message.additional_kwargs[REASONING] = thought
        return result
