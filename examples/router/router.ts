// A router for prefill and decode, in another language, from kvferry's .proto files alone.
//
// It sends each request to a prefill engine, hands what comes out to a decode engine, and passes that one's answer on. The
// KV cache never comes near it: what it carries is a reference of some hundred bytes. The one thing it owes kvferry is a
// decline: when no decode engine takes the request, the prefill engine gets its blocks back now and not when the hold
// ends.
//
// It never looks into a reference: any node server takes a decline, and passes it on to the home.
//
// usage: node router.js PORT PREFILL_URL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT

import { createServer } from "node:http";
import { randomUUID } from "node:crypto";
import { NodeServer } from "./kvferry.js";

const [port, prefills, decodes, address, protoRoot] = process.argv.slice(2) as [string, string, string, string, string];
if (protoRoot === undefined) {
  console.error("usage: node router.js PORT PREFILL_URL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT");
  process.exit(2);
}
const nodeServer = new NodeServer(address, protoRoot);

interface TransferParams {
  kvferry_reference?: string;
  kvferry_traceparent?: string;
  [name: string]: unknown;
}

interface Completion {
  kv_transfer_params?: TransferParams;
  [name: string]: unknown;
}

/** One engine after the other, beginning where the last request ended. */
class Pool {
  private next = 0;

  constructor(private readonly urls: string[]) {}

  *all(): Generator<string> {
    const first = this.next++;
    for (let index = 0; index < this.urls.length; index++) yield this.urls[(first + index) % this.urls.length]!;
  }
}

/** Nobody will read it. */
async function decline(reference: string): Promise<void> {
  try {
    await nodeServer.decline(reference);
  } catch (error) {
    // WRONG_KEY, UNREACHABLE … Time releases it all the same.
    console.error(`decline: ${error}`);
  }
}

async function ask(url: string, body: Completion): Promise<Completion> {
  const headers = { "content-type": "application/json", "x-request-id": randomUUID() };
  const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${url} answered ${answer.status}`);
  return (await answer.json()) as Completion;
}

/** The first answer of those that take it. */
async function firstOf(pool: Pool, body: Completion): Promise<Completion> {
  let failure: unknown = new Error("there is no engine");
  for (const url of pool.all()) {
    try {
      return await ask(url, body);
    } catch (error) {
      failure = error;
    }
  }
  throw failure;
}

const prefill = new Pool(prefills.split(","));
const decode = new Pool(decodes.split(","));

async function complete(body: Completion, traceparent?: string): Promise<Completion> {
  const remote: TransferParams = { do_remote_decode: true, do_remote_prefill: false };
  // Prefill's span comes back beside the reference, and goes to decode with it: one request is one trace.
  if (traceparent) remote.kvferry_traceparent = traceparent;
  const first = await firstOf(prefill, { ...body, max_tokens: 1, stream: false, kv_transfer_params: remote });
  const params = first.kv_transfer_params ?? {};
  try {
    return await firstOf(decode, { ...body, stream: false, kv_transfer_params: params });
  } catch (error) {
    if (params.kvferry_reference) await decline(params.kvferry_reference);
    throw error;
  }
}

createServer(async (request, response) => {
  const parts: Buffer[] = [];
  for await (const part of request) parts.push(part as Buffer);
  try {
    const { traceparent } = request.headers;
    const body = JSON.parse(Buffer.concat(parts).toString()) as Completion;
    const answer = await complete(body, typeof traceparent === "string" ? traceparent : undefined);
    response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(answer));
  } catch (error) {
    response.writeHead(502, { "content-type": "text/plain" }).end(`${error}`);
  }
}).listen(Number(port), "127.0.0.1", () => console.log("listening"));
