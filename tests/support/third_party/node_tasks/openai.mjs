// openai for node: a chat, its stream, a typed answer, a tool that it runs by itself, and embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";

const SAID = "Hello, I am a model of one layer, and I say what I was told to say.";
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "parrot";
const said = (content) => [{ role: "user", content }];
const CITY = { type: "object", properties: { name: { type: "string" }, people: { type: "integer" } },
  required: ["name", "people"], additionalProperties: false };

const whole = await client.chat.completions.create({ model, messages: said("script:hello") });
assert.equal(whole.choices[0].message.content, SAID);
let text = "";
let usage;
for await (const chunk of await client.chat.completions.create({ model, messages: said("script:hello"), stream: true,
  stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, SAID);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
const typed = await client.chat.completions.parse({ model, messages: said("Which city? script:city"),
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema: CITY } } });
assert.deepEqual(JSON.parse(typed.choices[0].message.content), { name: "Paris", people: 2100000 });
const run = client.chat.completions.runTools({ model, stream: true, messages: said("In Paris? script:weather"),
  tools: [{ type: "function", function: { name: "get_weather", description: "The weather of a city.",
    function: async ({ city }) => { assert.equal(city, "Paris"); return "21 degrees"; }, parse: JSON.parse,
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }] });
assert.equal(await run.finalContent(), "It is 21 degrees in Paris.");
const vectors = await client.embeddings.create({ model, input: ["a cat", "a house"] });
assert.equal(vectors.data.length, 2);
assert.notDeepEqual(vectors.data[0].embedding, vectors.data[1].embedding);
await assert.rejects(client.chat.completions.create({ model: "other", messages: said("x") }), OpenAI.NotFoundError);
console.log("done");
