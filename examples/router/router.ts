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

import { Completion, Pool, TransferParams, firstOf, serve } from "./engines.js";
import { NodeServer } from "./kvferry.js";

const [port, prefills, decodes, address, protoRoot] = process.argv.slice(2) as [string, string, string, string, string];
if (protoRoot === undefined) {
  console.error("usage: node router.js PORT PREFILL_URL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT");
  process.exit(2);
}
const nodeServer = new NodeServer(address, protoRoot);

/** Nobody will read it. */
async function decline(reference: string): Promise<void> {
  try {
    await nodeServer.decline(reference);
  } catch (error) {
    // WRONG_KEY, UNREACHABLE … Time releases it all the same.
    console.error(`decline: ${error}`);
  }
}

const prefill = new Pool(prefills.split(","));
const decode = new Pool(decodes.split(","));

async function complete(body: Completion, traceparent?: string): Promise<Completion> {
  const remote: TransferParams = { do_remote_decode: true, do_remote_prefill: false };
  // Prefill's span comes back beside the reference, and goes to decode with it: one request is one trace.
  if (traceparent) remote.kvferry_traceparent = traceparent;
  const prompt = { ...body, max_tokens: 1, stream: false, kv_transfer_params: remote };
  const first = await firstOf(prefill, (url) => [url, prompt]);
  const params = first.kv_transfer_params ?? {};
  try {
    return await firstOf(decode, (url) => [url, { ...body, stream: false, kv_transfer_params: params }]);
  } catch (error) {
    if (params.kvferry_reference) await decline(params.kvferry_reference);
    throw error;
  }
}

serve(Number(port), complete);
