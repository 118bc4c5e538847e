// A router that moves sessions: an engine can be emptied before it is stopped, and its streams go on at others.
//
// It streams the answer to each POST to /v1/completions from one vLLM. A POST to /empty with an engine's URL sends nothing
// more there and moves its sessions away; its answer ends, with "empty", when none is left. /fill takes it in again.
//
// A session also goes on elsewhere if its engine ends it (finish_reason "abort"), fails, or cannot be reached any more. The
// next engine gets the prompt and what was generated, as token ids, and the engine reference of the one before: it reads
// their KV cache there, and computes what it cannot read.
//
// usage: node sessions.js PORT ENGINE_URL,ENGINE_URL[,…]

import { IncomingMessage, ServerResponse, createServer } from "node:http";
import { once } from "node:events";

const PREFIX_SOURCE = "kvferry_prefix_source";

/** Milliseconds for an engine's answer to begin; and for an engine's reference, which is asked for while the client waits. */
const ANSWER_TIMEOUT = 120_000;
const REFERENCE_TIMEOUT = 2_000;

/** Sessions that move away from an engine at once: it holds a share of its blocks for those who read, and no more. */
const MOST_MOVES = 4;

/** Fields of requests whose meaning for the next token follows from the tokens before it, or is changed by `asked`. */
const MOVES = new Set([
  ...["model", "prompt", "stream", "stream_options", "stream_interval", "user", "priority", "request_id", "session_id"],
  ...["max_tokens", "min_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"],
  ...["stop_token_ids", "allowed_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"],
  ...["add_special_tokens", "return_token_ids", "cache_salt", "kv_transfer_params"],
]);

/**
 * Values of other fields that ask for nothing, as null, false and an empty list do. A session with anything else, which vLLM
 * may answer from more than the tokens, such as stop strings or log-probabilities, stays where it began.
 */
const UNUSED: Body = { n: 1, presence_penalty: 0, frequency_penalty: 0 };

/** The text of half a character, at the end of a text. */
const HALF = /\ufffd+$/;

/** Tokens that are looked at for the text of a character which lies on both sides of a move. */
const TAIL = 32;

interface Choice {
  text: string;
  finish_reason: string | null;
  token_ids?: number[];
  prompt_token_ids?: number[] | null;
}

interface Chunk {
  id: string;
  choices: Choice[];
  usage?: { prompt_tokens: number; completion_tokens: number; total_tokens: number } | null;
}

type Body = Record<string, any>;

class NoEngine extends Error {}

/** A request that is not valid, as an engine says. */
class BadRequest extends Error {}

function post(url: string, body: Body, signal: AbortSignal, path = "/v1/completions"): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return fetch(`${url}${path}`, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** The chunks of an engine's stream; the engine aborts the request when the loop over them ends. */
async function* chunks(url: string, body: Body): AsyncGenerator<Chunk> {
  const cut = new AbortController();
  const arm = () => setTimeout(() => cut.abort(), ANSWER_TIMEOUT);
  let late = arm();
  try {
    const answer = await post(url, body, cut.signal);
    if (answer.status === 400) throw new BadRequest(await answer.text());
    if (!answer.ok || !answer.body) throw new Error(`${url} answered ${answer.status}`);
    const text = new TextDecoder();
    let rest = "";
    for await (const part of answer.body) {
      // A slow client is none of the engine's faults.
      clearTimeout(late);
      const lines = (rest + text.decode(part, { stream: true })).split("\n");
      rest = lines.pop()!;
      for (const line of lines) {
        const data = line.replace(/^data:/, "").trim();
        if (data === "[DONE]") return;
        const chunk = data ? JSON.parse(data) : undefined;
        if (chunk?.error) throw new Error(`${url} has failed`);
        if (chunk) yield chunk as Chunk;
      }
      late = arm();
    }
    throw new Error(`${url} ended a stream before its end`);
  } finally {
    clearTimeout(late);
    cut.abort();
  }
}

/** The engine reference of an engine, which answers a request with it; null: it gives none, or does not answer. */
async function referenceOf(url: string, model: string): Promise<string | null> {
  const body = { model, prompt: [0], max_tokens: 1, kv_transfer_params: { [PREFIX_SOURCE]: null } };
  try {
    const answer: Body = await (await post(url, body, AbortSignal.timeout(REFERENCE_TIMEOUT))).json() as Body;
    return answer.kv_transfer_params?.[PREFIX_SOURCE] ?? null;
  } catch {
    return null;
  }
}

/** The text of tokens; half a character at their end is U+FFFD. */
async function textOf(url: string, model: string, tokens: number[]): Promise<string> {
  const answer = await post(url, { model, tokens }, AbortSignal.timeout(ANSWER_TIMEOUT), "/detokenize");
  if (!answer.ok) throw new Error(`${url} answered ${answer.status}`);
  return ((await answer.json()) as Body).prompt;
}

/** A request, and what was generated of it. */
class Session {
  readonly generated: number[] = [];
  readonly movable: boolean;
  finished = false;
  private id?: string;
  private prompt: number[] = [];
  /** Number of generated tokens in the prompt of the engine that is asked. */
  private movedAt = 0;
  private textChecked = false;

  constructor(readonly body: Body) {
    // Several prompts are several sequences of tokens.
    const several = Array.isArray(body.prompt) && typeof body.prompt[0] !== "number";
    const unused = (name: string, value: any) => [null, false, UNUSED[name]].includes(value) || value.length === 0;
    const others = Object.entries(body).every(([name, value]) => MOVES.has(name) || unused(name, value));
    // vLLM takes a number in quotes, too.
    const numbers = ["max_tokens", "min_tokens", "seed"].every((name) => typeof (body[name] ?? 0) === "number");
    this.movable = !several && others && numbers;
  }

  /** Whether the client has a part of the answer. */
  get started(): boolean {
    return this.id !== undefined;
  }

  /** What an engine is asked; `source` is the engine reference of the one that has generated. */
  asked(source: string | null): Body {
    // References come from this router alone.
    const asked: Body = { ...this.body, stream: true, return_token_ids: true, kv_transfer_params: { [PREFIX_SOURCE]: source } };
    const done = (this.movedAt = this.generated.length);
    this.textChecked = !done;
    if (done) {
      asked.prompt = [...this.prompt, ...this.generated];
      // vLLM's own default is 16; null is up to the model's length.
      if (this.body.max_tokens !== null) asked.max_tokens = (this.body.max_tokens ?? 16) - done;
      asked.min_tokens = Math.max(0, (this.body.min_tokens ?? 0) - done);
      // With the same seed, vLLM would draw the numbers again that it has drawn for the first tokens.
      if (typeof this.body.seed === "number") asked.seed = this.body.seed + done;
    }
    return asked;
  }

  /** Notes what a chunk of an engine adds, and makes it one of the whole session's; returns whether its engine goes on. */
  async take(url: string, chunk: Chunk): Promise<boolean> {
    const readsTokens = Boolean(this.body.return_token_ids);
    let goesOn = true;
    for (const choice of chunk.choices) {
      const [tokens, prompt] = [choice.token_ids!, choice.prompt_token_ids];
      if (choice.text && !this.textChecked) {
        choice.text = await this.text(url, choice);
        this.textChecked = true;
      }
      if (!this.started) this.prompt = prompt ?? [];
      // The client has them.
      if (prompt && this.movedAt) choice.prompt_token_ids = null;
      if (!readsTokens) {
        delete choice.prompt_token_ids;
        delete choice.token_ids;
      }
      this.generated.push(...tokens);
      if (choice.finish_reason === "abort") {
        // Not the end of the answer. The chunk may have tokens.
        choice.finish_reason = null;
        goesOn = false;
      }
      this.finished = choice.finish_reason !== null;
    }
    this.id = chunk.id = this.id ?? chunk.id;
    if (chunk.usage && this.movedAt) {
      const [before, done] = [this.prompt.length, this.generated.length];
      chunk.usage = { prompt_tokens: before, completion_tokens: done, total_tokens: before + done };
    }
    return goesOn;
  }

  /**
   * The text of the first choice with text after a move. If its prompt ends in the middle of a character, vLLM says the whole
   * prompt's text again, or loses the character.
   */
  private async text(url: string, choice: Choice): Promise<string> {
    const tokens = [...this.prompt, ...this.generated.slice(0, this.movedAt)].slice(-TAIL);
    const told = await textOf(url, this.body.model, tokens);
    if (!HALF.test(told)) return choice.text;
    // Of a token that ends the answer, there is no text.
    const added = choice.token_ids!.slice(0, choice.finish_reason === "stop" ? -1 : undefined);
    const now = await textOf(url, this.body.model, [...tokens, ...this.generated.slice(this.movedAt), ...added]);
    return now.slice(told.replace(HALF, "").length).replace(HALF, "");
  }
}

/** An engine: how many sessions are there, and how many move away from it now. */
class Engine {
  sessions = 0;
  moves = 0;
  emptied = false;

  constructor(readonly url: string) {}
}

const [port, urls] = process.argv.slice(2) as [string, string];
if (urls === undefined) {
  console.error("usage: node sessions.js PORT ENGINE_URL,ENGINE_URL[,…]");
  process.exit(2);
}
const engines = urls.split(",").map((url) => new Engine(url));
let waiting: (() => void)[] = [];

/** Those who empty an engine look at it again. */
function changed(): void {
  for (const wake of waiting.splice(0)) wake();
}

/** The engine with the fewest sessions of those that were not tried; one that is being emptied is better than none. */
function choose(session: Session, tried: Set<Engine>): Engine | undefined {
  const free = engines.filter((each) => !tried.has(each) && (session.started || !each.emptied));
  return free.sort((one, other) => Number(one.emptied) - Number(other.emptied) || one.sessions - other.sessions)[0];
}

/** Whether a session of an engine moves away now. */
function leaves(session: Session, engine: Engine): boolean {
  const elsewhere = engines.some((each) => !each.emptied);
  return engine.emptied && elsewhere && engine.moves < MOST_MOVES && session.movable && !session.finished;
}

/** The chunks of a request's answer. Throws `NoEngine` and `BadRequest`. */
async function* stream(body: Body): AsyncGenerator<Chunk> {
  const session = new Session(body);
  let source: string | null = null;
  let from: Engine | undefined;
  let tried = new Set<Engine>();
  let failure: unknown = "there is none";
  const endMove = () => {
    if (from) from.moves--;
    from = undefined;
    changed();
  };
  try {
    while (!session.finished) {
      const engine = choose(session, tried);
      if (!engine) throw new NoEngine(`no engine goes on: ${failure}`);
      const [had, stays] = [session.generated.length, engine.emptied];
      tried.add(engine);
      engine.sessions++;
      try {
        for await (const chunk of chunks(engine.url, session.asked(source))) {
          // Its first token says that it has read what it could.
          endMove();
          const goesOn = await session.take(engine.url, chunk);
          yield chunk;
          if (!goesOn) throw new Error(`${engine.url} has aborted a request`);
          if (!stays && leaves(session, engine)) {
            from = engine;
            engine.moves++;
            break;
          }
        }
      } catch (error) {
        failure = error;
        if (error instanceof BadRequest && !session.started) throw error;
        if (session.started && !session.movable) throw new NoEngine(`a session that does not move has ended: ${error}`);
      } finally {
        engine.sessions--;
        changed();
      }
      if (session.generated.length > had && !session.finished) {
        // If no other engine takes it, it goes back to one that still works.
        tried = new Set(from ? [] : [engine]);
        source = (await referenceOf(engine.url, body.model)) ?? source;
      }
    }
  } finally {
    endMove();
  }
}

/** Ends when an engine has no session, and none that moves away reads from it any more. */
async function untilEmpty(engine: Engine): Promise<void> {
  while (engine.sessions + engine.moves) await new Promise<void>((resolve) => waiting.push(resolve));
}

async function answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const parts: Buffer[] = [];
  for await (const part of request) parts.push(part as Buffer);
  const text = Buffer.concat(parts).toString();
  if (request.url === "/empty" || request.url === "/fill") {
    const engine = engines.find((each) => each.url === text);
    if (!engine) throw new Error(`${text} is none of this router's engines`);
    engine.emptied = request.url === "/empty";
    response.writeHead(200, { "content-type": "text/plain" }).flushHeaders();
    if (engine.emptied) await untilEmpty(engine).then(() => response.write("empty\n"));
    response.end();
    return;
  }
  const gone = new Promise((resolve) => response.once("close", resolve));
  const say = async (data: string) => {
    if (!response.headersSent) response.writeHead(200, { "content-type": "text/event-stream" });
    if (!response.write(`data: ${data}\n\n`)) await Promise.race([once(response, "drain"), gone]);
  };
  try {
    for await (const chunk of stream(JSON.parse(text))) {
      // The client has gone: with the loop, its request ends.
      if (response.destroyed) return;
      await say(JSON.stringify(chunk));
    }
  } catch (error) {
    if (!(error instanceof NoEngine) || !response.headersSent) throw error;
    await say(JSON.stringify({ error: { message: error.message, type: "ServiceUnavailable", code: 502 } }));
  }
  await say("[DONE]");
  response.end();
}

createServer((request, response) => {
  answer(request, response).catch((error: unknown) => {
    if (response.headersSent) response.destroy();
    else response.writeHead(error instanceof NoEngine ? 502 : 400, { "content-type": "text/plain" }).end(`${error}`);
  });
}).listen(Number(port), "127.0.0.1", () => console.log("listening"));
