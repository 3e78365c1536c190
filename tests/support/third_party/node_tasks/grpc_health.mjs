// @grpc/grpc-js with grpc-health-check's definitions: the health of the service, asked and watched.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { credentials, loadPackageDefinition } from "@grpc/grpc-js";

const require = createRequire(`${process.cwd()}/`);
const { loadSync } = require("@grpc/proto-loader");
const { protoPath } = require("grpc-health-check");
const { Health } = loadPackageDefinition(loadSync(protoPath)).grpc.health.v1;
const client = new Health(process.argv[3], credentials.createInsecure());
const answer = await new Promise((resolve, reject) =>
  client.Check({ service: "" }, (error, found) => (error ? reject(error) : resolve(found))));
assert.equal(answer.status, 1);
const watched = client.Watch({ service: "" });
const first = await new Promise((resolve, reject) => watched.once("data", resolve).once("error", reject));
assert.equal(first.status, 1);
watched.on("error", () => {});
watched.cancel();
client.close();
console.log("done");
