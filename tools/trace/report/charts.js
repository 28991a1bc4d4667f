// Tables and plots. Each takes what it draws and returns HTML; figures come computed.

const table = (heads, rows, left = []) => '<div class="scroll"><table><thead><tr>' +
  heads.map((h, i) => `<th scope="col"${left.includes(i) ? ' class="left"' : ''}>${h}</th>`).join('') + '</tr></thead><tbody>' + rows.join('') + '</tbody></table></div>';
const row = (cells, left = [], attributes = '') => `<tr${attributes}>` + cells.map((c, i) => `<td${left.includes(i) ? ' class="left"' : ''}>${c}</td>`).join('') + '</tr>';
const bar = parts => '<div class="bar">' + parts.map(([c, f, s]) => `<i style="width:${Math.max(0, 100 * f)}%;background:${c}" title="${text(s)}"></i>`).join('') + '</div>';

const shareCell = (v, all, most) => `<span class="under" style="background-size:${Math.round(100 * v / most)}% 100%">${share(v, all)}</span>`;

const svg = (w, h, inner, label) => `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="${text(label)}">${inner}</svg>`;
const words = (x, y, s, anchor = 'start', cls = '') => `<text x="${x}" y="${y}" text-anchor="${anchor}"${cls && ` class="${cls}"`}>${text(s)}</text>`;

// Bounds as bars on one scale: the makespan is the longest.
function boundBars(v) {
  const b = v.bounds, all = [['time taken', b.makespan, 'var(--accent)'], ['work / workers', b.area, 'var(--busy)'], ['longest chain', b.critical_path, 'var(--path)']];
  if (b.bandwidth !== null) all.push(['memory traffic' + (b.guessed_rate ? ' (guessed rate)' : ''), b.bandwidth, 'var(--i3)']);
  const most = Math.max(...all.map(x => x[1] || 0));
  return '<div class="rows">' + all.map(([s, t, c]) => `<span>${s}</span>${bar([[c, t / most, s + ' ' + time(t)]])}<span>${time(t)}</span>`).join('') + '</div>';
}

function splitBars(v) {
  const all = v.busy + v.idle.reduce((a, b) => a + b, 0), parts = [['var(--busy)', v.busy, 'in tasks'], ...v.idle.map((t, i) => [causeColour(i), t, 'idle: ' + data.causes[i]])];
  return bar(parts.map(([c, t, s]) => [c, t / all, s + ' ' + share(t, all)])) + '<div class="rows">' +
    parts.map(([c, t, s]) => `<span><i class="dot" style="background:${c}"></i>${s}</span><span></span><span>${share(t, all)}</span>`).join('') + '</div>';
}

// ---- heat maps: canvases, as many cells as experts times layers ----

function heat(id, title, h, columnName, format) {
  const box = $(id);
  if (!h.rows.length) { box.innerHTML = `<h2>${title}</h2><p class="soft">Not recorded in this window.</p>`; return; }
  box.innerHTML = `<h2>${title}</h2><canvas></canvas><p class="legend"><span class="scale"></span><span class="at"></span></p>`;
  const c = box.querySelector('canvas'), g = c.getContext('2d'), width = Math.max(240, box.clientWidth - 30), left = 34, bottom = 30;
  const cell = (width - left) / h.columns, high = Math.max(3, Math.min(16, Math.floor(340 / h.rows.length))), height = high * h.rows.length + bottom;
  const most = Math.max(...h.rows.map(r => Math.max(...r.v))), scale = window.devicePixelRatio || 1;
  c.width = width * scale; c.height = height * scale; c.style.height = height + 'px'; c.style.width = width + 'px';
  c.setAttribute('role', 'img');
  c.setAttribute('aria-label', `${title}: ${h.rows.length} layers, ${h.columns} columns, highest ${format(most)}`);
  g.setTransform(scale, 0, 0, scale, 0, 0);
  const a = colour('--h0'), b = colour('--h1'), gap = cell > 4 ? .5 : 0;
  h.rows.forEach((r, k) => r.v.forEach((v, e) => {
    g.fillStyle = v ? mix(a, b, v / most) : colour('--grid');
    g.fillRect(left + e * cell, k * high, cell - gap, high - (high > 5 ? .5 : 0));
  }));
  g.fillStyle = colour('--soft');
  g.font = '11px system-ui, sans-serif';
  g.textBaseline = 'middle';
  g.textAlign = 'right';
  const each = Math.ceil(12 / high);
  h.rows.forEach((r, k) => { if (k % each === 0) g.fillText(r.layer, left - 6, k * high + high / 2); });
  g.textAlign = 'center';
  const steps = Math.max(1, Math.ceil(h.columns / Math.max(4, (width - left) / 34)));
  for (let e = 0; e < h.columns; e += steps) g.fillText(e, left + (e + .5) * cell, height - bottom + 9);
  g.fillText(columnName, left + (width - left) / 2, height - 6);
  g.textAlign = 'left';
  g.fillText('layer', 0, height - bottom + 9);
  box.querySelector('.scale').innerHTML = `<i style="background:${a}"></i>0 <i style="background:linear-gradient(90deg,${a},${b});width:60px;margin-left:6px"></i>${format(most)}`;
  c.addEventListener('pointermove', e => {
    const r = c.getBoundingClientRect(), k = Math.floor((e.clientY - r.top) / high), x = Math.floor((e.clientX - r.left - left) / cell);
    const in_row = h.rows[k], sum = in_row ? in_row.v.reduce((p, q) => p + q, 0) : 0;
    box.querySelector('.at').textContent = in_row && x >= 0 && x < h.columns ? `layer ${in_row.layer}, ${columnName} ${x}: ${format(in_row.v[x])} (${ratio(in_row.v[x] * h.columns / sum)} times the mean)` : '';
  });
}

// ---- roofline ----

function roofline(v) {
  const H = data.header, workers = data.workers.length, peak = +H['rates.peak_gflops'] || 0;
  const memory = +H['rates.read_gbps'] || 0, shared = (+H['rates.read_all_gbps'] || 0) / workers;
  const dots = v.kinds.filter(k => k.flops > 0 && k.bytes > 0 && k.time > 0).map(k => ({ k, x: k.flops / k.bytes, y: k.flops / k.time }));
  if (!dots.length) return '<p class="soft">No kind has both flops and bytes.</p>';
  const W = 620, B = 330, left = 52, bottom = 40, log = Math.log10;
  const xs = dots.map(d => log(d.x)), ys = dots.map(d => log(d.y));
  if (peak) ys.push(log(peak));
  const x0 = Math.floor(Math.min(...xs) - .2), x1 = Math.ceil(Math.max(...xs) + .2), y0 = Math.floor(Math.min(...ys) - .1), y1 = Math.ceil(Math.max(...ys) + .1);
  const X = l => left + (l - x0) / (x1 - x0) * (W - left - 12), Y = l => 10 + (y1 - l) / (y1 - y0) * (B - bottom - 10);
  let s = '';
  for (let k = x0; k <= x1; k++) s += `<line class="gridline" x1="${X(k)}" x2="${X(k)}" y1="10" y2="${B - bottom}"/>` + words(X(k), B - bottom + 14, k < 0 ? (10 ** k).toFixed(-k) : 10 ** k, 'middle');
  for (let k = y0; k <= y1; k++) s += `<line class="gridline" x1="${left}" x2="${W - 12}" y1="${Y(k)}" y2="${Y(k)}"/>` + words(left - 6, Y(k) + 4, k < 0 ? (10 ** k).toFixed(-k) : 10 ** k, 'end');
  // What is drawn, so that names stand clear of it: boxes of dots and names, lines as [height by x, where it ends].
  const most = Math.max(...dots.map(d => d.k.time)), taken = [], lines = [];
  for (const d of dots) {
    const x = X(log(d.x)), y = Y(log(d.y)), r = 3 + 7 * Math.sqrt(d.k.time / most);
    Object.assign(d, { px: x, py: y, r });
    taken.push([x - r, y - r, x + r, y + r]);
  }
  const clear = b => b[0] >= left && b[2] <= W - 12 && b[1] >= 8 && b[3] <= B - bottom &&
    !taken.some(t => b[0] < t[2] && b[2] > t[0] && b[1] < t[3] && b[3] > t[1]) &&
    !lines.some(([h, end]) => b[0] < end && Math.min(h(b[0]), h(Math.min(b[2], end))) < b[3] && Math.max(h(b[0]), h(Math.min(b[2], end))) > b[1]);
  // In the first place of [x, y, anchor] that is clear; about 6.4 px a letter.
  const name = (label, places, cls) => {
    for (const [x, y, anchor] of places) {
      const w = 6.4 * label.length, from = anchor === 'end' ? x - w : anchor === 'middle' ? x - w / 2 : x, b = [from, y - 10, from + w, y + 3];
      if (!clear(b)) continue;
      taken.push(b);
      return words(x, y, label, anchor, cls);
    }
    return '';
  };
  const roofs = [];
  if (memory) roofs.push({ gbps: memory, look: 'stroke="var(--i3)"', label: `${memory} GB/s, one core`, dx: -8, dy: -4, anchor: 'end' });
  if (memory && workers > 1) roofs.push({ gbps: shared, look: 'stroke="var(--i2)" stroke-dasharray="5 3"', label: `${digits(shared)} GB/s each, all cores`, dx: 8, dy: 12, anchor: 'start' });
  s += `<clipPath id="inside"><rect x="${left}" y="10" width="${W - left - 12}" height="${B - bottom - 10}"/></clipPath><g clip-path="url(#inside)">`;
  for (const m of roofs) {
    const x = X(peak ? Math.min(x1, log(peak / m.gbps)) : x1), height = at => Y(log(m.gbps) + x0 + (at - left) / (W - left - 12) * (x1 - x0));
    m.height = height;
    lines.push([height, x]);
    s += `<polyline points="${left},${height(left)} ${x},${height(x)}" fill="none" stroke-width="1.5" ${m.look}/>`;
  }
  if (peak) {
    lines.push([() => Y(log(peak)), W]);
    s += `<line x1="${left}" x2="${W - 12}" y1="${Y(log(peak))}" y2="${Y(log(peak))}" stroke="var(--i3)" stroke-width="1.5"/>`;
  }
  s += '</g>';
  let names = peak ? name(`${digits(peak)} GFLOP/s, one core`, [[W - 16, Y(log(peak)) - 5, 'end'], [left + 6, Y(log(peak)) - 5, 'start'], [W - 16, Y(log(peak)) + 14, 'end']]) : '';
  for (const m of roofs) {
    const along = [.5, .6, .4, .7, .3, .8, .2, .9, .1].map(at => left + at * (W - left - 12));
    names += name(m.label, along.map(x => [x + m.dx, m.height(x) + m.dy, m.anchor]));
  }
  let named = 0;
  for (const d of dots.sort((a, b) => b.k.time - a.k.time)) {
    const { px: x, py: y, r } = d, out = r + 3;
    s += `<circle cx="${x}" cy="${y}" r="${r}" fill="var(${kindColour[d.k.kind]})" fill-opacity=".85"><title>${text(kindName(d.k.kind))}: ${digits(d.x)} flop/byte, ${digits(d.y)} GFLOP/s, ${time(d.k.time)}</title></circle>`;
    const it = named < 10 ? name(kindName(d.k.kind), [[x + out, y + 4, 'start'], [x - out, y + 4, 'end'], [x, y - out - 2, 'middle'], [x, y + out + 9, 'middle']], 'label') : '';
    named += it !== '';
    names += it;
  }
  s += names + words((left + W) / 2, B - 8, 'flop per byte of memory traffic (if caches were empty)', 'middle') + `<text transform="translate(12,${B / 2 - 10}) rotate(-90)" text-anchor="middle">GFLOP/s of a worker</text>`;
  return svg(W, B, s, 'Roofline: GFLOP/s of a worker by flop per byte, for each kind') +
    `<p class="hint">Area: time in the kind. Memory lines are rates of DRAM${H['rates.measured'] === '1' ? ', measured' : ', guessed: run moesaic doctor --calibrate'}; a kind above its line finds its data in caches.${peak ? '' : ' The peak of a core is not in the trace.'}</p>`;
}

// ---- curves ----

function plot({ W = 620, B = 260, left = 62, label, x0, x1, y1, xFormat, yFormat, xName, inner }) {
  const bottom = 36, X = v => left + (v - x0) / (x1 - x0 || 1) * (W - left - 10), Y = v => 8 + (1 - v / (y1 || 1)) * (B - bottom - 8);
  let s = '';
  for (const t of ticks(0, y1 || 1, 4)) s += `<line class="gridline" x1="${left}" x2="${W - 10}" y1="${Y(t)}" y2="${Y(t)}"/>` + words(left - 6, Y(t) + 4, yFormat(t), 'end');
  for (const t of ticks(x0, x1 > x0 ? x1 : x0 + 1, 6)) s += words(X(t), B - bottom + 15, xFormat(t), 'middle');
  s += inner(X, Y) + `<line class="axis" x1="${left}" x2="${W - 10}" y1="${Y(0)}" y2="${Y(0)}"/>` + words((left + W) / 2, B - 5, xName, 'middle');
  return svg(W, B, s, label);
}

function memoryPlot() {
  const m = data.memory, span = m.end - m.begin, rss = m.purposes.find(p => p.name === 'rss');
  const parts = m.purposes.filter(p => p.name !== 'rss').map(p => ({ ...p, most: Math.max(...p.bytes) })).filter(p => p.most > 0).sort((a, b) => b.most - a.most);
  if (!parts.length && !rss) return '<p class="soft">Not recorded.</p>';
  const shown = parts.slice(0, 9), rest = parts.slice(9), n = (shown[0] || rss).bytes.length;
  if (rest.length) shown.push({ name: rest.length + ' others', bytes: shown[0].bytes.map((_, i) => rest.reduce((a, p) => a + p.bytes[i], 0)) });
  const sum = new Float64Array(n), layers = shown.map(p => { const low = sum.slice(); p.bytes.forEach((v, i) => { sum[i] += v; }); return [low, sum.slice()]; });
  const y1 = Math.max(...sum, ...(rss ? rss.bytes : [])) * 1.04, unit = y1 >= 1073741824 ? 1073741824 : 1048576;
  const html = plot({ label: 'Memory by purpose over time', x0: m.begin / 1e9, x1: m.end / 1e9, y1: y1 / unit, xFormat: t => digits(t), yFormat: t => digits(t) + (unit > 2e6 ? ' GiB' : ' MiB'), xName: 'seconds since the trace began',
    inner: (X, Y) => {
      const x = i => X((m.begin + span * i / n) / 1e9).toFixed(1), y = v => Y(v / unit).toFixed(1);
      const edge = v => { let s = ''; for (let i = 0; i < n; i++) if (!i || i === n - 1 || v[i] !== v[i - 1] || v[i] !== v[i + 1]) s += `${x(i)},${y(v[i])} `; return s; };
      const back = v => edge(v).trim().split(' ').reverse().join(' ');
      return layers.map(([a, b], i) => `<polygon points="${edge(b)}${back(a)}" fill="var(--c${i % 12})"/>`).join('') +
        (rss ? `<polyline points="${edge(rss.bytes)}" fill="none" stroke="var(--text)" stroke-width="1.5" stroke-dasharray="5 3"/>` : '');
    } });
  const last = p => p.bytes[n - 1];
  return html + `<p class="legend">${legend(shown.map((p, i) => [`var(--c${i % 12})`, p.name + ' ' + bytes(last(p))]))}${rss ? `<span>&#9476;&#9476; whole process ${bytes(last(rss))}</span>` : ''}</p>`;
}

function stepsPlot() {
  const s = data.steps;
  if (!s.length) return '<p class="soft">No steps in this trace.</p>';
  const most = Math.max(...s.map(x => x[2] - x[1])) * 1.05, W = 620, left = 62;
  const html = plot({ label: 'Time of each step', x0: s[0][0] - .5, x1: s[s.length - 1][0] + .5, y1: most / 1e6, xFormat: t => Number.isInteger(t) ? t : '', yFormat: t => digits(t) + ' ms', xName: 'step',
    inner: (X, Y) => { const w = Math.max(1, (W - left) / s.length * .8);
      return s.map(x => `<rect x="${(X(x[0]) - w / 2).toFixed(1)}" width="${w.toFixed(1)}" y="${Y((x[2] - x[1]) / 1e6).toFixed(1)}" height="${(Y(0) - Y((x[2] - x[1]) / 1e6)).toFixed(1)}" fill="${x[0] >= view.first_step && x[0] <= view.last_step ? 'var(--accent)' : 'var(--rest)'}"><title>step ${x[0]}: ${time(x[2] - x[1])}${x[3] === null ? '' : ', ' + x[3] + ' tokens'}</title></rect>`).join(''); } });
  return html + `<p class="legend">${legend([['var(--accent)', 'shown above'], ['var(--rest)', 'other steps']])}</p>`;
}

function kindsTable(v) {
  const all = v.all.time, kinds = [...v.kinds].sort((a, b) => b.time - a.time);
  return table(['kind', 'time', 'share', 'tasks', 'median', 'p95', 'core', 'GFLOP/s', 'GB/s'], kinds.map(k => row([
    `<i class="dot" style="background:var(${kindColour[k.kind]})"></i>${text(kindName(k.kind))}`, time(k.time), shareCell(k.time, all, kinds[0].time), count(k.n), time(k.median), time(k.p95),
    k.cpu === null ? 'n/a' : share(Math.min(k.cpu, k.time), k.time), k.flops > 0 ? digits(k.flops / k.time) : 'n/a', k.bytes > 0 ? digits(k.bytes / k.time) : 'n/a'])))  +
    '<p class="hint">Time: of all workers together. Core: the share of it in which the worker had its core. GFLOP/s and GB/s: of one worker.</p>';
}

function layersTable(v) {
  const sums = v.layers.map(p => p.reduce((a, b) => a + b, 0)), most = Math.max(...sums.slice(0, data.layers)), colours = ['var(--rest)', 'var(--c0)', 'var(--c1)', 'var(--c4)'];
  const rows = sums.map((t, l) => t ? row([l === data.layers ? 'no layer' : l, time(t), l === data.layers ? '' : bar(v.layers[l].map((p, i) => [colours[i], p / most, data.phases[i] + ' ' + time(p)])), share(t, v.all.time)], [2]) : '').filter(Boolean);
  return table(['layer', 'time', '<span style="display:inline-block;min-width:160px">by phase</span>', 'share'], rows, [2]) + `<p class="legend">${legend(data.phases.map((p, i) => [colours[i], p]))}</p>`;
}

function workersTable(v) {
  return table(['worker', 'core', 'node', 'busy', ...data.causes], v.by_worker.map((w, i) => {
    const all = w.busy + w.idle.reduce((a, b) => a + b, 0);
    return row([i, data.workers[i].cpu < 0 ? 'not bound' : data.workers[i].cpu, data.workers[i].node, shareCell(w.busy, all, all), ...w.idle.map(t => share(t, all))]);
  })) + '<p class="hint">Shares of the time shown; idle time by cause.</p>';
}

function imbalanceTable(v) {
  const x = v.experts, rows = x.worst.map(w => row([w.step, w.layer, ['forward', 'backward'][w.direction], ratio(w.time_ratio), w.experts ? ratio(w.tokens_ratio) : 'n/a', w.experts ? `${w.dead} of ${w.experts}` : 'n/a', w.top.map(t => `${t[0]}: ${t[1]}`).join(', ') || 'n/a'], [2, 6]));
  if (!rows.length) return '<p class="soft">No expert tasks in this window.</p>';
  const line = (s, d) => row([s, ratio(d.time_ratio), ratio(d.time_ratio_p95), ratio(d.tokens_ratio), ratio(d.tokens_ratio_p95), d.dead === null ? 'n/a' : digits(d.dead)]);
  return table(['direction', 'time, median', 'p95', 'tokens, median', 'p95', 'dead experts'], [line('forward', x.forward), line('backward', x.backward)]) +
    '<p class="hint">Highest over mean of a layer: time over expert groups, tokens over experts. 1 is perfect balance. Below: the most uneven.</p>' +
    table(['step', 'layer', 'direction', 'time', 'tokens', 'dead', 'experts with most tokens'], rows, [2, 6]);
}

function numaTable(v) {
  const n = v.numa;
  if (!n.known) return '<p class="soft">n/a: no task has bytes with a known home.</p>';
  const all = n.local + n.remote + n.unplaced, most = Math.max(1, ...n.matrix.map(r => Math.max(...r)));
  const heads = ['worker on', ...n.matrix.map((_, i) => 'bytes on node ' + i), 'elsewhere'];
  return table(heads, n.matrix.map((r, i) => row(['node ' + i, ...r.map(b => `<span style="background:${b ? mix(colour('--card'), colour('--h1'), .45 * b / most) : 'none'};padding:1px 5px;border-radius:3px">${bytes(b)}</span>`)]))) +
    `<p class="hint">Estimate, from where memory was placed: local ${bytes(n.local)} (${share(n.local, all)}), remote ${bytes(n.remote)} (${share(n.remote, all)}), without a home ${bytes(n.unplaced)}.</p>`;
}

function hiddenTable(v) {
  const line = (s, x) => x.time ? row([s, time(x.time), time(x.exposed), share(x.exposed, x.time), x.gain === null ? 'n/a' : time(x.gain)]) : row([s, 'none', '', '', '']);
  return table(['work', 'while one runs', 'exposed', 'share', 'gain without it'], [line('repack', v.repack), line('update', v.update)]) +
    '<p class="hint">Exposed: no other work ran or could, or it lies on the realised critical path. Gain: by how much a replay without it is shorter.</p>';
}

function criticalTables(v) {
  const r = v.realised, p = v.path, span = v.end - v.begin;
  const top = (by, name) => by.map((t, i) => [t, name(i)]).filter(x => x[0] > 0).sort((a, b) => b[0] - a[0]).slice(0, 6).map(x => `${text(x[1])} ${share(x[0], by.reduce((a, b) => a + b, 0))}`).join(', ');
  const links = data.links.map((l, i) => r.links[i] ? `${text(l)} ${count(r.links[i])}` : '').filter(Boolean).join(', ');
  return table(['', 'realised', 'longest chain'], [
    row(['tasks', count(r.task.length), count(p.tasks)]), row(['time in them', time(r.busy), time(p.length)]), row(['of the window', share(r.busy, span), share(p.length, span)]), row(['gaps between them', time(r.gaps), ''])]) +
    `<p class="hint"><strong>Realised</strong>: what the last task waited for, and that, and so on. Its kinds: ${top(r.by_kind, kindName)}. Its layers: ${top(r.by_layer, l => l === data.layers ? 'none' : l)}. A task of it waited for: ${links}.</p>
     <p class="hint"><strong>Longest chain</strong> of dependencies by duration: no number of workers can do better. Its kinds: ${top(p.by_kind, kindName)}.</p>`;
}

function outliersTable(v) {
  const o = v.outliers;
  if (!o.n) return '<p class="soft">None.</p>';
  return `<p class="hint">${count(o.n)} tasks took much longer than others of their kind and size, ${time(o.excess)} together; at ${count(o.preempted)} of them the worker had lost its core. Click one to see it.</p>` +
    table(['task', 'took', 'expected', 'step', 'worker', 'core lost'], o.list.map(x => row([text(name(x.task)), time(task.duration[x.task]), time(x.expected), task.step[x.task], task.worker[x.task], x.preempted ? 'yes' : 'no'], [], ` class="pick" data-task="${x.task}" tabindex="0"`)));
}

function headerList() {
  const H = data.header, keys = Object.keys(H).sort((a, b) => b.startsWith('config.') - a.startsWith('config.'));
  return '<dl>' + keys.map(k => `<div><dt>${text(k)}</dt><dd>${text(H[k]) || '&mdash;'}</dd></div>`).join('') + '</dl>';
}
