// Asks the service for its state once a second and shows it. The key stays in this variable: never stored, never in an address.

import { byId, el, fill, number, seconds } from './dom.js';
import { Decisions, showBreakers, showDeciders, showMoves } from './decisions.js';
import { Groups } from './groups.js';
import { Requests, legend } from './requests.js';
import { Rollout } from './rollout.js';

const PERIOD_MS = 1000;
const PERIOD_FAILED_MS = 3000;
const ANSWER_MS = 5000;
const ORDER_MS = 65000;
const TOLD_MS = 8000;

let key = '';
let isPaused = false;
let lastAt = null;
let timer = 0;
let toldTimer = 0;
let knowsRollout = true;

const groups = new Groups(byId('group-cards'), order);
const requests = new Requests(byId('request-rows'));
const decisions = new Decisions(byId('decision-rows'));
const rollout = new Rollout(byId('rollout-body'), order);

async function ask(path, options = {}, withinMs = ANSWER_MS) {
  const headers = { accept: 'application/json', ...(options.body ? { 'content-type': 'application/json' } : {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, cache: 'no-store', credentials: 'omit', redirect: 'error', signal: AbortSignal.timeout(withinMs) });
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const failure = new Error(said.error?.message ?? `HTTP ${answer.status}`);
    failure.status = answer.status;
    throw failure;
  }
  return said;
}

async function askForRollout() {
  if (!knowsRollout) return null;
  try {
    return await ask('/admin/rollout');
  } catch (failure) {
    if (failure.status === 404) knowsRollout = false;
    return null;
  }
}

async function refresh() {
  clearTimeout(timer);
  if (isPaused || document.hidden) return;
  let wait = PERIOD_MS;
  try {
    const [state, last, stage] = await Promise.all([ask('/admin/state'), ask('/admin/requests'), askForRollout()]);
    show(state, last.requests, stage);
    trouble('');
    lastAt = Date.now();
  } catch (failure) {
    wait = PERIOD_FAILED_MS;
    byId('service-state').textContent = 'not reachable';
    byId('service-state').className = 'pill bad';
    if (failure.status === 401) trouble(key ? 'This API key is not known here.' : 'This service has API keys: give one above to see its inside.');
    else if (failure.status === 403 || failure.status === 404) trouble(failure.message);
    else trouble(`No answer from the service: ${failure.message}`);
  }
  age();
  clearTimeout(timer);
  timer = setTimeout(refresh, wait);
}

function show(state, last, stage) {
  const service = state.service ?? {};
  byId('service-model').textContent = service.model ?? '';
  document.title = `Ballast: ${service.model ?? ''}`;
  const serving = (state.groups ?? []).filter((group) => group.state === 'serving').length;
  const kind = service.is_draining ? 'warn' : serving === 0 ? 'bad' : serving < state.groups.length ? 'warn' : 'good';
  byId('service-state').textContent = service.is_draining ? 'draining' : `${serving} of ${state.groups.length} groups serve`;
  byId('service-state').className = `pill ${kind}`;
  fill(byId('service-facts'), [
    ['In flight', number(service.in_flight)], ['Held', number(service.held)], ['Up', seconds(service.uptime_s)],
    ['Retries', number(state.counters?.retries)], ['Attempts lost', number(state.counters?.attempts_lost)], ['Version', service.version ?? ''],
  ].map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
  byId('emulation').hidden = !state.groups.some((group) => group.is_emulation);
  groups.show(state.groups);
  requests.show(last ?? []);
  showDeciders(byId('deciders'), state.deciders);
  decisions.show(state.decisions ?? []);
  showBreakers(byId('breaker-rows'), state);
  showMoves(byId('move-rows'), state);
  rollout.show(stage);
}

async function order(path, body, question) {
  if (question !== null && !(await confirmed(question))) return;
  try {
    const said = await ask(path, { method: 'POST', body: JSON.stringify(body) }, ORDER_MS);
    tell(said.group ? `${said.group}: ${said.state ?? 'the new split is in force'}` : 'Done.', false);
  } catch (failure) {
    tell(failure.status === 401 ? 'An API key is needed for orders.' : failure.message, true);
  }
  refresh();
}

function confirmed(question) {
  const dialog = byId('confirm');
  byId('confirm-text').textContent = question;
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise((settle) => dialog.addEventListener('close', () => settle(dialog.returnValue === 'yes'), { once: true }));
}

function tell(text, isBad) {
  const node = byId('told');
  node.textContent = text;
  node.className = `banner told ${isBad ? 'bad' : 'good'}`;
  node.hidden = false;
  clearTimeout(toldTimer);
  toldTimer = setTimeout(() => { node.hidden = true; }, TOLD_MS);
}

function trouble(text) {
  byId('trouble').textContent = text;
  byId('trouble').hidden = text === '';
}

function age() {
  byId('updated').textContent = lastAt === null ? '' : `as of ${new Date(lastAt).toLocaleTimeString('en-GB')}${isPaused ? ', paused' : ''}`;
}

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  key = byId('key').value.trim();
  byId('key').value = '';
  byId('key').placeholder = key ? 'a key is in use' : 'kept in memory only';
  knowsRollout = true;
  refresh();
});
byId('pause').addEventListener('click', () => {
  isPaused = !isPaused;
  byId('pause').setAttribute('aria-pressed', String(isPaused));
  byId('pause').textContent = isPaused ? 'Go on' : 'Pause';
  age();
  refresh();
});
byId('theme').addEventListener('click', () => {
  const isDark = document.documentElement.dataset.theme === 'dark'
    || (!document.documentElement.dataset.theme && matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.dataset.theme = isDark ? 'light' : 'dark';
});
document.addEventListener('visibilitychange', refresh);
legend(byId('request-legend'));
refresh();
