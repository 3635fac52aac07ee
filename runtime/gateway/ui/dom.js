// Making nodes. Whatever comes from the service goes in as text, never as markup.

export function el(tag, about = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'class') node.className = value;
    else if (name === 'on') for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === 'width') node.style.width = value;
    else if (name === 'tone') node.style.setProperty('--tone', value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

export const byId = (id) => document.getElementById(id);

export function table(label, heads, rows) {
  return el('table', { 'aria-label': label },
    el('thead', {}, el('tr', {}, heads.map((head) => el('th', { scope: 'col' }, head)))),
    el('tbody', {}, rows));
}

export function cells(...values) {
  return el('tr', {}, values.map((value) => (value instanceof Node && value.tagName === 'TD' ? value : el('td', {}, value))));
}

export function meter(label, share, text, kind = '') {
  const known = typeof share === 'number' && Number.isFinite(share);
  const percent = known ? Math.max(0, Math.min(1, share)) * 100 : 0;
  return el('div', { class: 'meter-row' },
    el('span', { class: 'meter-label' }, label),
    el('div', {
      class: `meter ${kind}`, role: 'meter', 'aria-label': label, 'aria-valuemin': 0, 'aria-valuemax': 100,
      'aria-valuenow': Math.round(percent), 'aria-valuetext': text,
    }, el('div', { class: 'meter-fill', width: `${percent}%` })),
    el('span', { class: 'meter-text' }, text));
}

export const pill = (text, kind) => el('span', { class: `pill ${kind}` }, text);

// --- numbers: null is "not known", and says so ---------------------------------------------------------------------------------

const known = (value) => typeof value === 'number' && Number.isFinite(value);

export function seconds(value) {
  if (!known(value)) return '–';
  const size = Math.abs(value);
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(value * 1e3).toFixed(size < 0.1 ? 1 : 0)} ms`;
  if (size < 120) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  if (size < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value, per = '') {
  if (!known(value)) return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let place = 0;
  let size = value;
  while (Math.abs(size) >= 1000 && place < units.length - 1) {
    size /= 1000;
    place += 1;
  }
  return `${size.toFixed(size < 10 && place ? 1 : 0)} ${units[place]}${per}`;
}

export const share = (value) => (known(value) ? `${(value * 100).toFixed(0)} %` : '–');
export const number = (value, digits = 0) => (known(value) ? value.toLocaleString('en', { maximumFractionDigits: digits, signDisplay: 'negative' }) : '–');
export const short = (value) => (known(value) ? value.toLocaleString('en', { notation: 'compact', maximumSignificantDigits: 3 }) : '–');
export const clock = (atS) => (known(atS) ? new Date(atS * 1000).toLocaleTimeString('en-GB') : '–');
