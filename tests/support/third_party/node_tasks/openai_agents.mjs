// @openai/agents: an agent with a tool, whole and streamed, by chat completions.
import assert from "node:assert/strict";
import { Agent, OpenAIChatCompletionsModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const weather = tool({ name: "get_weather", description: "The weather of a city.",
  parameters: z.object({ city: z.string() }), execute: async ({ city }) => `21 degrees in ${city}` });
const model = new OpenAIChatCompletionsModel(client, "parrot");
const agent = new Agent({ name: "weather", instructions: "You help.", model, tools: [weather] });
assert.equal((await run(agent, "In Paris? script:weather")).finalOutput, "It is 21 degrees in Paris.");
const streamed = await run(agent, "In Paris? script:weather", { stream: true });
let text = "";
for await (const piece of streamed.toTextStream()) text += piece;
await streamed.completed;
assert.equal(text, "It is 21 degrees in Paris.");
console.log("done");
