// Which words two answers do not share, marked in both.

import { make } from "./dom.js";

// A word, or one mark of punctuation: both are compared, and words alone are counted as words.
const WORD = /[\p{L}\p{N}_'’]+|[^\s\p{L}\p{N}]/gu;
// Beyond this the search takes too long for a page; two answers that differ so much need no marks.
const MOST_WORDS = 6000, MOST_CHANGES = 1200;

/** Mark what two elements' texts do not share. Returns of each {words, pieces}: how many words differ, and how many with punctuation;
 *  null if they are too long for that. */
export function markDifferences(first, second) {
  for (const element of [first, second]) unmark(element);
  const left = wordsIn(first), right = wordsIn(second);
  if (left.length + right.length > MOST_WORDS) return null;
  const kept = shared(left.map(({ word }) => word), right.map(({ word }) => word));
  if (kept === null) return null;
  const [inLeft, inRight] = [new Set(kept.map(([at]) => at)), new Set(kept.map(([, at]) => at))];
  return [mark(left.filter((_, at) => !inLeft.has(at))), mark(right.filter((_, at) => !inRight.has(at)))];
}

/** Return how many {words, pieces} each of two elements has. */
export function wordCounts(first, second) {
  return [first, second].map((element) => counted(wordsIn(element)));
}

function counted(pieces) {
  return { words: pieces.filter(({ word }) => /[\p{L}\p{N}]/u.test(word)).length, pieces: pieces.length };
}

export function unmark(element) {
  for (const one of [...element.querySelectorAll("mark.differs")]) {
    const parent = one.parentNode;
    one.replaceWith(...one.childNodes);
    parent.normalize();
  }
}

function wordsIn(element) {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest(".code-head")) continue;
    for (const { 0: word, index } of node.data.matchAll(WORD)) found.push({ node, word, from: index, to: index + word.length });
  }
  return found;
}

function mark(words) {
  // From the end, so that what stands before a mark keeps its place; neighbours share one mark.
  const spans = [], counts = counted(words);
  for (const { node, from, to } of words) {
    const last = spans.at(-1);
    if (last && last.node === node && !node.data.slice(last.to, from).trim()) last.to = to;
    else spans.push({ node, from, to });
  }
  for (const { node, from, to } of spans.reverse()) {
    const held = node.splitText(from);
    held.splitText(to - from);
    const marked = make("mark", { class: "differs" });
    held.replaceWith(marked);
    marked.append(held);
  }
  return counts;
}

/** Return the places of a longest common subsequence, as [left, right]; null if more than MOST_CHANGES words differ.
 *  The greedy algorithm of Myers, "An O(ND) Difference Algorithm and Its Variations" (1986). */
export function shared(left, right) {
  const most = Math.min(left.length + right.length, MOST_CHANGES), middle = most + 1;
  const furthest = new Int32Array(2 * most + 3), steps = [];
  for (let changes = 0; changes <= most; changes += 1) {
    steps.push(furthest.slice(middle - changes - 1, middle + changes + 2));
    for (let line = -changes; line <= changes; line += 2) {
      const isDown = line === -changes || (line !== changes && furthest[middle + line - 1] < furthest[middle + line + 1]);
      let x = isDown ? furthest[middle + line + 1] : furthest[middle + line - 1] + 1;
      while (x < left.length && x - line < right.length && left[x] === right[x - line]) x += 1;
      furthest[middle + line] = x;
      if (x >= left.length && x - line >= right.length) return wayBack(steps, left.length, right.length);
    }
  }
  return null;
}

function wayBack(steps, width, height) {
  const kept = [];
  let x = width, y = height;
  for (let changes = steps.length - 1; changes >= 0; changes -= 1) {
    const furthest = (line) => steps[changes][line + changes + 1];
    const line = x - y;
    const isDown = line === -changes || (line !== changes && furthest(line - 1) < furthest(line + 1));
    const before = isDown ? line + 1 : line - 1;
    const fromX = changes === 0 ? 0 : furthest(before), fromY = changes === 0 ? 0 : fromX - before;
    const diagonal = changes === 0 ? 0 : isDown ? fromX : fromX + 1;
    while (x > diagonal && y > 0) {
      x -= 1;
      y -= 1;
      kept.push([x, y]);
    }
    x = fromX;
    y = fromY;
  }
  return kept.reverse();
}
