// A router that asks prefill and decode at once: it makes the reference itself, so that decode's request needs no answer of
// prefill. Decode asks the node server for the blocks while prefill still computes, and waits there.
//
// Each attempt has a reference of its own. If prefill refuses, the reference is declined: decode hears it at once, and the
// request goes to the next prefill engine under a new one. If no decode engine takes the request, it is declined as well.
//
// usage: node dispatch.js PORT PREFILL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT
//
// PREFILL is URL#ENGINE_ID@HOME: where its HTTP server is, its engine_id, and the address of the node server that is its
// home, as other hosts reach it. DECODE_URL is the URL of a vLLM, or sglang+URL of an SGLang.

import { randomInt } from "node:crypto";

import { Asked, Completion, Pool, TransferParams, ask, firstOf, serve } from "./engines.js";
import { NodeServer, References } from "./kvferry.js";

const SGLANG = "sglang+";

const [port, prefills, decodes, address, protoRoot] = process.argv.slice(2) as [string, string, string, string, string];
if (protoRoot === undefined) {
  console.error("usage: node dispatch.js PORT PREFILL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT");
  process.exit(2);
}
const nodeServer = new NodeServer(address, protoRoot);
const references = new References(protoRoot);

interface Source {
  url: string;
  engineId: string;
  home: string;
}

function source(text: string): Source {
  const [, url, engineId, home] = /^(.+)#(.+)@(.+)$/.exec(text) ?? [];
  if (!url || !engineId || !home) throw new Error(`${text} is not URL#ENGINE_ID@HOME`);
  return { url, engineId, home };
}

const prefill = new Pool(prefills.split(",").map(source));
const decode = new Pool(decodes.split(","));

/** Nobody will read it, or nobody will publish it: whoever waits for it need not any more. */
async function decline(reference: string): Promise<void> {
  try {
    await nodeServer.decline(reference);
  } catch (error) {
    // UNREACHABLE … Waits and holds end by their time all the same.
    console.error(`decline: ${error}`);
  }
}

/** Where a decode engine is asked, and what: each make has a field of its own for the reference. */
function toDecode(engine: string, body: Completion, shared: TransferParams): Asked {
  if (engine.startsWith(SGLANG)) {
    // In the place of a prefill instance of its own make. A room names one attempt, as a reference does.
    const room = 1 + randomInt(2 ** 48 - 1);
    const fields = { bootstrap_host: shared.kvferry_reference, bootstrap_port: 1, bootstrap_room: room };
    return [engine.slice(SGLANG.length), { ...body, stream: false, ...fields }];
  }
  const params = { ...shared, do_remote_decode: false, do_remote_prefill: true };
  return [engine, { ...body, stream: false, kv_transfer_params: params }];
}

interface Attempt {
  answer?: Completion;
  /** Why there is none. */
  failure?: unknown;
  /** Prefill is the reason, so another one may do. */
  again: boolean;
}

async function attempt(from: Source, body: Completion, traceparent?: string): Promise<Attempt> {
  const reference = references.make(from.home, from.engineId);
  const shared: TransferParams = { kvferry_reference: reference };
  if (traceparent) shared.kvferry_traceparent = traceparent;
  const here = { ...shared, do_remote_decode: true, do_remote_prefill: false };
  const prefilled = ask(from.url, { ...body, max_tokens: 1, stream: false, kv_transfer_params: here });
  const decoded = firstOf(decode, (engine) => toDecode(engine, body, shared));
  let refused: { error: unknown } | undefined;
  prefilled.catch((error: unknown) => {
    refused = { error };
    // Decode would wait for its time: tell it as soon as prefill has refused.
    return decline(reference);
  });
  try {
    return { answer: await decoded, again: false };
  } catch (failure) {
    await decline(reference);
    // If it has not refused by now, it is not why decode has no answer.
    return { failure: refused?.error ?? failure, again: refused !== undefined };
  }
}

async function complete(body: Completion, traceparent?: string): Promise<Completion> {
  let failure: unknown = new Error("there is no engine");
  for (const from of prefill.all()) {
    const made = await attempt(from, body, traceparent);
    if (made.answer) return made.answer;
    failure = made.failure;
    if (!made.again) break;
  }
  throw failure;
}

serve(Number(port), complete);
