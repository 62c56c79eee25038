// The dashboard: parts of a run arrive as events (watched.py) and are put into the page (pages.py).
// In front of this file stands `tepalDraw` (report/script.py), which draws one figure.

const most = 200;  // rows of a table that are drawn
const $ = (selector, within = document) => within.querySelector(selector);

// Figures: drawn when they come near, one at a time and what is in sight first, and again when the colours change. The
// others are drawn when the browser has nothing else to do, and before the page is printed, so that a copy of the whole
// page has every figure. The library that draws takes a second to start, in which nothing else is shown; so it is started
// when the numbers stand, while the server prepares the figures.
const plots = new Map();
const waiting = new Set();
let library = null, drawing = false;
const startLibrary = () => {
  library = document.createElement('script');
  library.src = document.getElementById('plotly').href;
  library.addEventListener('load', () => { drawNext(); drawOthers(); });
  document.head.append(library);
};
const outOfSight = element => {
  const {top, bottom} = element.getBoundingClientRect();
  return Math.max(top - innerHeight, -bottom, 0);
};
const drawNow = element => {
  waiting.delete(element);
  element.stale = false;
  tepalDraw(element, JSON.parse(plots.get(element)));
};
const drawNext = () => {
  drawing = false;
  if (!window.Plotly || !waiting.size) return;
  const [next] = [...waiting].sort((a, b) => outOfSight(a) - outOfSight(b));
  drawNow(next);
  if (waiting.size) { drawing = true; setTimeout(drawNext); }
};
const draw = element => {
  waiting.add(element);
  if (!library) startLibrary();
  else if (window.Plotly && !drawing) { drawing = true; setTimeout(drawNext); }
};
const seen = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    target.inView = isIntersecting;
    if (isIntersecting && target.stale) { target.stale = false; draw(target); }
  }
}, {rootMargin: '400px'});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const element of plots.keys()) if (element.inView) draw(element); else element.stale = true;
  drawOthers();
});
const whenIdle = window.requestIdleCallback ?? (then => setTimeout(then, 200));
let idle = false;
const drawOthers = () => {
  if (idle || !window.Plotly) return;
  const next = [...plots.keys()].find(element => element.stale);
  if (!next) return;
  idle = true;
  whenIdle(() => {
    idle = false;
    if (next.stale) drawNow(next);
    drawOthers();
  });
};
addEventListener('beforeprint', () => {
  if (window.Plotly) for (const element of plots.keys()) if (element.stale || waiting.has(element)) drawNow(element);
});

const showSection = key => {
  const section = document.getElementById(key);
  if (!section?.hidden) return;
  section.hidden = false;
  $(`.sections a[href="#${key}"]`).hidden = false;
};

const showFigure = part => {
  const grid = $(`[data-figures="${part.section}"]`);
  showSection(part.section);
  let figure = document.getElementById(part.id);
  if (!figure) {
    figure = document.createElement('figure');
    figure.id = part.id;
    figure.dataset.place = part.place;
    figure.append(document.createElement('h3'), document.createElement('div'), document.createElement('figcaption'));
    grid.insertBefore(figure, [...grid.children].find(other => other.dataset.place > part.place) ?? null);
  }
  const [title, plot, caption] = figure.children;
  title.textContent = part.title;
  caption.textContent = part.caption;
  if (!part.plot) { plot.className = 'empty'; plot.textContent = 'nothing to draw'; return; }
  if (!plots.has(plot)) { plot.className = 'plot'; plot.textContent = ''; plot.setAttribute('role', 'group'); }
  plot.setAttribute('aria-label', part.spoken);
  plots.set(plot, JSON.stringify(part.plot));
  if (plot.inView) draw(plot); else { plot.stale = true; seen.observe(plot); drawOthers(); }
};

// The table of clients. `columns`: heading, and the key in `write`, as CLIENT_COLUMNS in watched.py has them.
const write = {
  text: value => value,
  state: value => value,
  number: value => Math.abs(value) < 1e15 ? value.toLocaleString('en') : value.toExponential(2),
  bytes: value => {
    if (Math.abs(value) < 999.5) return `${value.toFixed(0)} B`;
    for (const unit of ['kB', 'MB', 'GB', 'TB', 'PB']) {
      value /= 1000;
      for (const decimals of [2, 1, 0]) {  // rounded first, as bytes_text in records/columns.py
        const text = value.toFixed(decimals);
        if (Math.abs(text) < 10 ** (3 - decimals)) return `${text} ${unit}`;
      }
    }
    return `${Math.abs(value) < 1e6 ? write.number(Math.round(value)) : value.toPrecision(3)} PB`;
  },
  seconds: value => {
    if (!(Math.abs(value) < 1e12)) return `${value.toExponential(2)} s`;
    const [minutes, rest] = [Math.floor(value / 60), Math.floor(value % 60)];
    return minutes ? `${minutes}:${String(rest).padStart(2, '0')} min` : `${value.toFixed(1)} s`;
  },
};
const clients = {columns: [], rows: [], by: null, descending: false};
const showClients = () => {
  const table = document.getElementById('client-table');
  if (!table) return;
  const wanted = document.getElementById('client-filter').value.trim().toLowerCase();
  const has = cell => typeof cell === 'string' && cell.toLowerCase().includes(wanted);
  let rows = clients.rows.filter(row => !wanted || row.some(has));
  if (clients.by !== null) {
    const sign = clients.descending ? -1 : 1, by = clients.by;
    rows = [...rows].sort((a, b) => {
      if (a[by] === null || b[by] === null) return (a[by] === null) - (b[by] === null);
      if (typeof a[by] === 'number') return sign * (a[by] - b[by]);
      return sign * a[by].localeCompare(b[by], 'en', {numeric: true});
    });
  }
  const shown = rows.slice(0, most);
  const {columns} = clients;
  const used = columns.map((_, k) => k === 0 || clients.rows.some(row => row[k] !== null && row[k] !== ''));
  const head = $('thead tr', table), focused = document.activeElement?.dataset?.by;
  head.replaceChildren(...columns.flatMap(([name, kind], k) => {
    if (!used[k]) return [];
    const th = document.createElement('th'), button = document.createElement('button');
    th.scope = 'col';
    if (kind !== 'text' && kind !== 'state') th.className = 'number';
    if (k === clients.by) th.setAttribute('aria-sort', clients.descending ? 'descending' : 'ascending');
    button.textContent = name;
    button.dataset.by = k;
    button.addEventListener('click', () => {
      clients.descending = clients.by === k && !clients.descending;
      clients.by = k;
      showClients();
    });
    th.append(button);
    return [th];
  }));
  if (focused !== undefined) $(`button[data-by="${focused}"]`, head)?.focus();
  $('tbody', table).replaceChildren(...shown.map(row => {
    const tr = document.createElement('tr');
    tr.append(...row.flatMap((value, k) => {
      if (!used[k]) return [];
      const kind = columns[k][1], cell = document.createElement(k ? 'td' : 'th');
      if (!k) cell.scope = 'row';
      if (kind !== 'text' && kind !== 'state') cell.className = 'number';
      if (value === null || value === '') cell.textContent = '–';
      else if (kind === 'state') {
        const chip = document.createElement('span');
        chip.className = `chip ${value}`;
        chip.textContent = value;
        cell.append(chip);
      } else cell.textContent = write[kind](value);
      return [cell];
    }));
    return tr;
  }));
  const all = clients.rows.length;
  document.getElementById('client-count').textContent =
    rows.length > most ? `the first ${most} of ${rows.length}` : `${rows.length} of ${all}`;
};

const showRows = ({columns, rows}) => {
  Object.assign(clients, {columns, rows});
  if (rows.length) showSection('clients');
  showClients();
  if (!library) requestAnimationFrame(() => setTimeout(startLibrary));  // after the next paint
};

// Parts that are stretches of HTML keep what the reader has opened, and how far it was scrolled.
const showHtml = part => {
  const place = $(`[data-part="${part.id}"]`);
  if (!place) return;
  const all = selector => [...place.querySelectorAll(selector)];
  const opened = all('details').map(each => each.open);
  const scrolled = all('.scroll').map(each => [each.scrollLeft, each.scrollTop]);
  const focused = all('a, summary, .scroll').indexOf(document.activeElement);
  place.innerHTML = part.html;
  all('details').forEach((each, k) => { each.open = opened[k] ?? false; });
  all('.scroll').forEach((each, k) => { if (scrolled[k]) [each.scrollLeft, each.scrollTop] = scrolled[k]; });
  if (focused >= 0) all('a, summary, .scroll')[focused]?.focus();
  if (part.id === 'diagram' && part.html) showSection('travel');
  if (part.id === 'runs') filterRuns();
};

const filterRuns = () => {
  const filter = document.getElementById('filter');
  if (!filter) return;
  const wanted = filter.value.trim().toLowerCase();
  for (const row of document.querySelectorAll('[data-part="runs"] tbody tr'))
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
};

const show = part => {
  if (part.kind === 'figure') showFigure(part);
  else if (part.kind === 'html') showHtml(part);
  else if (part.kind === 'text') $(`[data-part="${part.id}"]`).textContent = part.text;
  else if (part.kind === 'title') document.title = `${part.text} · Tepal`;
  else if (part.kind === 'clients') showRows(part);
};

document.getElementById('filter')?.addEventListener('input', filterRuns);
document.getElementById('client-filter')?.addEventListener('input', showClients);

// A hidden tab lets go of its connection: browsers have few for one server.
let source = null;
const connect = () => {
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource('events');
  source.onmessage = event => show(JSON.parse(event.data));
  source.onopen = () => document.getElementById('offline')?.toggleAttribute('hidden', true);
  source.onerror = () => document.getElementById('offline')?.toggleAttribute('hidden', false);
};
document.addEventListener('visibilitychange', connect);
connect();
