// What both routers do with engines: they ask one after the other over HTTP, and answer their own clients.

import { createServer } from "node:http";
import { randomUUID } from "node:crypto";

/** Milliseconds for one engine's answer. */
const ANSWER_TIMEOUT = 120_000;

export interface TransferParams {
  kvferry_reference?: string;
  kvferry_traceparent?: string;
  [name: string]: unknown;
}

export interface Completion {
  kv_transfer_params?: TransferParams;
  [name: string]: unknown;
}

/** One engine after the other, beginning where the last request ended. */
export class Pool<Engine> {
  private next = 0;

  constructor(private readonly engines: Engine[]) {}

  *all(): Generator<Engine> {
    const first = this.next++;
    for (let index = 0; index < this.engines.length; index++) yield this.engines[(first + index) % this.engines.length]!;
  }
}

export async function ask(url: string, body: Completion): Promise<Completion> {
  const headers = { "content-type": "application/json", "x-request-id": randomUUID() };
  const signal = AbortSignal.timeout(ANSWER_TIMEOUT);
  const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(`${url} answered ${answer.status}`);
  return (await answer.json()) as Completion;
}

/** Where an engine is asked, and what. */
export type Asked = [url: string, body: Completion];

/** The first answer of those that take it; `asked` says what each engine of the pool is asked. */
export async function firstOf(pool: Pool<string>, asked: (engine: string) => Asked): Promise<Completion> {
  let failure: unknown = new Error("there is no engine");
  for (const engine of pool.all()) {
    try {
      return await ask(...asked(engine));
    } catch (error) {
      failure = error;
    }
  }
  throw failure;
}

/** Answers every POST with what `complete` makes of its body. */
export function serve(port: number, complete: (body: Completion, traceparent?: string) => Promise<Completion>): void {
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
  }).listen(port, "127.0.0.1", () => console.log("listening"));
}
