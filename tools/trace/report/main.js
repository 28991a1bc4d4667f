// Puts the page together: the view that is shown, the sentences on top, the facts of a task.
let view;

// ---- in one look ----

function limitText(v) {
  const b = v.bounds, all = v.busy + v.idle.reduce((a, c) => a + c, 0), worst = v.idle.indexOf(Math.max(...v.idle));
  const bounds = [['area', b.area], ['path', b.critical_path]];
  if (b.bandwidth !== null && !b.guessed_rate) bounds.push(['memory', b.bandwidth]);
  const binding = bounds.sort((x, y) => (y[1] || 0) - (x[1] || 0))[0][0];
  const steps = v.first_step === v.last_step ? 1 : 0;
  let s = `${steps ? 'The step' : v.first_step ? `Steps ${v.first_step} to ${v.last_step}` : 'The trace'} took <strong>${time(b.makespan)}</strong>. `;
  if (b.efficiency >= .85) s += { area: '<strong>The work itself limits it</strong>: workers are busy nearly all the time. It gets faster by doing less work, by faster kernels, or with more workers',
    path: '<strong>A chain of dependent tasks limits it</strong>: more workers would not help. Its tasks must get shorter or fewer',
    memory: '<strong>Memory bandwidth limits it</strong>: it moves its bytes about as fast as the memory can' }[binding];
  else s += `<strong>Idle workers limit it</strong>: ${share(all - v.busy, all)} of their time, mostly ${{ submission: 'because tasks are submitted too late', dependency: 'because nothing is ready: all waits for tasks that run', placement: 'because ready tasks belong to other workers', data: 'in acquiring data', runtime: 'in the runtime between tasks' }[data.causes[worst]] || data.causes[worst]}`;
  s += ` (at least ${time(b.lower)} by its bounds, so ${share(b.efficiency, 1)} efficient).`;
  const taken = v.all.cpu === null ? 0 : 1 - v.all.cpu / v.all.time, others = `<strong>Other processes took the cores</strong> for ${share(taken, 1)} of the time in tasks`;
  if (taken > .2) s = others + ', so the figures say more about them than about the program. ' + s;
  else if (taken > .07) s += ' ' + others + '.';
  return s;
}

function layerText(v) {
  const kinds = [...v.kinds].sort((a, b) => b.time - a.time).slice(0, 3), sums = v.layers.map(p => p.reduce((a, b) => a + b, 0)), numbered = sums.slice(0, data.layers);
  const most = numbered.indexOf(Math.max(...numbered));
  let s = kinds.map(k => `<strong>${text(kindName(k.kind))}</strong> ${share(k.time, v.all.time)}`).join(', ') + ' of the time in tasks. ';
  if (most >= 0 && numbered[most] && numbered.filter(t => t).length > 1) s += `Layer <strong>${most}</strong> takes most: ${share(numbered[most], v.all.time)} (mean of layers ${share(numbered.reduce((a, b) => a + b, 0) / numbered.filter(t => t).length, v.all.time)}).`;
  const worst = h => h.rows.reduce((a, r) => !a || r.ratio > a.ratio ? r : a, null), tokens = worst(v.experts.tokens), times = worst(v.experts.group_times);
  if (tokens) s += ` Routing is most uneven in layer <strong>${tokens.layer}</strong>: expert <strong>${tokens.top}</strong> has ${count(tokens.v[tokens.top])} rows, ${ratio(tokens.ratio)} times the mean.`;
  if (times) s += ` In time: layer ${times.layer}, group ${times.top}, ${ratio(times.ratio)} times.`;
  return s;
}

function balanceText(v) {
  const gain = v.replay.equal_experts;
  if (!v.experts.worst.length) return '<span class="soft">No expert tasks in this window.</span>';
  if (gain === null) return '<span class="soft">Not replayed: too few tasks, or some could not be placed.</span>';
  const percent = gain / v.replay.base;
  return (gain > 0 ? `would gain <span class="big">${time(gain)}</span> of ${time(v.replay.base)} (${share(gain, v.replay.base)}). ` : 'would gain <span class="big">nothing</span>. ') +
    (percent < .01 ? 'Unevenness is hidden: other work fills the gaps.' : 'Unevenness shows: workers wait for the heaviest groups.') +
    ` <span class="soft">From a replay with each layer's expert tasks at their mean (replayed as recorded: ${time(v.replay.base)}, measured ${time(v.replay.recorded)}).</span>`;
}

function ratesTable() {
  const r = data.rates, line = (s, x, f) => x[0] === null ? '' : `<div><span>${s}</span><span>${f(x[0])}${x[1] === null ? '' : ` <span class="soft">[${f(x[1])}, ${f(x[2])}]</span>`}</span></div>`;
  const html = line('step', r.seconds, s => time(s * 1e9)) + line('tokens/s', r.tokens, v => digits(v)) + line('trained tokens/s', r.trained, v => digits(v)) + line('GFLOP/s', r.gflops, v => digits(v)) + line('GB/s', r.gbps, v => digits(v));
  return html ? `<div class="rows">${html}</div><p class="hint">Median of ${r.steps} steady steps, 95 % interval.</p>` : '<p class="soft">No steps in this trace.</p>';
}

// ---- a task ----

function showFacts(i) {
  if (i === NONE) { $('facts').innerHTML = ''; return; }
  const known = (v, f) => v < 0 ? 'n/a' : f(v), dl = [['id', task.id[i]], ['kind', text(kindName(task.kind[i]))], ['phase', text(data.phases[task.phase[i]])], ['step', known(task.step[i], count)], ['micro-batch', known(task.micro[i], count)],
    ['layer', known(task.layer[i], count)], ['group', known(task.group[i], count)], ['slice', known(task.slice[i], count)], ['part', known(task.part[i], count)], ['worker', task.worker[i]],
    ['start', time(task.start[i] - view.begin, 5)], ['duration', time(task.duration[i])], ['waited, ready to start', known(task.waited[i], v => time(v))], ['had its core', known(task.cpu[i], v => share(Math.min(v, task.duration[i]), task.duration[i]))],
    ['rows', known(task.rows[i], count)], ['GFLOP/s', known(task.flops[i], v => digits(v / Math.max(1, task.duration[i])))], ['memory traffic', known(task.bytes[i], v => bytes(v))], ['GB/s', known(task.bytes[i], v => digits(v / Math.max(1, task.duration[i])))]];
  const before = predsOf(i).sort((a, b) => stopOf(b) - stopOf(a)), after = succsOf(i), on = view.realised.task.indexOf(i);
  const button = k => `<button class="link" data-task="${k}">${text(name(k))}</button>`;
  const list = (s, l) => `<div class="links"><span class="soft">${s}:</span> ${l.length ? l.slice(0, 24).map(button).join(' ') : 'none'}${l.length > 24 ? ` and ${l.length - 24} more` : ''}</div>`;
  let why = 'not on the realised critical path of this window';
  if (on >= 0) why = `task ${on + 1} of ${view.realised.task.length} on the realised critical path; it could not begin before because of: ${text(data.links[view.realised.link[on]])}`;
  $('facts').innerHTML = `<strong>${text(name(i))}</strong> <span class="soft">${why}</span> <button class="link" data-task="${i}">zoom to it</button><dl>` + dl.map(([k, v]) => `<div><dt>${k}</dt><dd>${v}</dd></div>`).join('') + '</dl>' +
    list(`waits for ${task.preds[i]} task${task.preds[i] === 1 ? '' : 's'}${task.preds[i] > before.length ? ` (${before.length} that no other implies)` : ''}, last to end first`, before) + list('awaited by', after);
}

// ---- the view ----

function fill(id, html) {
  const box = $(id), h = box.querySelector('h2').outerHTML;
  box.innerHTML = h + html;
}

function drawView() {
  const v = view;
  $('limit').innerHTML = limitText(v);
  $('bounds').innerHTML = boundBars(v);
  $('split').innerHTML = splitBars(v);
  $('layer').innerHTML = layerText(v);
  $('balance').innerHTML = balanceText(v);
  fill('kinds', kindsTable(v));
  fill('roofline', roofline(v));
  fill('layers', layersTable(v));
  fill('imbalance', imbalanceTable(v));
  fill('steps', stepsPlot());
  fill('workers', workersTable(v));
  fill('numa', numaTable(v));
  fill('hidden', hiddenTable(v));
  fill('critical', criticalTables(v));
  fill('outliers', outliersTable(v));
  heat('tokens', 'Tokens per expert and layer', v.experts.tokens, 'expert', c => count(c) + ' rows');
  heat('grouptimes', 'Time per expert group and layer', v.experts.group_times, 'expert group', t => time(t));
}

function selectView(n) {
  if (n < 0) return;
  view = data.views[n];
  $('view').value = n;
  gantt.from = view.begin;
  gantt.to = view.end;
  drawView();
  if (gantt.picked !== NONE) showFacts(gantt.picked);
  redraw();
}

function repaint() {
  makePalette();
  cpuPalette = Array.from({ length: 11 }, (_, i) => HEX(mix(colour('--i1'), colour('--busy'), i / 10)));
  layout();
  $('legend').innerHTML = legendOfColours() + (gantt.width < 700 ? legend(data.causes.map((c, i) => [causeColour(i), 'idle: ' + c])) : '');
  redraw();
}

function warn() {
  const lines = [];
  if (!data.ended) lines.push('The trace was not stopped in order: its end is missing.');
  if (data.lost_bytes) lines.push(`${bytes(data.lost_bytes)} of the file are damaged and left out.`);
  if (data.bad_rows) lines.push(`${count(data.bad_rows)} rows say what cannot be and are left out.`);
  if (data.not_run) lines.push(`${count(data.not_run)} submitted tasks have no record of having run.`);
  $('warning').textContent = lines.join(' ');
  $('warning').hidden = !lines.length;
}

function start() {
  const H = data.header;
  theme('auto');
  $('file').textContent = data.name;
  document.title = data.name + ' - moesaic trace';
  $('machine').textContent = [count(data.tasks) + ' tasks', data.steps.length + ' steps', data.workers.length + ' workers', H['host.cpu'], H['rates.isa'], H.policy && 'policy ' + H.policy, H['host.load'] && 'load ' + H['host.load'] + ' at the start', H['host.governor'] && 'governor ' + H['host.governor'], H['moesaic.revision'] && 'revision ' + H['moesaic.revision']].filter(Boolean).join(' · ');
  readTasks();
  readDeps();
  makeLevels();
  warn();
  $('view').innerHTML = data.views.map((v, i) => `<option value="${i}">${text(v.name)}</option>`).join('');
  view = data.views[0];
  repaint();
  $('rates').innerHTML = ratesTable();
  fill('memory', memoryPlot());
  fill('header', headerList());
  selectView(0);
  listen();
  $('view').addEventListener('change', e => selectView(+e.target.value));
  $('colour').addEventListener('change', e => { gantt.colour = e.target.value; repaint(); });
  $('theme').addEventListener('change', e => { theme(e.target.value); repaint(); drawView(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { repaint(); drawView(); });
  $('showpath').addEventListener('change', redraw);
  $('zoomin').addEventListener('click', () => zoom(.5));
  $('zoomout').addEventListener('click', () => zoom(2));
  $('reset').addEventListener('click', () => show(view.begin, view.end));
  $('find').addEventListener('change', e => { const i = task.id.indexOf(+e.target.value); if (i >= 0) pick(i, true); else e.target.value = ''; });
  const go = e => { const t = e.target.closest('[data-task]'); if (t) { pick(+t.dataset.task, true); gantt.canvas.scrollIntoView({ block: 'nearest' }); } };
  document.addEventListener('click', go);
  document.addEventListener('keydown', e => { if (e.key === 'Enter' && e.target.matches('tr[data-task]')) go(e); });
  const hash = () => { // #view=N, #task=ID, #time=a:b (ms of the view)
    const to = new URLSearchParams(location.hash.slice(1)), i = to.has('task') ? task.id.indexOf(+to.get('task')) : NONE;
    if (to.has('view') && data.views[to.get('view')]) selectView(+to.get('view'));
    if (i !== NONE) pick(i, true);
    const [a, b] = (to.get('time') || '').split(':').map(parseFloat);
    if (a < b) show(view.begin + a * 1e6, view.begin + b * 1e6);
  };
  window.addEventListener('hashchange', hash);
  hash();
  let width = window.innerWidth;
  window.addEventListener('resize', () => { if (window.innerWidth !== width) { width = window.innerWidth; repaint(); drawView(); } });
}
start();
