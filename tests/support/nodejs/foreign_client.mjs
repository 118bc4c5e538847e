// A client that knows kvferry by its .proto files alone: Handshake with the source's home, then ReadBlocks, as a router or engine
// in another language would do it. Prints one JSON object.
//
// usage: node foreign_client.mjs PROTO_ROOT REFERENCE HANDSHAKE_JSON

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";
import { randomBytes } from "node:crypto";
import path from "node:path";

const [root, text, handshakeJson] = process.argv.slice(2);
const file = "kvferry/v1/kv_transfer.proto";

const types = new protobuf.Root();
types.resolvePath = (origin, target) =>
  target.startsWith("google/") ? protobuf.util.path.resolve(origin, target) : path.join(root, target);
await types.load(file);
const body = Buffer.from(text.slice("kvf1.".length), "base64url");
const reference = types.lookupType("kvferry.v1.Reference").decode(body);

const options = { includeDirs: [root], longs: String, enums: String, keepCase: true, defaults: true, oneofs: true };
const loaded = grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
const client = new loaded.kvferry.v1.KVTransfer(reference.home, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 10_000 });

// The contract that this client was made for; see the protos.
const version = { contract_revision: 2 };
const reader = { engine_id: "foreign", incarnation: randomBytes(16) };
const pages = [];
await new Promise((resolve, reject) => {
  const call = client.Handshake(
    { engine_id: reference.engineId, reader, version, reference: text, ...JSON.parse(handshakeJson) },
    deadline(),
  );
  call.on("data", (page) => pages.push(page));
  call.on("error", reject);
  call.on("end", resolve);
});
const ranks = pages.flatMap((page) => page.ranks);

const read = await new Promise((resolve, reject) =>
  client.ReadBlocks(
    { reference: text, reader, version, read_id: randomBytes(16), parties: 1 },
    deadline(),
    (error, answer) => (error ? reject(error) : resolve(answer)),
  ),
);
const done = await new Promise((resolve, reject) =>
  client.Notify(
    {
      sender: reader,
      version,
      notifications: [
        { read_done: { lease_id: read.accepted.lease_id, reports: [{ rank: 0, outcome: "RANK_OUTCOME_DONE", bytes: 0 }] } },
      ],
    },
    deadline(),
    (error, answer) => (error ? reject(error) : resolve(answer)),
  ),
);
client.close();

console.log(
  JSON.stringify({
    home: reference.home,
    ranks: ranks.length,
    planes: ranks[0].planes.length,
    agents: pages.flatMap((page) => page.agents).map((agent) => agent.metadata.length),
    blocks: read.blocks.flatMap((step) => step.groups),
    steps: read.complete.steps,
    verdict: done.results[0].read_ended.verdict,
  }),
);
