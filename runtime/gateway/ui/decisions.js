// Decisions with the scores of their candidates, who decided and why; breakers; moves.

import { cells, clock, el, fill, number, pill, seconds, table } from './dom.js';

const BREAKER = { closed: 'good', open: 'bad', half_open: 'warn', forced_open: 'bad' };

export class Decisions {
  constructor(place) {
    this.place = place;
    this.open = new Set();
    this.shown = '';
  }

  show(decisions) {
    const now = JSON.stringify(decisions.map((decision) => decision.at_s));
    if (now === this.shown) return;
    this.shown = now;
    if (decisions.length === 0) {
      fill(this.place, el('p', { class: 'empty' }, 'Nothing has been decided yet.'));
      return;
    }
    const keys = new Set(decisions.map((decision) => `${decision.at_s}`));
    for (const key of this.open) if (!keys.has(key)) this.open.delete(key);
    fill(this.place, decisions.slice(0, 20).map((decision) => this.#row(decision)));
  }

  #row(decision) {
    const key = `${decision.at_s}`;
    const chosen = (decision.candidates ?? [])[decision.chosen];
    const request = decision.request;
    const row = el('details', { class: 'decision', open: this.open.has(key) },
      el('summary', {},
        el('span', { class: 'mono' }, clock(decision.at_s)),
        el('span', {}, decision.decision),
        el('strong', {}, chosen ? nameOf(chosen) : '–'),
        pill(decision.source, decision.source === 'policy' ? 'good' : decision.source === 'refused' ? 'bad' : ''),
        decision.cause && el('span', { class: 'cause' }, decision.cause),
        request && el('span', {}, `${request.service_class}, ${number(request.prompt_tokens)} tokens${request.attempts ? `, try ${request.attempts + 1}` : ''}`),
        el('span', { class: 'grow' }),
        el('span', {}, seconds(decision.took_s))),
      el('div', { class: 'scroll' }, decision.decision === 'route' ? routes(decision) : others(decision)));
    row.addEventListener('toggle', () => (row.open ? this.open.add(key) : this.open.delete(key)));
    return row;
  }
}

const nameOf = (candidate) => (candidate.kind === 'route' ? candidate.group : '') || [candidate.kind, candidate.group, candidate.target, candidate.detail].filter(Boolean).join(' ');

function marked(row, isChosen, isAllowed) {
  if (isChosen) row.classList.add('chosen');
  if (!isAllowed) row.classList.add('barred');
  return row;
}

function routes(decision) {
  const rows = decision.candidates.map((candidate, place) => marked(cells(
    place === decision.chosen ? `▸ ${nameOf(candidate)}` : nameOf(candidate), candidate.is_allowed ? 'yes' : 'no',
    number(candidate.score, 3), seconds(candidate.ttft_s), seconds(candidate.tpot_s), seconds(candidate.completion_s), number(candidate.own_utility, 3),
    number(candidate.resident_harm, 3), number(candidate.net_utility, 3)), place === decision.chosen, candidate.is_allowed));
  return table('Candidates', ['Candidate', 'Allowed', 'Policy’s score', 'TTFT', 'TPOT', 'Completion', 'Own utility', 'Harm to others', 'Net'], rows);
}

function others(decision) {
  const rows = decision.candidates.map((candidate, place) => marked(cells(
    place === decision.chosen ? `▸ ${nameOf(candidate)}` : nameOf(candidate), candidate.is_allowed ? 'yes' : candidate.why_not || 'no',
    number(candidate.score, 3), number(candidate.log_speed_up, 3), seconds(candidate.price_s), number(candidate.affected_calls)), place === decision.chosen, candidate.is_allowed));
  return table('Candidates', ['Candidate', 'Allowed', 'Policy’s score', 'Log speed-up', 'Price', 'Calls affected'], rows);
}

export function showDeciders(place, deciders) {
  fill(place, Object.entries(deciders ?? {}).map(([name, decider]) => el('p', {},
    el('strong', {}, `${name}: `),
    decider.policy ? `policy ${decider.policy} (${decider.policy_state ?? 'not started'}), else ${decider.heuristic}` : `${decider.heuristic} (no policy)`,
    decider.breaker && decider.breaker.state !== 'closed' ? ` · breaker ${decider.breaker.state}: ${decider.breaker.reason}` : '',
    decider.policy_detail ? ` · ${decider.policy_detail}` : '',
    el('span', { class: 'counts' }, (decider.counts ?? []).map((row) => el('span', {},
      `${row.source}${row.cause ? ` (${row.cause})` : ''} ${number(row.count)}`))))));
}

export function showBreakers(place, state) {
  const rows = [
    ...(state.groups ?? []).map((group) => ['group', group.name, group.breaker]),
    ...(state.class_breakers ?? []).map((row) => ['class', row.service_class, row]),
    ...Object.entries(state.deciders ?? {}).filter(([, decider]) => decider.breaker).map(([name, decider]) => ['policy', name, decider.breaker]),
    ...(state.smaller_model ? [['smaller model', state.smaller_model.model, state.smaller_model.breaker]] : []),
  ].filter(([, , breaker]) => breaker);
  fill(place, table('Circuit breakers', ['Of', 'Name', 'State', 'Reason', 'Next probe'], rows.map(([of, name, breaker]) => cells(
    of, name, el('td', {}, pill(breaker.state.replace('_', ' '), BREAKER[breaker.state] ?? 'warn')), breaker.reason || '',
    breaker.next_probe_s !== null && breaker.next_probe_s !== undefined ? `in ${seconds(breaker.next_probe_s)}`
      : breaker.pause_left_s > 0 ? `busy for ${seconds(breaker.pause_left_s)}` : ''))));
}

export function showMoves(place, state) {
  const moves = [...(state.moves_under_way ?? []), ...(state.moves ?? [])].slice(0, 24);
  if (moves.length === 0) {
    fill(place, el('p', { class: 'empty' }, 'Nothing has been moved yet.'));
    return;
  }
  fill(place, table('Moves', ['When', 'Move', 'By', 'Why', 'Price', 'Took', 'Paused', 'Calls', 'Outcome'], moves.map((move) => cells(
    clock(move.at_s), [move.kind, move.group, move.target && `→ ${move.target}`, move.detail].filter(Boolean).join(' '), move.source, move.reason,
    seconds(move.price_s), seconds(move.took_s), seconds(move.paused_s), number(move.calls),
    el('td', {}, pill(move.outcome ?? 'under way', move.outcome === 'done' ? 'good' : move.outcome ? 'bad' : 'warn'), move.error ? ` ${move.error}` : '')))));
}
