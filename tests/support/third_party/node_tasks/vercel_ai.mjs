// Vercel's AI SDK with @ai-sdk/openai-compatible: texts, streams, objects, tools in steps, embeddings.
import assert from "node:assert/strict";
import { embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const SAID = "Hello, I am a model of one layer, and I say what I was told to say.";
const provider = createOpenAICompatible({ name: "motley", baseURL: `${process.argv[2]}/v1`, apiKey: "none",
  includeUsage: true, supportsStructuredOutputs: true });
const model = provider("parrot");
const CITY = z.object({ name: z.string(), people: z.number().int() });
const tools = { get_weather: tool({ description: "The weather of a city.", inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `21 degrees in ${city}` }) };
const more = { model, maxRetries: 0 };

assert.equal((await generateText({ ...more, prompt: "script:hello" })).text, SAID);
const streamed = streamText({ ...more, prompt: "script:hello" });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, SAID);
assert.ok((await streamed.usage).outputTokens > 8);
const { object } = await generateObject({ ...more, schema: CITY, prompt: "Which city? script:city" });
assert.deepEqual(object, { name: "Paris", people: 2100000 });
const parts = streamObject({ ...more, schema: CITY, prompt: "Which city? script:city" });
for await (const part of parts.partialObjectStream) assert.ok(part);
assert.deepEqual(await parts.object, { name: "Paris", people: 2100000 });
const asked = { ...more, tools, stopWhen: stepCountIs(3), prompt: "In Paris? script:weather" };
const steps = await generateText(asked);
assert.equal(steps.text, "It is 21 degrees in Paris.");
assert.equal(steps.steps.length, 2);
assert.equal(await streamText(asked).text, "It is 21 degrees in Paris.");
const { embeddings } = await embedMany({ model: provider.textEmbeddingModel("parrot"), values: ["a cat", "a house"] });
assert.notDeepEqual(embeddings[0], embeddings[1]);
console.log("done");
