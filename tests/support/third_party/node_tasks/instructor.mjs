// @instructor-ai/instructor: an object by a call of a tool and by JSON.
import assert from "node:assert/strict";
import Instructor from "@instructor-ai/instructor";
import OpenAI from "openai";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const schema = z.object({ name: z.string(), people: z.number() });
for (const [mode, script] of [["TOOLS", "city-call"], ["JSON", "city"], ["JSON_SCHEMA", "city"]]) {
  const patched = Instructor({ client, mode });
  const city = await patched.chat.completions.create({ model: "parrot", max_retries: 0,
    messages: [{ role: "user", content: `Which city? script:${script}` }], response_model: { schema, name: "City" } });
  assert.equal(city.name, "Paris", mode);
  assert.equal(city.people, 2100000, mode);
}
console.log("done");
