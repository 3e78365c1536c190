"""semantic-kernel: a chat, its stream, a function that it calls by itself, and embeddings."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
chat = OpenAIChatCompletion(ai_model_id="parrot", async_client=client)


class Weather:
    @kernel_function(name="get_weather", description="The weather of a city.")
    def get_weather(self, city: str) -> str:
        return "21 degrees"


def history(text):
    found = ChatHistory()
    found.add_user_message(text)
    return found


async def main():
    plain = OpenAIChatPromptExecutionSettings()
    assert str(await chat.get_chat_message_content(history("script:hello"), plain)) == SAID
    streamed = [str(piece) async for piece in chat.get_streaming_chat_message_content(history("script:hello"), plain)]
    assert "".join(streamed) == SAID
    kernel = Kernel(services=[chat])
    kernel.add_plugin(Weather(), "weather")
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    answer = await chat.get_chat_message_content(history("In Paris? script:plugin"), settings, kernel=kernel)
    assert str(answer) == "It is 21 degrees in Paris."
    one, two = await OpenAITextEmbedding(ai_model_id="parrot", async_client=client).generate_embeddings(
        ["a cat", "dogs"]
    )
    assert list(one) != list(two)


asyncio.run(main())
print("done")
