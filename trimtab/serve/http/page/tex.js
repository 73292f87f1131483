// TeX in a model's text is shown as it was written: between $...$, $$...$$, \(...\) and \[...\] no letter is read as Markdown.

import { make } from "./dom.js";

const ENDS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const MOST_LETTERS = 4000, MOST_LINES = 200; // of one formula: what is longer is read as Markdown

/** Teach a markdown-it to leave TeX alone: tokens of the type "tex" with {content: TeX and its delimiters, block}. */
export function keepTex(reader) {
  reader.inline.ruler.before("escape", "tex", inlineRule);
  reader.block.ruler.before("fence", "tex", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

export const texOf = ({ content, block }) => make(block ? "p" : "span", { class: "tex" }, content);

function inlineRule(state, isSilent) {
  const { src, pos } = state, two = src.slice(pos, pos + 2), opening = Object.hasOwn(ENDS, two) ? two : two[0] === "$" ? "$" : null;
  if (opening === null || src[pos - 1] === "$") return false;
  const from = pos + opening.length, end = opening === "$" ? dollarAfter(state, from) : endAfter(state, opening, from);
  if (end < 0 || end - from > MOST_LETTERS || !src.slice(from, end).trim()) return false;
  state.pos = end + ENDS[opening].length;
  if (!isSilent) state.push("tex", "", 0).content = src.slice(pos, state.pos);
  return true;
}

/** Return where the next end of a formula is, -1 if there is none. Each text is searched once, however many beginnings it has. */
function endAfter(state, opening, from) {
  const key = `tex ${opening}`, known = state.env[key];
  if (known?.src === state.src && known.from <= from && (known.end < 0 || from <= known.end)) return known.end;
  const end = state.src.indexOf(ENDS[opening], from);
  state.env[key] = { src: state.src, from, end };
  return end;
}

// A dollar is also money and a shell's variable. One that begins a formula is followed by no space and preceded by no word; one that ends
// it is preceded by no space, and followed by no digit or brace, and by a letter only behind a word: $n$th, but not $A:$B.
function dollarAfter(state, from) {
  const { src } = state;
  if (/[\s$]/.test(src[from] ?? " ") || /[\p{L}\p{N}]/u.test(src[from - 2] ?? " ")) return -1;
  const known = state.env["tex $"];
  if (known?.src === src && known.from <= from && from < known.to) return known.end;
  let to = from;
  while (to < src.length && src[to] !== "$" && src[to] !== "`") to += src[to] === "\\" ? 2 : 1;
  const end = src[to] === "$" && isEnd(src, to) ? to : -1;
  state.env["tex $"] = { src, from, to, end };
  return end;
}

function isEnd(src, at) {
  const before = src[at - 1], after = src[at + 1] ?? " ";
  return !/\s/.test(before) && !/[\d{$]/.test(after) && (!/\p{L}/u.test(after) || /[\p{L}\p{N})}\]]/u.test(before));
}

/** A formula that has its lines for itself: one that begins with a sign is no list. */
function blockRule(state, startLine, endLine, isSilent) {
  const from = state.bMarks[startLine] + state.tShift[startLine], opening = state.src.slice(from, from + 2);
  if ((opening !== "$$" && opening !== "\\[") || state.sCount[startLine] - state.blkIndent >= 4) return false;
  for (let line = startLine; line < Math.min(endLine, startLine + MOST_LINES); line += 1) {
    if (line > startLine && state.sCount[line] < state.blkIndent && !state.isEmpty(line)) return false; // outside the list that it is in
    const text = state.src.slice(line === startLine ? from + 2 : state.bMarks[line], state.eMarks[line]), end = text.indexOf(ENDS[opening]);
    if (end < 0) continue;
    const tex = state.getLines(startLine, line + 1, state.blkIndent, false).trim();
    if (text.slice(end + 2).trim() || tex.length > MOST_LETTERS || !tex.slice(2, -2).trim()) return false;
    if (isSilent) return true;
    const token = state.push("tex", "", 0);
    token.content = tex;
    token.map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}
