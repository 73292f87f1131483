// Branches of a chat: each choice of answer versions in a turn keeps the turns that followed it.

/** Return which versions of a turn are chosen: the name of the branch that is shown. */
const nameOf = ({ slots }) => slots.map(({ at }) => at).join();

/** Choose a version. following: the turns that follow now. Returns the turns that follow then. */
export function chooseVersion(turn, slot, at, following) {
  const later = { ...turn.later, [nameOf(turn)]: following };
  slot.at = at;
  const name = nameOf(turn), chosen = later[name] ?? [];
  delete later[name]; // those that are shown stand in the chat itself
  turn.later = later;
  return chosen;
}

/** Add a version and choose it. The turns that follow belong to it, and a copy of them to the version before; the copy has no
 *  branches of its own, or edit after edit would double what the chat holds. */
export function addVersion(turn, slot, version, following) {
  const copy = following.map(({ later, ...shown }) => structuredClone(shown));
  if (copy.length) turn.later = { ...turn.later, [nameOf(turn)]: copy };
  slot.versions.push(version);
  slot.at = slot.versions.length - 1;
}

/** Add a slot beside the first one: branches are chosen by its versions too. */
export function addSlot(turn, slot) {
  turn.slots.push(slot);
  turn.later = Object.fromEntries(Object.entries(turn.later ?? {}).map(([name, turns]) => [`${name},${slot.at}`, turns]));
}

/** Return whether a turn has branches that are not shown. */
export const hasBranches = ({ later }) => Object.values(later ?? {}).some((turns) => turns.length);

/** Return the turns of all branches, one after the other. */
export function allTurns(turns) {
  return turns.flatMap((turn) => [turn, ...Object.values(turn.later ?? {}).flatMap(allTurns)]);
}
