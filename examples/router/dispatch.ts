// A router that asks prefill and decode at once: it makes the reference itself, so that decode's request needs no answer of
// prefill. Decode asks the node server for the blocks while prefill still computes, and waits there.
//
// Each attempt has a reference of its own. If prefill refuses, the reference is declined: decode hears it at once, and the
// request goes to the next prefill engine under a new one. If no decode engine takes the request, it is declined as well.
//
// usage: node dispatch.js PORT PREFILL[,…] DECODE_URL[,…] NODE_SERVER PROTO_ROOT
//
// PREFILL is URL#ENGINE_ID@HOME: where its HTTP server is, its engine_id, and the address of the node server that is its
// home, as other hosts reach it.

import { Completion, Pool, TransferParams, ask, firstOf, serve } from "./engines.js";
import { NodeServer, References } from "./kvferry.js";

const [port, prefills, decodes, address, protoRoot] = process.argv.slice(2) as [string, string, string, string, string];
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
  const there = { ...shared, do_remote_decode: false, do_remote_prefill: true };
  const prefilled = ask(from.url, { ...body, max_tokens: 1, stream: false, kv_transfer_params: here });
  const decoded = firstOf(decode, { ...body, stream: false, kv_transfer_params: there });
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
