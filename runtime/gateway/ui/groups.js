// Cards of the groups: load, KV, plan, ranks, and the orders that can be given. A card stays, so that what is typed in it is not lost.

import { bytes, cells, el, fill, meter, number, pill, seconds, share, short, table } from './dom.js';

const GOOD = new Set(['serving']);
const BAD = new Set(['dead', 'ejected']);
const CORNERS = ['planner', 'even', 'compute', 'bandwidth', 'memory'];
const FOREIGN = 'Served by another engine (vLLM, SGLang or alike): only routing and requeue are possible. Its split, its ranks and its KV cannot be moved from here.';

const toneOf = (place) => `var(--rank-${place % 6})`;

export class Groups {
  constructor(place, order) {
    this.place = place;
    this.order = order; // (path, body, question) -> Promise
    this.cards = new Map();
  }

  show(groups) {
    const names = new Set(groups.map((group) => group.name));
    for (const [name, card] of this.cards) {
      if (!names.has(name)) {
        card.node.remove();
        this.cards.delete(name);
      }
    }
    for (const group of groups) {
      let card = this.cards.get(group.name);
      if (card === undefined) {
        card = new Card(group, this.order);
        this.cards.set(group.name, card);
        this.place.append(card.node);
      }
      card.show(group, groups);
    }
  }
}

class Card {
  constructor(group, order) {
    this.head = el('div', { class: 'card-head' });
    this.body = el('div', { class: 'card-body' });
    const path = `/admin/groups/${encodeURIComponent(group.name)}`;
    this.drain = el('button', { type: 'button', on: { click: () => this.#drain(order, path, group.name) } }, 'Drain');
    this.corner = el('select', { 'aria-label': `New split of ${group.name}` }, CORNERS.map((corner) => el('option', { value: corner }, corner)));
    this.resplit = el('button', {
      type: 'button',
      on: { click: () => order(`${path}/resplit`, { corner: this.corner.value }, `Give ${group.name} the split “${this.corner.value}”?`) },
    }, 'Re-split');
    this.target = el('select', { 'aria-label': `Group that the ranks of ${group.name} shall join` });
    this.join = el('button', {
      type: 'button',
      on: {
        click: () => order(`${path}/join`, { target: this.target.value },
          `Let the ranks of ${group.name} join ${this.target.value}? That group is emptied and started anew; they stay there until the service is started again.`),
      },
    }, 'Join');
    this.actions = el('div', { class: 'row actions' }, this.drain, this.corner, this.resplit, this.target, this.join);
    this.note = el('p', { class: 'note' });
    this.node = el('article', { class: 'card', 'aria-label': `Group ${group.name}` }, this.head, this.body, this.actions, this.note);
  }

  #drain(order, path, name) {
    if (this.isDrained) order(`${path}/undrain`, {}, null);
    else order(`${path}/drain`, {}, `Drain ${name}? It takes no new calls; those waiting in it go elsewhere, those running finish.`);
  }

  #offerTargets(group, groups) {
    const names = targetsOf(group, groups);
    this.target.hidden = this.join.hidden = names.length === 0;
    this.join.setAttribute('aria-label', `Join ${group.name} to another group`);
    if (String(names) === this.targets) return; // what is chosen stays so
    this.targets = String(names);
    fill(this.target, names.map((name) => el('option', { value: name }, name)));
  }

  show(group, groups) {
    const can = new Set(group.can ?? []);
    const kind = GOOD.has(group.state) ? 'good' : BAD.has(group.state) ? 'bad' : 'warn';
    fill(this.head,
      el('h3', {}, group.name),
      el('span', { class: 'kind mono' }, group.kind),
      group.is_emulation && pill('EMULATION', 'emulated'),
      pill(group.state, kind),
      !group.accepts && GOOD.has(group.state) && pill('accepts nothing now', 'warn'));
    const kv = group.kv ?? {};
    const detail = (group.detail ?? '').replace(/^EMULATION(; )?/, ''); // the label beside the name says that
    const load = group.running_limit ? group.running / group.running_limit : null;
    fill(this.body,
      detail && el('p', { class: 'detail' }, detail),
      meter('Running', load, `${number(group.running)} of ${number(group.running_limit)}`),
      meter('Waiting', group.queue_limit ? group.waiting / group.queue_limit : null, `${number(group.waiting)} of ${number(group.queue_limit)}`, 'wait'),
      meter('KV', kv.used_fraction, kv.tokens_total === null || kv.tokens_total === undefined
        ? share(kv.used_fraction) : `${short(kv.tokens_used)} of ${short(kv.tokens_total)} tokens`, 'kv'),
      meter('Compute', group.effective_compute_share, share(group.effective_compute_share), 'compute'),
      el('dl', { class: 'facts small' },
        fact('Step', seconds(group.step_s)), fact('Against forecast', `× ${number(group.step_ratio, 2)}`),
        fact('Memory read', bytes(group.memory_bytes_per_s, '/s')), fact('Attempts', number(group.attempts)),
        fact('Report', group.report_age_s === null ? 'none yet' : `${seconds(group.report_age_s)} old`),
        group.pause_left_s > 0 && fact('Pause left', seconds(group.pause_left_s)),
        group.move_debt_s > 0 && fact('Next move after', seconds(group.move_debt_s))),
      group.plan && planOf(group),
      group.plan && (group.ranks ?? []).length > 0 && ranksOf(group));
    this.isDrained = group.state === 'draining' || group.state === 'drained';
    this.drain.textContent = this.isDrained ? 'Undrain' : 'Drain';
    this.drain.setAttribute('aria-label', `${this.drain.textContent} ${group.name}`);
    this.resplit.setAttribute('aria-label', `Re-split ${group.name}`);
    const canSplit = can.has('set_split');
    this.drain.hidden = group.state === 'joined' || group.state === 'parked';
    this.#offerTargets(group, groups);
    this.corner.hidden = this.resplit.hidden = !canSplit;
    const isForeign = group.kind === 'openai_http';
    this.note.hidden = !isForeign;
    this.note.textContent = isForeign ? FOREIGN : '';
  }
}

function targetsOf(group, groups) {
  if (group.state !== 'parked' || !group.can.includes('regroup')) return [];
  return groups.filter((other) => other.state === 'serving' && other.kind === group.kind && other.can.includes('regroup')).map((other) => other.name);
}

function fact(name, value) {
  return el('div', {}, el('dt', {}, name), el('dd', {}, value));
}

function planOf(group) {
  const plan = group.plan;
  const rows = [['Heads', plan.query_heads], ['MLP', plan.mlp_columns], ['Vocabulary', plan.vocabulary_rows]];
  const title = `Split ${plan.corner ?? 'by shares'}, version ${number(plan.version)}${plan.is_moving ? ', moving' : ''}`;
  return el('figure', { class: 'plan' },
    el('figcaption', {}, title),
    rows.map(([name, widths]) => splitBar(name, widths ?? [])));
}

function splitBar(name, widths) {
  const total = widths.reduce((sum, width) => sum + width, 0) || 1;
  const said = widths.map((width, place) => `rank ${place}: ${number(width, 1)}`).join(', ');
  return el('div', { class: 'meter-row' },
    el('span', { class: 'meter-label' }, name),
    el('div', { class: 'stack', role: 'img', 'aria-label': `${name}: ${said}` },
      widths.map((width, place) => width > 0 && el('span', {
        class: 'stack-part', width: `${(width / total) * 100}%`, tone: toneOf(place), title: `rank ${place}: ${number(width, 1)}`,
      }, width / total > 0.12 ? number(width, 1) : ''))));
}

function ranksOf(group) {
  const rows = group.ranks.map((rank) => {
    const ratio = rank.time_ratio ?? {};
    const speed = rank.is_member ? `× ${number(rank.speed_factor, 2)}` : 'lost';
    return cells(
      el('td', {}, el('span', { class: 'dot', tone: toneOf(rank.rank) }), number(rank.rank)),
      `${rank.gpu}`,
      el('td', { title: `attention × ${number(ratio.attention, 2)}, MLP × ${number(ratio.mlp, 2)} of the declared time` }, speed),
      share(rank.busy_fraction), share(rank.compute_share), share(rank.memory_stall_share),
      bytes(group.kv?.tokens_used === null ? null : (group.kv?.tokens_used ?? 0) * rank.kv_bytes_per_token));
  });
  return el('div', { class: 'scroll' },
    table(`Ranks of ${group.name}`, ['Rank', 'Device', 'Speed', 'Busy', 'Compute', 'Stall', 'KV'], rows));
}
