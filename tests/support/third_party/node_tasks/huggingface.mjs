// @huggingface/inference: a chat and its stream at an endpoint of one's own.
import assert from "node:assert/strict";
import { InferenceClient } from "@huggingface/inference";

const SAID = "Hello, I am a model of one layer, and I say what I was told to say.";
const client = new InferenceClient("none", { endpointUrl: `${process.argv[2]}/v1` });
const asked = { model: "parrot", messages: [{ role: "user", content: "script:hello" }] };
assert.equal((await client.chatCompletion(asked)).choices[0].message.content, SAID);
let text = "";
for await (const chunk of client.chatCompletionStream(asked)) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, SAID);
console.log("done");
