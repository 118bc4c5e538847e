// Looks at a node server, and declines: what kvferry.ts can do, from the command line. Prints JSON, one value a line; ids
// are hexadecimal.
//
// usage: node look.js NODE_SERVER PROTO_ROOT info | engines | requests | transfers | decline REFERENCE | follow REQUEST_ID

import { KvferryError, NodeServer } from "./kvferry.js";

const [address, protoRoot, what, argument = ""] = process.argv.slice(2) as [string, string, string, string?];
if (what === undefined) {
  console.error("usage: node look.js NODE_SERVER PROTO_ROOT info | engines | requests | transfers | decline REFERENCE | follow REQUEST_ID");
  process.exit(2);
}

function print(value: unknown): void {
  // Buffers arrive here as what their toJSON makes.
  const hex = (_: string, one: any) => (one?.type === "Buffer" ? Buffer.from(one.data).toString("hex") : one);
  console.log(JSON.stringify(value, hex));
}

async function printAll(values: AsyncIterable<unknown>): Promise<void> {
  for await (const value of values) print(value);
}

const server = new NodeServer(address, protoRoot);
const commands: Record<string, () => Promise<void>> = {
  info: async () => print(await server.info()),
  engines: () => printAll(server.engines()),
  requests: () => printAll(server.requests()),
  transfers: () => printAll(server.transfers()),
  decline: () => server.decline(argument),
  follow: () => printAll(server.follow(argument)),
};

try {
  const command = Object.hasOwn(commands, what) ? commands[what] : undefined;
  if (!command) throw new Error(`no such command: ${what}`);
  await command();
} catch (error) {
  console.error(error instanceof KvferryError ? `${error.message} [${error.reason}]` : `${error}`);
  process.exitCode = 1;
} finally {
  server.close();
}
