// @langchain/openai: a chat, its stream, bound tools, typed output in its three ways, embeddings.
import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const SAID = "Hello, I am a model of one layer, and I say what I was told to say.";
const here = { model: "parrot", apiKey: "none", maxRetries: 0, configuration: { baseURL: `${process.argv[2]}/v1` } };
const chat = new ChatOpenAI(here);
assert.equal((await chat.invoke("script:hello")).content, SAID);
let text = "";
for await (const chunk of await chat.stream("script:hello")) text += chunk.content;
assert.equal(text, SAID);
const weather = tool(async ({ city }) => `21 degrees in ${city}`, { name: "get_weather",
  description: "The weather of a city.", schema: z.object({ city: z.string() }) });
const bound = chat.bindTools([weather]);
const messages = [new HumanMessage("In Paris? script:weather")];
messages.push(await bound.invoke(messages));
for (const call of messages[1].tool_calls)
  messages.push(new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id }));
assert.equal((await bound.invoke(messages)).content, "It is 21 degrees in Paris.");
const CITY = z.object({ name: z.string(), people: z.number().int() });
for (const [method, script] of [["jsonSchema", "city"], ["functionCalling", "city-call"], ["jsonMode", "city"]]) {
  const typed = chat.withStructuredOutput(CITY, { method, name: "City" });
  assert.deepEqual(await typed.invoke(`Which city? In JSON. script:${script}`), { name: "Paris", people: 2100000 });
}
const [one, two] = await new OpenAIEmbeddings(here).embedDocuments(["a cat", "a house"]);
assert.notDeepEqual(one, two);
console.log("done");
