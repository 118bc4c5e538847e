// A client of one kvferry node server, made from the .proto files alone: what the server is, what it holds, a decline,
// following one request, and references as a router makes them.
//
// Every call has a deadline, and is repeated where the contract says that this helps: when the server is unavailable, or
// says after which pause to ask again. Any other error is final, and thrown as a KvferryError.

import { randomBytes, randomUUID } from "node:crypto";
import { join } from "node:path";

import * as grpc from "@grpc/grpc-js";
import * as protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const CALL_TIMEOUT_MS = 5_000;
const PAUSE_MS = 100;
// The contract that this client was made for; see the protos.
const VERSION = { contract_revision: 2, release: "examples/router" };
const PAGE_SIZE = 1_000;

// Fields as in the protos: 64-bit integers are strings, enums their names, bytes Buffers.
const LOADING = { keepCase: true, longs: String, enums: String, defaults: true };

export interface EngineRef {
  engine_id: string;
  incarnation: Buffer;
}

export interface ServerInfo {
  home_epoch: Buffer;
  version: string;
  advertise: string;
  draining: boolean;
  limits: Record<string, string>;
  capabilities: string[];
}

export interface EngineSummary {
  engine: EngineRef;
  state: string;
  num_ranks: number;
  publications: string;
  leases: string;
}

export interface RequestSummary {
  engine: EngineRef;
  publication: string;
  request_id: string;
  state: string;
  leases: string;
  reads_valid: number;
  expected_reads: number;
}

export interface TransferSummary {
  source: EngineRef;
  publication: string;
  request_id: string;
  read: { reader: EngineRef; lease_number: string; state: string; parties: number; reported: number; bytes: string };
  /** Under which a router's reference was published; without a publication, the read waits for it. */
  router_key: string;
}

/** Makes references, for routers that ask source and destination at once. */
export class References {
  private readonly message: protobuf.Type;

  /** `protoRoot` is the folder that has kvferry/v1. */
  constructor(protoRoot: string) {
    const root = new protobuf.Root();
    root.resolvePath = (_, target) => (protobuf.common.get(target) ? target : join(protoRoot, target));
    this.message = root.loadSync("kvferry/v1/kv_transfer.proto", { keepCase: true }).lookupType("kvferry.v1.Reference");
  }

  /**
   * A new reference, a secret: one for each request, and for each attempt of one. `home` is the address of the source's home,
   * empty where readers have a directory; `engineId` the source, or a deployment whose engines are named
   * `${engineId}_dp${dataParallelRank}`.
   */
  make(home: string, engineId: string, dataParallelRank = 0): string {
    const fields = {
      home,
      engine_id: engineId,
      key: randomBytes(16),
      router_key: randomUUID(),
      data_parallel_rank: dataParallelRank,
    };
    return `kvf1.${Buffer.from(this.message.encode(fields).finish()).toString("base64url")}`;
  }
}

export interface Filter {
  engine_id?: string;
  request_id?: string;
  reader_engine_id?: string;
}

interface NotificationError {
  code: number;
  reason: string;
  message: string;
  metadata: Record<string, string>;
  retry_after?: { seconds: string; nanos: number } | null;
}

/** An error of kvferry: docs/errors.md says what each reason means and what to do. */
export class KvferryError extends Error {
  constructor(
    readonly reason: string,
    message: string,
    readonly metadata: Record<string, string>,
    /** After which the same call may go well; undefined: repeating it will not help. */
    readonly retryAfterMs: number | undefined,
  ) {
    super(message);
  }
}

// google.rpc.Status and what kvferry puts into its details; gRPC sends it in the trailing metadata.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`).root;

function milliseconds(duration: { seconds?: unknown; nanos?: number } | null | undefined): number {
  return Number(duration?.seconds ?? 0) * 1e3 + (duration?.nanos ?? 0) / 1e6;
}

/** The error of a call, with its reason, or gRPC's own code where it has none. */
function typed(error: grpc.ServiceError): KvferryError {
  let reason = grpc.status[error.code] ?? "UNKNOWN";
  let metadata: Record<string, string> = {};
  let retry = error.code === grpc.status.UNAVAILABLE ? PAUSE_MS : undefined;
  for (const raw of error.metadata?.get("grpc-status-details-bin") ?? []) {
    const status: any = details.lookupType("Status").decode(raw as Buffer);
    for (const detail of status.details) {
      if (detail.type_url.endsWith("/google.rpc.ErrorInfo")) {
        const info: any = details.lookupType("ErrorInfo").decode(detail.value);
        [reason, metadata] = [info.reason, { ...info.metadata }];
      } else if (detail.type_url.endsWith("/google.rpc.RetryInfo")) {
        const info: any = details.lookupType("RetryInfo").decode(detail.value);
        retry = milliseconds(info.retry_delay);
      }
    }
  }
  return new KvferryError(reason, error.details || error.message, metadata, retry);
}

/** The error of one notification in a batch. */
function typedResult(error: NotificationError): KvferryError {
  const unavailable = error.code === grpc.status.UNAVAILABLE ? PAUSE_MS : undefined;
  const retry = error.retry_after ? milliseconds(error.retry_after) : unavailable;
  return new KvferryError(error.reason, error.message, error.metadata, retry);
}

const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

export class NodeServer {
  private readonly transfer: any;
  private readonly introspection: any;

  /** `protoRoot` is the folder that has kvferry/v1; `credentials` are grpc.credentials.createSsl(…) for TLS. */
  constructor(address: string, protoRoot: string, credentials = grpc.credentials.createInsecure()) {
    const files = ["kvferry/v1/kv_transfer.proto", "kvferry/v1/introspection.proto"];
    const definition = protoLoader.loadSync(files, { includeDirs: [protoRoot], ...LOADING });
    const { v1 } = (grpc.loadPackageDefinition(definition) as any).kvferry;
    this.transfer = new v1.KVTransfer(address, credentials);
    this.introspection = new v1.Introspection(address, credentials);
  }

  close(): void {
    this.transfer.close();
    this.introspection.close();
  }

  info(): Promise<ServerInfo> {
    return this.repeated((until) => this.call(this.introspection, "GetServerInfo", {}, until));
  }

  engines(): AsyncGenerator<EngineSummary> {
    return this.listed("ListEngines", "engines", {});
  }

  /** The published requests, those of a filter alone if there is one. */
  requests(filter: Filter = {}): AsyncGenerator<RequestSummary> {
    return this.listed("ListRequests", "requests", filter);
  }

  /** The reads of published requests, and their leases. */
  transfers(filter: Filter = {}): AsyncGenerator<TransferSummary> {
    return this.listed("ListTransfers", "transfers", filter);
  }

  /** Nobody will read it: its source gets the blocks back. Any node server takes the reference, and finds its home. */
  async decline(reference: string): Promise<void> {
    await this.repeated(async (until) => {
      const answer = await this.call<{ results: { error?: NotificationError | null }[] }>(
        this.transfer,
        "Notify",
        { notifications: [{ decline: { reference } }], version: VERSION },
        until,
      );
      // The call may go well, and the decline be refused.
      const error = answer.results[0]?.error;
      if (error) throw typedResult(error);
    });
  }

  /** A request's publications at its engine's home whenever they have changed, until none is left: all were released. */
  async *follow(requestId: string, intervalMs = 200): AsyncGenerator<RequestSummary[]> {
    let before = "";
    while (true) {
      const found: RequestSummary[] = [];
      for await (const one of this.requests({ request_id: requestId })) found.push(one);
      const now = JSON.stringify(found.map(({ publication, state, leases, reads_valid }) => [publication, state, leases, reads_valid]));
      if (now !== before) yield found;
      if (found.length === 0) return;
      before = now;
      await pause(intervalMs);
    }
  }

  private async *listed<Summary>(method: string, field: string, filter: Filter): AsyncGenerator<Summary> {
    let token = "";
    do {
      const request = { ...filter, page_size: PAGE_SIZE, page_token: token };
      const page = await this.repeated((until) => this.call<any>(this.introspection, method, request, until));
      yield* page[field] as Summary[];
      token = page.next_page_token;
    } while (token);
  }

  private call<Answer>(client: any, method: string, request: object, until: number): Promise<Answer> {
    return new Promise((resolve, reject) =>
      client[method](request, { deadline: until }, (error: grpc.ServiceError | null, answer?: Answer) =>
        error ? reject(typed(error)) : resolve(answer!),
      ),
    );
  }

  private async repeated<Answer>(attempt: (until: number) => Promise<Answer>): Promise<Answer> {
    const until = Date.now() + CALL_TIMEOUT_MS;
    while (true) {
      try {
        return await attempt(until);
      } catch (error) {
        const wait = error instanceof KvferryError ? error.retryAfterMs : undefined;
        if (wait === undefined || Date.now() + wait >= until) throw error;
        await pause(wait);
      }
    }
  }
}
