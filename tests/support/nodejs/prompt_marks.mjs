// Prompt marks in JavaScript, from the comment of PromptMark alone: reads a JSON array of prompts from stdin, and prints the
// digests of their marks as a JSON array of hexadecimal strings.
//
// usage: node prompt_marks.mjs < [{"key", "tokens", "end", "adapter", "inputs": [{"offset", "length", "identifier"}]}, ...]

import { createHash, createHmac } from "node:crypto";
import { readFileSync } from "node:fs";

const uint32 = (value) => {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
};

const uint64 = (value) => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
};

const sized = (text) => [uint32(Buffer.byteLength(text)), Buffer.from(text)];

// UTF-8 sorts by bytes, JavaScript's strings by UTF-16.
const before = (a, b) =>
  a.offset - b.offset || a.length - b.length || Buffer.compare(Buffer.from(a.identifier), Buffer.from(b.identifier));

function mark({ key, tokens, end, adapter, inputs }) {
  const prompt = createHash("sha256");
  for (const bytes of [Buffer.from("kvferry prompt 1\0"), ...sized(adapter)]) prompt.update(bytes);
  for (const token of tokens.slice(0, end)) prompt.update(uint32(token));
  for (const { offset, length, identifier } of inputs.filter((each) => each.offset < end).sort(before)) {
    for (const bytes of [Buffer.of(1), uint64(offset), uint64(length), ...sized(identifier)]) prompt.update(bytes);
  }
  const hmac = createHmac("sha256", Buffer.from(key, "hex"));
  hmac.update("kvferry mark 1").update(uint64(end)).update(prompt.digest());
  return hmac.digest("hex").slice(0, 32);
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(mark)));
