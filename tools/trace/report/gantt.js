// The time line: one canvas with strips (ready tasks, idle time by cause) above a row per worker.
const LEFT = 64, AXIS = 20, STRIP = 54, GAP = 14;
const gantt = {
  canvas: document.querySelector('#gantt canvas'), from: 0, to: 1, picked: NONE, hover: NONE, colour: 'kind', levels: [], onPath: null, queued: false,
};

// ---- levels of detail ----

/*
 * Of each worker, bins of a power of two of the trace's length: how busy (0..255) and which task has most of
 * the bin. The finest level has about a bin for a task; a coarser one is made of two bins each.
 */
function makeLevels() {
  const span = Math.max(1, data.last - data.first);
  for (let w = 0; w < data.workers.length; w++) {
    const n = data.workers[w].tasks;
    let bits = 6;
    while (1 << bits < n && bits < 24) bits++;
    let bins = 1 << bits, busy = new Float32Array(bins), most = new Float32Array(bins), who = new Uint32Array(bins).fill(N);
    const width = span / bins;
    for (let p = firstOf[w]; p < firstOf[w + 1]; p++) {
      const i = order[p], a = (task.start[i] - data.first) / width, b = (stopOf(i) - data.first) / width;
      for (let k = Math.max(0, Math.floor(a)); k < Math.min(bins, b); k++) {
        const part = Math.min(b, k + 1) - Math.max(a, k);
        busy[k] += part;
        if (part > most[k]) { most[k] = part; who[k] = i; }
      }
    }
    const levels = [];
    for (;;) {
      levels.push({ bins, who, busy: Uint8Array.from(busy, v => Math.min(255, Math.ceil(255 * v))) });
      if (bins <= 64) break;
      bins /= 2;
      const b = new Float32Array(bins), m = new Float32Array(bins), o = new Uint32Array(bins);
      for (let k = 0; k < bins; k++) {
        b[k] = (busy[2 * k] + busy[2 * k + 1]) / 2;
        const left = most[2 * k] >= most[2 * k + 1];
        m[k] = (left ? most[2 * k] : most[2 * k + 1]) / 2;
        o[k] = left ? who[2 * k] : who[2 * k + 1];
        if (who[2 * k] === who[2 * k + 1]) m[k] = (most[2 * k] + most[2 * k + 1]) / 2;
      }
      busy = b; most = m; who = o;
    }
    gantt.levels.push(levels);
  }
}

// First place in `order` of worker w whose task ends after t (tasks of a worker do not overlap).
function firstAfter(w, t) {
  let low = firstOf[w], high = firstOf[w + 1];
  while (low < high) { const m = (low + high) >> 1; if (stopOf(order[m]) <= t) low = m + 1; else high = m; }
  return low;
}

// ---- colours ----

const shades = new Map(); // pixels of a colour, by busy share: 0..8
function shade(c, busy) {
  let of = shades.get(c);
  if (!of) {
    of = Uint32Array.from({ length: 9 }, (_, i) => {
      const [r, g, b] = mix(colour('--card'), c, i / 8).match(/\d+/g);
      return (0xff << 24 | b << 16 | g << 8 | r) >>> 0;
    });
    shades.set(c, of);
  }
  return of[busy];
}
let palette = [], restColour;
function makePalette() {
  shades.clear();
  restColour = colour('--rest');
  if (gantt.colour === 'kind') palette = kindColour.map(colour);
  else if (gantt.colour === 'phase') palette = ['--rest', '--c0', '--c1', '--c4'].map(colour);
  else palette = Array.from({ length: 12 }, (_, i) => colour('--c' + i));
}
const HEX = f => '#' + f.match(/\d+/g).map(v => (+v).toString(16).padStart(2, '0')).join('');
let cpuPalette = [];
function colourOf(i) {
  switch (gantt.colour) {
    case 'kind': return palette[task.kind[i]];
    case 'phase': return palette[task.phase[i]];
    case 'layer': return task.layer[i] < 0 ? restColour : palette[task.layer[i] % 12];
    default: return task.cpu[i] < 0 ? restColour : cpuPalette[Math.min(10, Math.round(10 * task.cpu[i] / Math.max(1, task.duration[i])))];
  }
}
function legendOfColours() {
  if (gantt.colour === 'kind') {
    const named = kindColour.map((c, k) => [c, k]).filter(x => x[0] !== '--rest').sort((a, b) => +a[0].slice(3) - b[0].slice(3));
    return legend([...named.map(([c, k]) => [`var(${c})`, kindName(k)]), ['var(--rest)', 'other kinds'], ['var(--path)', 'realised critical path']]);
  }
  if (gantt.colour === 'phase') return legend(data.phases.map((p, i) => [palette[i], p]));
  if (gantt.colour === 'layer') return legend([...palette.slice(0, Math.min(12, data.layers)).map((c, i) => [c, 'layer ' + i + (data.layers > 12 ? ', ' + (i + 12) + ' …' : '')]), ['var(--rest)', 'no layer']]);
  return legend([[cpuPalette[0], 'the core was taken away'], [cpuPalette[5], 'half of it'], [cpuPalette[10], 'had its core all the time'], ['var(--rest)', 'not known']]);
}

// ---- drawing ----

const xOf = t => LEFT + (t - gantt.from) / (gantt.to - gantt.from) * (gantt.width - LEFT - 8);
const timeOf = x => gantt.from + (x - LEFT) / (gantt.width - LEFT - 8) * (gantt.to - gantt.from);
const top = () => AXIS + 2 * (STRIP + GAP) + 8;

function layout() {
  const c = gantt.canvas, workers = data.workers.length;
  gantt.width = Math.max(280, c.parentElement.clientWidth);
  gantt.row = Math.max(3, Math.min(30, Math.floor(520 / workers)));
  gantt.height = top() + workers * gantt.row + 4;
  const scale = window.devicePixelRatio || 1;
  c.width = gantt.width * scale;
  c.height = gantt.height * scale;
  c.style.height = gantt.height + 'px';
  gantt.g = c.getContext('2d');
  gantt.g.setTransform(scale, 0, 0, scale, 0, 0);
}

// Times on the axis: one unit, as many digits as the distance between them needs.
function axisText(t, step) {
  const u = [...TIME].reverse().find(x => step * 5 >= x[0]) || TIME[0];
  return (t / u[0]).toFixed(Math.max(0, Math.ceil(-Math.log10(step / u[0]) - 1e-9))) + '\u202f' + u[1];
}

// Steps of 1, 2 or 5 times a power of ten, about n of them.
function ticks(a, b, n) {
  const raw = (b - a) / n, p = 10 ** Math.floor(Math.log10(raw)), step = p * (raw / p > 5 ? 10 : raw / p > 2 ? 5 : raw / p > 1 ? 2 : 1), out = [];
  for (let k = Math.ceil(a / step); k * step <= b; k++) out.push(k * step);
  return out;
}

function drawAxis(g) {
  const zero = view.begin;
  g.font = '11px system-ui, sans-serif';
  g.textBaseline = 'middle';
  g.textAlign = 'center';
  const at = ticks(gantt.from - zero, gantt.to - zero, Math.max(3, gantt.width / 130));
  for (const t of at) {
    const x = Math.round(xOf(t + zero)) + .5;
    g.strokeStyle = colour('--grid');
    g.beginPath(); g.moveTo(x, AXIS); g.lineTo(x, gantt.height); g.stroke();
    g.fillStyle = colour('--soft');
    if (x > LEFT + 10 && x < gantt.width - 24) g.fillText(t === 0 ? '0' : axisText(t, at.length > 1 ? at[1] - at[0] : t), x, 8);
  }
}

function drawStrip(g, y, title, highest, unit, draw) {
  g.fillStyle = colour('--soft');
  g.textAlign = 'right';
  g.fillText(highest, LEFT - 6, y + 5);
  g.fillText('0', LEFT - 6, y + STRIP - 4);
  g.textAlign = 'left';
  g.strokeStyle = colour('--line');
  g.beginPath(); g.moveTo(LEFT, y + STRIP + .5); g.lineTo(gantt.width - 8, y + STRIP + .5); g.stroke();
  draw();
  g.fillStyle = colour('--text');
  g.fillText(title, LEFT, y - 6);
  g.fillStyle = colour('--soft');
  g.fillText(unit, LEFT + g.measureText(title).width + 8, y - 6);
}

// Bins of the view that are in sight: calls back with x, width, bin.
function bins(f) {
  const s = view.strip, width = (view.end - view.begin) / s.bins;
  for (let i = 0; i < s.bins; i++) {
    const a = Math.max(LEFT, xOf(view.begin + i * width)), b = Math.min(gantt.width - 8, xOf(view.begin + (i + 1) * width));
    if (b > a) f(a, b - a + .4, i);
  }
}

function drawStrips(g) {
  const s = view.strip, highest = Math.max(1, ...s.ready_highest), width = (view.end - view.begin) / s.bins;
  let y = AXIS + GAP;
  drawStrip(g, y, 'Ready tasks', highest, 'tasks waiting for a worker: mean, highest (pale)', () => {
    g.fillStyle = mix(colour('--card'), colour('--c0'), .3);
    bins((x, w, i) => { const h = STRIP * s.ready_highest[i] / highest; g.fillRect(x, y + STRIP - h, w, h); });
    g.fillStyle = colour('--c0');
    bins((x, w, i) => { const h = STRIP * s.ready[i] / highest; g.fillRect(x, y + STRIP - h, w, h); });
  });
  y += STRIP + GAP;
  const most = data.workers.length * width;
  drawStrip(g, y, 'Idle workers by cause', data.workers.length, 'workers', () => {
    bins((x, w, i) => {
      let at = y + STRIP;
      for (let c = 0; c < s.idle.length; c++) {
        const h = STRIP * s.idle[c][i] / most;
        if (h < .05) continue;
        g.fillStyle = colour('--i' + c);
        g.fillRect(x, at -= h, w, h);
      }
    });
  });
  let x = LEFT + 190;
  g.textAlign = 'left';
  data.causes.forEach((c, i) => {
    if (gantt.width < 700) return; // it is below then
    g.fillStyle = colour('--i' + i);
    g.fillRect(x, y - 10, 8, 8);
    g.fillStyle = colour('--soft');
    g.fillText(c, x + 11, y - 6);
    x += g.measureText(c).width + 24;
  });
}

function drawTasks(g, w, y, h) {
  const first = firstAfter(w, gantt.from), right = Math.round(gantt.width - 8);
  let last = firstAfter(w, gantt.to);
  if (last < firstOf[w + 1] && task.start[order[last]] < gantt.to) last++;
  const pixels = right - LEFT;
  if (last - first <= pixels) {
    for (let p = first; p < last; p++) {
      const i = order[p], a = Math.max(LEFT, xOf(task.start[i])), b = Math.min(right, xOf(stopOf(i)));
      if (b < LEFT || a > right) continue;
      g.fillStyle = colourOf(i);
      g.fillRect(a, y, Math.max(.6, b - a - (b - a > 3 ? .6 : 0)), h);
      if (b - a > 46 && h > 11) label(g, i, a, b, y, h);
    }
    return;
  }
  drawLevel(g, w, y, h, pixels);
}

/*
 * A row of pixels, each from the coarsest level whose bins are no wider than it (or the finest): the colour of
 * the task that has most of the bin, paler the less busy it is.
 */
function drawLevel(g, w, y, h, pixels) {
  if (!gantt.line || gantt.line.width !== pixels) {
    gantt.scratch = Object.assign(document.createElement('canvas'), { width: pixels, height: 1 });
    gantt.line = gantt.scratch.getContext('2d').createImageData(pixels, 1);
    gantt.cells = new Uint32Array(gantt.line.data.buffer);
  }
  const span = Math.max(1, data.last - data.first), levels = gantt.levels[w], perPixel = (gantt.to - gantt.from) / pixels;
  let level = levels[0];
  for (const l of levels) if (span / l.bins <= perPixel) level = l;
  const { who, busy, bins } = level, first = (gantt.from - data.first) / span * bins, step = perPixel / span * bins;
  for (let x = 0; x < pixels; x++) {
    const k = Math.floor(first + x * step), i = k >= 0 && k < bins ? who[k] : N;
    gantt.cells[x] = i === N ? 0 : shade(colourOf(i), Math.min(8, (busy[k] >> 5) + 1));
  }
  gantt.scratch.getContext('2d').putImageData(gantt.line, 0, 0);
  g.imageSmoothingEnabled = false;
  g.drawImage(gantt.scratch, 0, 0, pixels, 1, LEFT, y, pixels, h);
}

function label(g, i, a, b, y, h) {
  const s = name(i);
  if (g.measureText(s).width > b - a - 6) return;
  g.fillStyle = '#000b';
  g.textAlign = 'left';
  g.fillText(s, a + 3, y + h / 2 + .5);
}

const rowOf = i => top() + task.worker[i] * gantt.row;
const inSight = i => stopOf(i) > gantt.from && task.start[i] < gantt.to;

// The path: an underline below its tasks, and lines where it changes the worker.
function drawPath(g) {
  const path = view.realised.task, h = gantt.row;
  g.strokeStyle = g.fillStyle = colour('--path');
  g.lineWidth = 1;
  let before = -1e9;
  g.beginPath();
  for (let k = 0; k < path.length; k++) {
    const i = path[k];
    if (!inSight(i)) continue;
    const a = Math.max(LEFT, xOf(task.start[i])), b = Math.min(gantt.width - 8, xOf(stopOf(i)));
    g.fillRect(a, rowOf(i) + h - Math.min(4, h / 3), Math.max(1, b - a), Math.min(3, h / 3));
    if (k && task.worker[path[k - 1]] !== task.worker[i] && a - before > 6 && a > LEFT) {
      const x = Math.max(LEFT, xOf(stopOf(path[k - 1])));
      g.moveTo(x, rowOf(path[k - 1]) + h / 2);
      g.lineTo(a, rowOf(i) + h / 2);
      before = a;
    }
  }
  g.stroke();
}

function arrow(g, from, to, c) {
  const a = xOf(stopOf(from)), b = xOf(task.start[to]), y = rowOf(from) + gantt.row / 2, z = rowOf(to) + gantt.row / 2;
  const bend = Math.max(12, Math.min(60, Math.abs(b - a) / 2));
  g.strokeStyle = g.fillStyle = c;
  g.beginPath(); g.moveTo(a, y); g.bezierCurveTo(a + bend, y, b - bend, z, b, z); g.stroke();
  g.beginPath(); g.moveTo(b, z); g.lineTo(b - 6, z - 3); g.lineTo(b - 6, z + 3); g.fill();
}

function drawPicked(g) {
  const i = gantt.picked;
  if (i === NONE) return;
  g.save();
  g.beginPath(); g.rect(LEFT, AXIS, gantt.width - LEFT - 8, gantt.height); g.clip();
  g.lineWidth = 1.4;
  for (const p of predsOf(i).slice(0, 64)) arrow(g, p, i, colour('--text'));
  for (const s of succsOf(i).slice(0, 64)) arrow(g, i, s, colour('--accent'));
  g.lineWidth = 2;
  g.strokeStyle = colour('--text');
  const a = xOf(task.start[i]), b = xOf(stopOf(i));
  g.strokeRect(a - 1, rowOf(i) + .5, Math.max(3, b - a + 2), gantt.row - 2);
  g.restore();
}

function draw() {
  gantt.queued = false;
  const g = gantt.g, h = gantt.row;
  g.fillStyle = colour('--card');
  g.fillRect(0, 0, gantt.width, gantt.height);
  g.lineWidth = 1;
  drawAxis(g);
  drawStrips(g);
  g.textBaseline = 'middle';
  for (let w = 0; w < data.workers.length; w++) {
    const y = top() + w * h;
    if (h >= 11 || w % Math.ceil(11 / h) === 0) {
      g.textAlign = 'right';
      g.fillStyle = colour('--soft');
      g.fillText(data.workers.length > 99 ? w : 'worker ' + w, LEFT - 6, y + Math.max(h, 8) / 2);
    }
    drawTasks(g, w, y, h > 6 ? h - 2 : h - .5);
  }
  if ($('showpath').checked) drawPath(g);
  drawPicked(g);
  $('range').textContent = time(gantt.from - view.begin, 4) + ' to ' + time(gantt.to - view.begin, 4) + ' (' + time(gantt.to - gantt.from) + ' shown)';
}
function redraw() { if (!gantt.queued) { gantt.queued = true; requestAnimationFrame(draw); } }

// ---- moving ----

function show(from, to) {
  const least = 200, low = view.begin, high = view.end, span = Math.min(high - low, Math.max(least, to - from));
  from = Math.max(low, Math.min(high - span, from));
  gantt.from = from;
  gantt.to = from + span;
  redraw();
}
function zoom(f, x) {
  const t = x === undefined ? (gantt.from + gantt.to) / 2 : timeOf(Math.max(LEFT, x));
  show(t - (t - gantt.from) * f, t + (gantt.to - t) * f);
}
const move = f => show(gantt.from + f * (gantt.to - gantt.from), gantt.to + f * (gantt.to - gantt.from));

// The task at a place of the canvas, or the nearest one within 3 pixels.
function taskAt(x, y) {
  const w = Math.floor((y - top()) / gantt.row);
  if (w < 0 || w >= data.workers.length || x < LEFT) return NONE;
  const t = timeOf(x), near = timeOf(x + 3) - t;
  let best = NONE, distance = near;
  for (let p = Math.max(firstOf[w], firstAfter(w, t) - 1); p < firstOf[w + 1] && p < firstAfter(w, t) + 1; p++) {
    const i = order[p], d = Math.max(task.start[i] - t, t - stopOf(i), 0);
    if (d < distance) { best = i; distance = d; }
  }
  return best;
}

function pick(i, bring) {
  gantt.picked = i;
  showFacts(i);
  if (i !== NONE && bring) {
    const around = Math.max(task.duration[i] * 12, (view.end - view.begin) / 400), middle = task.start[i] + task.duration[i] / 2;
    if (stopOf(i) < view.begin || task.start[i] > view.end) selectView(data.views.findIndex(v => v.begin <= task.start[i] && v.end >= stopOf(i)));
    show(middle - around / 2, middle + around / 2);
  }
  redraw();
}
function pickOnPath(by) {
  const path = view.realised.task, at = path.indexOf(gantt.picked);
  const next = at < 0 ? path.findIndex(i => task.start[i] >= gantt.from) : at + by;
  if (next >= 0 && next < path.length) pick(path[next], true);
}

// ---- pointer and keys ----

function listen() {
  const c = gantt.canvas, fingers = new Map();
  let down = null, apart = 0;
  const at = e => { const r = c.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  c.addEventListener('wheel', e => {
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) move(e.deltaX / gantt.width);
    else zoom(Math.exp(Math.max(-80, Math.min(80, e.deltaY)) / 250), at(e)[0]);
    e.preventDefault();
  }, { passive: false });
  c.addEventListener('pointerdown', e => {
    fingers.set(e.pointerId, at(e));
    c.setPointerCapture(e.pointerId);
    down = { x: at(e)[0], from: gantt.from, to: gantt.to, moved: false };
    apart = 0;
  });
  c.addEventListener('pointermove', e => {
    const [x, y] = at(e);
    if (fingers.has(e.pointerId)) fingers.set(e.pointerId, [x, y]);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()], d = Math.hypot(a[0] - b[0], a[1] - b[1]);
      if (apart) zoom(apart / Math.max(1, d), (a[0] + b[0]) / 2);
      apart = d;
      down = null;
    } else if (down && fingers.size === 1) {
      const dt = (down.x - x) / (gantt.width - LEFT - 8) * (down.to - down.from);
      if (Math.abs(x - down.x) > 3) down.moved = true;
      if (down.moved) show(down.from + dt, down.to + dt);
    } else hover(x, y);
  });
  const up = e => {
    fingers.delete(e.pointerId);
    if (down && !down.moved && e.type === 'pointerup') pick(taskAt(...at(e)));
    down = null;
  };
  c.addEventListener('pointerup', up);
  c.addEventListener('pointercancel', up);
  c.addEventListener('pointerleave', () => { $('tip').hidden = true; });
  c.addEventListener('keydown', e => {
    const act = { ArrowLeft: () => move(-.2), ArrowRight: () => move(.2), '+': () => zoom(.6), '=': () => zoom(.6), '-': () => zoom(1 / .6),
      0: () => show(view.begin, view.end), n: () => pickOnPath(1), p: () => pickOnPath(-1), Escape: () => pick(NONE) }[e.key];
    if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
    act();
    e.preventDefault();
  });
}

function hover(x, y) {
  const tip = $('tip'), i = taskAt(x, y);
  tip.hidden = i === NONE;
  if (i === NONE) return;
  tip.innerHTML = `<strong>${text(name(i))}</strong> ${time(task.duration[i])}<br><span class="soft">step ${task.step[i]}, micro-batch ${task.micro[i]}, ${text(data.phases[task.phase[i]])}</span>`;
  tip.style.left = Math.min(x + 12, gantt.width - tip.offsetWidth - 4) + 'px';
  tip.style.top = y + 14 + 'px';
}
