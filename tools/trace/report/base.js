// Data and helpers. Times are ns; a task is its index in order of submission.
const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const NONE = -1;

// ---- payloads of .mxt tables (engine/trace_format.h) ----

function bytesOf(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

// {column id: numbers}. 64-bit values become doubles, which are exact up to 2^53.
function decode(b) {
  const out = {};
  let at = 0;
  const varint = () => {
    let x = b[at++], v = x & 127, scale = 128;
    while (x > 127) { x = b[at++]; v += (x & 127) * scale; scale *= 128; }
    return v;
  };
  const signed = () => {
    if (b[at] < 128) { const x = b[at++]; return x >> 1 ^ -(x & 1); } // most of them
    const v = varint();
    return v % 2 ? -(v + 1) / 2 : v / 2;
  };
  while (at < b.length) {
    const id = varint(), encoding = b[at++], n = varint(), end = varint() + at, v = new Float64Array(n);
    if (encoding === 1) v.fill(signed());
    else if (encoding === 4) for (let i = 0; i < n; i++) v[i] = b[at++];
    else if (encoding === 3) for (let i = 0, sum = 0; i < n; i++) v[i] = sum += signed();
    else for (let i = 0; i < n; i++) v[i] = signed();
    at = end;
    out[id] = v;
  }
  return out;
}

// Columns of columns.c, by number.
const COLUMN = { index: 1, gap: 2, duration: 3, waited: 4, cpu: 5, kind: 6, phase: 7, layer: 8, group: 9, slice: 10, part: 11, micro: 12,
  step: 13, rows: 14, flops: 15, bytes: 16, id: 17, preds: 18 };
const STORED = { duration: Float64Array, waited: Float64Array, cpu: Float64Array, kind: Uint16Array, phase: Uint8Array, layer: Int32Array,
  group: Int32Array, slice: Int16Array, part: Int16Array, micro: Int32Array, step: Int32Array, rows: Float64Array, flops: Float64Array,
  bytes: Float64Array, id: Float64Array, preds: Uint32Array };

const N = data.tasks;
const task = { start: new Float64Array(N), worker: new Uint16Array(N) };
for (const c in STORED) task[c] = new STORED[c](N);
const order = new Uint32Array(N); // tasks by worker and start
const place = new Uint32Array(N); // of a task in it
const firstOf = [0]; // of a worker in it
for (const w of data.workers) firstOf.push(firstOf[firstOf.length - 1] + w.tasks);

function readTasks() {
  let row = 0, worker = 0, index = 0, stop = data.first;
  for (const e of document.querySelectorAll('script.tasks')) {
    const t = decode(bytesOf(e.textContent)), n = +e.dataset.rows, indices = new Uint32Array(n);
    for (let i = 0; i < n; i++, row++) {
      while (row >= firstOf[worker + 1]) { worker++; stop = data.first; }
      index += t[1][i];
      order[row] = index;
      place[index] = row;
      task.worker[index] = worker;
      task.start[index] = stop + t[2][i];
      stop = task.start[index] + t[3][i];
      indices[i] = index;
    }
    for (const c in STORED) {
      const v = t[COLUMN[c]], to = task[c];
      for (let i = 0; i < n; i++) to[indices[i]] = v[i];
    }
    for (let i = 0; i < n; i++) task.id[indices[i]] += indices[i];
    e.remove();
  }
}

// Dependencies that no other implies: predecessors and successors of a task are slices of these lists.
let pred, succ;
const predFirst = new Uint32Array(N + 1), succFirst = new Uint32Array(N + 1);
function readDeps() {
  const lists = [];
  let at = 0, total = 0;
  for (const e of document.querySelectorAll('script.deps')) {
    const t = decode(bytesOf(e.textContent)), counts = t[1];
    for (let i = 0; i < counts.length; i++) predFirst[++at] = total += counts[i];
    lists.push(t[2] || new Float64Array(0));
    e.remove();
  }
  pred = new Uint32Array(total);
  succ = new Uint32Array(total);
  let from = 0, part = 0, in_part = 0;
  for (let i = 0; i < N; i++)
    for (; from < predFirst[i + 1]; from++) {
      while (in_part >= lists[part].length) { part++; in_part = 0; }
      pred[from] = i - lists[part][in_part++];
      succFirst[pred[from] + 1]++;
    }
  for (let i = 0; i < N; i++) succFirst[i + 1] += succFirst[i];
  const next = succFirst.slice();
  for (let i = 0; i < N; i++) for (let e = predFirst[i]; e < predFirst[i + 1]; e++) succ[next[pred[e]]++] = i;
}
const predsOf = i => Array.from(pred.subarray(predFirst[i], predFirst[i + 1]));
const succsOf = i => Array.from(succ.subarray(succFirst[i], succFirst[i + 1]));
const stopOf = i => task.start[i] + task.duration[i];

// ---- texts ----

const escapes = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
const text = s => String(s).replace(/[&<>"]/g, c => escapes[c]);
function digits(v, n = 3) {
  if (v === 0) return '0';
  const d = Math.max(0, n - 1 - Math.floor(Math.log10(Math.abs(v))));
  return v.toFixed(Math.min(d, 6));
}
function scaled(v, units, n) {
  if (v === null || v === undefined || Number.isNaN(v)) return 'n/a';
  let i = 0;
  while (i < units.length - 1 && Math.abs(v) >= units[i + 1][0]) i++;
  return digits(v / units[i][0], n) + '\u202f' + units[i][1];
}
const TIME = [[1, 'ns'], [1e3, '\u00b5s'], [1e6, 'ms'], [1e9, 's']];
const BYTES = [[1, 'B'], [1024, 'KiB'], [1048576, 'MiB'], [1073741824, 'GiB'], [1099511627776, 'TiB']];
const time = (ns, n) => scaled(ns, TIME, n);
const bytes = (v, n) => scaled(v, BYTES, n);
const count = v => v === null ? 'n/a' : Math.round(v).toLocaleString('en-US').replace(/,/g, '\u202f');
const share = (v, of, n = 2) => v === null || !of ? 'n/a' : digits(100 * v / of, Math.abs(v / of) < .01 && v ? 1 : n).replace(/^(-?100)\.\d+$/, '$1') + '\u202f%';
const ratio = v => v === null ? 'n/a' : v.toFixed(2);
const kindName = k => data.kinds[k];
const layerName = l => l < 0 || l >= data.layers ? 'no layer' : 'layer ' + l;

// A task in a few words.
function name(i) {
  let s = kindName(task.kind[i]);
  if (task.layer[i] >= 0) s += ' L' + task.layer[i];
  if (task.group[i] >= 0) s += ' g' + task.group[i];
  if (task.slice[i] > 0) s += '.' + task.slice[i];
  return s;
}

// ---- colours ----

const COLOURS = 12;
let css;
const colour = n => css.getPropertyValue(n).trim();
function theme(which) {
  if (which === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = which;
  css = getComputedStyle(document.documentElement);
}
// The kinds that take most time have colours of their own, whatever is shown.
const kindColour = new Array(data.kinds.length).fill('--rest');
{
  const all = data.views.find(v => v.first_step === 0 || v.first_step !== v.last_step) || data.views[0];
  [...all.kinds].sort((a, b) => b.time - a.time).slice(0, COLOURS).forEach((k, i) => { kindColour[k.kind] = '--c' + i; });
}
const causeColour = i => 'var(--i' + i + ')';
const legend = items => items.map(([c, s]) => `<span><i style="background:${c}"></i>${text(s)}</span>`).join('');

function mix(a, b, f) {
  const p = h => [1, 3, 5].map(i => parseInt(h.substr(i, 2), 16));
  const x = p(a), y = p(b);
  return 'rgb(' + x.map((v, i) => Math.round(v + (y[i] - v) * f)).join(',') + ')';
}
