// The waterfall: one bar a request, its parts in the order in which they are charged, all on one scale.

import { clock, el, fill, number, pill, seconds } from './dom.js';

export const PARTS = [
  ['gateway', 'gateway', 'Reading the request and making its tokens'],
  ['hold', 'held', 'Waiting for a group to take it'],
  ['lost', 'lost tries', 'Attempts that failed or were refused as busy'],
  ['queue', 'queue', 'Waiting in its group'],
  ['prefill', 'prefill', 'Computing the prompt'],
  ['decode', 'decode', 'Computing further tokens'],
  ['stall', 'memory stall', 'Waiting for memory'],
  ['communication', 'communication', 'Collectives between ranks'],
  ['host', 'host', 'Scheduling and sampling'],
  ['pause', 'pause', 'Re-split and migration'],
  ['redone', 'redone', 'Computed again'],
  ['first', 'to first token', 'Until the first token, where the server tells no more'],
  ['rest', 'further tokens', 'From the first token to the last, where the server tells no more'],
  ['return', 'return', 'From the last token to the answer’s end'],
];
const OF_ENGINE = { queue_s: 'queue', prefill_compute_s: 'prefill', decode_compute_s: 'decode', memory_stall_s: 'stall',
  communication_s: 'communication', host_s: 'host', pause_s: 'pause', redone_s: 'redone', return_s: 'return' };

export function partsOf(request) {
  const found = Object.fromEntries(PARTS.map(([key]) => [key, 0]));
  found.gateway = request.prompt_s ?? request.took_s;
  const answer = (request.answers ?? [])[0];
  for (const attempt of answer?.attempts ?? []) {
    found.hold += attempt.held_s ?? 0;
    const took = attempt.took_s ?? 0;
    if (attempt.outcome !== 'ok') {
      found.lost += took;
    } else if (attempt.parts) {
      for (const [name, key] of Object.entries(OF_ENGINE)) found[key] += attempt.parts[name] ?? 0;
    } else if (attempt.queue_s !== null && attempt.queue_s !== undefined) {
      found.queue += attempt.queue_s;
      found.prefill += attempt.prefill_s;
      found.decode += attempt.decode_s;
    } else {
      found.first += attempt.first_s ?? took;
      found.rest += attempt.first_s === null || attempt.first_s === undefined ? 0 : Math.max(0, took - attempt.first_s);
    }
  }
  const last = (answer?.attempts ?? []).at(-1);
  if (last !== undefined && last.began_s !== null && last.took_s !== null) {
    found.return += Math.max(0, request.took_s - last.began_s - last.took_s);
  }
  return found;
}

export function legend(place) {
  fill(place, PARTS.map(([key, name, said]) => el('li', { title: said }, el('span', { class: `swatch part-${key}` }), name)));
}

export class Requests {
  constructor(place) {
    this.place = place;
    this.shown = '';
  }

  show(requests) {
    const now = JSON.stringify(requests.map((request) => [request.request_id, request.at_s]));
    if (now === this.shown) return;
    this.shown = now;
    if (requests.length === 0) {
      fill(this.place, el('p', { class: 'empty' }, 'No request has ended yet.'));
      return;
    }
    const last = requests.slice(0, 24);
    const longest = Math.max(...last.map((request) => request.took_s), 1e-6);
    fill(this.place, el('ol', { class: 'waterfall' }, last.map((request) => rowOf(request, longest))));
  }
}

function rowOf(request, longest) {
  const parts = partsOf(request);
  const told = PARTS.filter(([key]) => parts[key] > 0);
  const said = told.map(([key, name]) => `${name} ${seconds(parts[key])}`).join(', ');
  const attempts = (request.answers ?? []).flatMap((answer) => answer.attempts);
  const where = attempts.length ? attempts.map((attempt) => `${attempt.group}${attempt.outcome === 'ok' ? '' : ` (${attempt.outcome})`}`) : ['nowhere'];
  return el('li', {},
    el('div', { class: 'request-head' },
      el('span', { class: 'mono' }, clock(request.at_s)),
      el('span', {}, `${request.kind}${request.stream ? ', stream' : ''}`),
      request.service_class && el('span', {}, request.service_class),
      el('span', {}, `${number(request.prompt_tokens)} → ${number(request.output_tokens)} tokens`),
      el('span', {}, [...new Set(where)].slice(0, 4).join(' → ')),
      request.error ? pill(`${request.status || ''} ${request.error}`.trim(), 'bad') : null,
      el('span', { class: 'grow' }),
      el('span', {}, `TTFT ${seconds(request.ttft_s)}`),
      el('strong', {}, seconds(request.took_s))),
    el('div', { class: 'water', role: 'img', 'aria-label': `${seconds(request.took_s)}: ${said}` },
      told.map(([key, name]) => el('span', {
        class: `water-part part-${key}`, width: `${(parts[key] / longest) * 100}%`, title: `${name}: ${seconds(parts[key])}`,
      }))));
}
