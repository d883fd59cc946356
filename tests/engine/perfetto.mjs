// Prints what Perfetto's own trace processor answers: node perfetto.mjs PROCESSOR TRACE SQL...
//
// PROCESSOR is a directory with its WebAssembly and what calls that. Of each query a line comes
// back, a JSON list of rows. The bundle is made for a worker of a browser, so it gets what it
// would find there.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as wait } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

const [directory, trace, ...queries] = process.argv.slice(2);
const path = (name) => join(directory, name);

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = new URL("http://localhost/");
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = readFileSync(path("trace_processor.wasm"));
  }
};
console.warn = () => {}; // of response fields that the decoder does not know

const bundle = readFileSync(path("engine_bundle.node.js"), "utf8")
  .replace("useMemory64 = hasMemory64Support()", "useMemory64 = false")
  .replace("const wasmBridge =", "const wasmBridge = globalThis.bridge =");
runInThisContext(bundle);
while (!globalThis.bridge.reqBufferAddr) await wait(10); // until it is compiled

const { EngineBase } = await import(pathToFileURL(path("engine.mjs")).href);
const channel = new MessageChannel();
globalThis.bridge.initialize(channel.port1);

class Engine extends EngineBase {
  mode = "WASM";
  id = "test";
  rpcSendRequestBytes(bytes) {
    channel.port2.postMessage(bytes);
  }
}

const engine = new Engine();
channel.port2.onmessage = (message) => engine.onRpcResponseBytes(message.data);
await engine.parse(new Uint8Array(readFileSync(trace)));
await engine.notifyEof();
for (const query of queries) {
  const result = await engine.query(query);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((column) => row.get(column)));
  const plain = (_, value) => (typeof value === "bigint" ? Number(value) : value);
  console.log(JSON.stringify(rows, plain));
}
process.exit(0);
