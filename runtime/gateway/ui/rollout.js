// The rollout: its stage, its gates, what comes next, its last log lines; and the order to roll back.

import { cells, el, fill, number, pill, table } from './dom.js';

export class Rollout {
  constructor(place, order) {
    this.place = place;
    this.body = el('div');
    this.back = el('button', { type: 'button', class: 'danger', on: { click: () => order(
      '/admin/rollout/rollback', { reason: 'ordered on the page' }, 'Roll back? The incumbent decides alone from now on.') } }, 'Roll back');
    this.back.hidden = true;
    fill(place, this.body, this.back);
  }

  show(rollout) {
    const stage = rollout?.stage ?? 'off';
    if (stage === 'off' && !rollout?.stages) {
      this.back.hidden = true;
      fill(this.body, el('p', { class: 'empty' }, `This service rolls out no policy. ${rollout?.next_step ?? ''}`));
      return;
    }
    this.back.hidden = !['shadow', 'canary', 'adopted'].includes(stage);
    const bad = stage === 'rolled_back';
    fill(this.body,
      el('p', { class: 'row' },
        pill((rollout.title || stage).replaceAll('_', ' '), stage === 'adopted' ? 'good' : bad ? 'bad' : stage === 'idle' ? '' : 'warn'),
        typeof rollout.share === 'number' && el('span', {}, `${number(rollout.share * 100)} % of the traffic`),
        rollout.is_automatic === false && el('span', {}, 'promoted by hand')),
      stages(rollout),
      el('dl', { class: 'facts small' },
        fact('Candidate', nameOf(rollout.candidate)), fact('Incumbent', nameOf(rollout.incumbent)), fact('Why', rollout.reason), fact('Next', rollout.next_step)),
      (rollout.gates ?? []).length > 0 && el('div', { class: 'scroll' }, table('Gates', ['Gate', 'Now', 'Wanted', 'Passed'], rollout.gates.map((gate) => cells(
        gate.name, typeof gate.value === 'number' ? number(gate.value, 4) : gate.value ?? 'not known yet', gate.wanted,
        el('td', {}, pill(gate.is_passed ? 'yes' : gate.is_harm ? 'no: harm' : 'not yet', gate.is_passed ? 'good' : gate.is_harm ? 'bad' : 'warn')))))),
      (rollout.audit ?? []).length > 0 && el('details', {}, el('summary', {}, 'Log'),
        el('ul', { class: 'log mono' }, rollout.audit.slice(0, 12).map((entry) => el('li', {}, JSON.stringify(entry))))));
  }
}

function stages(rollout) {
  const names = rollout.stages ?? [];
  const now = rollout.stage === 'canary' ? 1 + (rollout.step ?? 0) : rollout.stage === 'shadow' ? 0 : rollout.stage === 'adopted' ? names.length - 1 : -1;
  return names.length > 0 && el('ol', { class: 'stages', 'aria-label': 'Stages' }, names.map((name, place) => el('li', {
    class: place < now ? 'passed' : place === now ? 'now' : '', 'aria-current': place === now ? 'step' : null }, name)));
}

function nameOf(what) {
  if (what === null || what === undefined) return '';
  return typeof what === 'string' ? what : what.name ?? what.origin ?? what.folder ?? '';
}

function fact(name, value) {
  return value ? el('div', {}, el('dt', {}, name), el('dd', {}, value)) : null;
}
