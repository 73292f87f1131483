// Formulas of a model's text. Two rules of the reader find them: $...$, $$...$$, \(...\) and \[...\]. Temml, which is fetched from this
// server when the first one is shown, turns TeX into a tree; only the MathML elements, attributes and styles listed here are made of it.

import { make } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set([
  "math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts", "mroot", "mrow", "ms",
  "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "none",
]);
const ATTRIBUTES = new Set([
  "accent", "accentunder", "columnalign", "columnspacing", "depth", "display", "displaystyle", "fence", "form", "height", "largeop",
  "linethickness", "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "movablelimits", "notation",
  "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width",
]);
const STYLES = new Set([
  "border", "borderBottom", "borderLeft", "borderRight", "borderTop", "color", "display", "fontStyle", "fontWeight", "mathDepth", "math-depth",
  "padding", "paddingBottom", "paddingLeft", "paddingRight", "paddingTop", "textAlign", "width",
]);
const CLASS = /^(tml-[a-z-]+|menclose|upstrike|downstrike|sout)$/;
// What a formula may not hold: definitions, which can make much out of little, and what only a trusted text may do.
const REFUSED = new RegExp(`\\\\(?:${[
  "[gex]?def", "(?:re|provide)?(?:new)?command", "(?:future)?let", "global", "long", "DeclareMathOperator",
  "href", "url", "includegraphics", "html[A-Z][A-Za-z]*", "class", "id", "cssId", "style", "data", "ref", "eqref",
].join("|")})(?![A-Za-z])`);
const NUMBERED = /\\(begin|end)\{(align|alignat|equation|gather|multline|CD)\}/g; // equations of a chat have no numbers
const MOST_LETTERS = 4000; // of one formula: a longer one stays text
const MOST_LINES = 200; // of a formula that stands alone
const MOST_EXPANSIONS = 1000, MOST_NODES = 20_000, MOST_DEPTH = 200;
const MOST_CELLS = 50_000; // Temml fills a table's rows to the same length
const MOST_EM = 20; // of a space or a rule
// Of one text: what comes later stays text. Each formula is kept, so that the next token of its answer makes only what is new.
const MOST_FORMULAS = 1000, MOST_LETTERS_OF_ALL = 60_000;

// Finding --------------------------------------------------------------------------------------------------------------

/** Teach a markdown-it to find formulas: tokens of the type "formula" with {content: TeX, markup: delimiters, block}. */
export function findFormulas(reader) {
  reader.inline.ruler.before("escape", "formula", inlineRule);
  reader.block.ruler.before("fence", "formula", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

const ENDS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };

function openingAt(text, at) {
  const two = text.slice(at, at + 2);
  return Object.hasOwn(ENDS, two) ? two : two[0] === "$" ? "$" : null;
}

function inlineRule(state, isSilent) {
  const { src, pos } = state, opening = openingAt(src, pos);
  if (opening === null || src[pos - 1] === "$") return false;
  const from = pos + opening.length, end = opening === "$" ? dollarAfter(state, from) : endAfter(state, opening, from);
  if (end < 0 || end - from > MOST_LETTERS || !src.slice(from, end).trim()) return false;
  if (isBeyond(state, end - from)) return false;
  if (!isSilent) push(state, src.slice(from, end), opening, false);
  state.pos = end + ENDS[opening].length;
  return true;
}

const soFar = ({ env }) => (env.formulas ??= { count: 0, letters: 0 });

function isBeyond(state, letters) {
  const { count, letters: before } = soFar(state);
  return count >= MOST_FORMULAS || before + letters > MOST_LETTERS_OF_ALL;
}

function push(state, tex, opening, isBlock) {
  const all = soFar(state);
  all.count += 1;
  all.letters += tex.length;
  const token = state.push("formula", "", 0);
  token.content = tex.trim();
  token.markup = opening;
  token.block = isBlock;
  return token;
}

/** Return where the next end of a formula is, -1 if there is none. Each text is searched once, however many beginnings it has. */
function endAfter(state, opening, from) {
  const key = `formula ${opening}`, known = state.env[key];
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
  const known = state.env.formulaDollar;
  if (known?.src === src && known.from <= from && from < known.to) return known.end;
  let to = from;
  while (to < src.length && src[to] !== "$" && src[to] !== "`") to += src[to] === "\\" ? 2 : 1;
  const end = src[to] === "$" && isEnd(src, to) ? to : -1;
  state.env.formulaDollar = { src, from, to, end };
  return end;
}

function isEnd(src, at) {
  const before = src[at - 1], after = src[at + 1] ?? " ";
  return !/\s/.test(before) && !/[\d{$]/.test(after) && (!/\p{L}/u.test(after) || /[\p{L}\p{N})}\]]/u.test(before));
}

/** A formula that has its lines for itself. */
function blockRule(state, startLine, endLine, isSilent) {
  const from = state.bMarks[startLine] + state.tShift[startLine];
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const opening = state.src.slice(from, from + 2);
  if (opening !== "$$" && opening !== "\\[") return false;
  const ending = ENDS[opening], lines = [];
  for (let line = startLine; line < Math.min(endLine, startLine + MOST_LINES); line += 1) {
    if (line > startLine && state.sCount[line] < state.blkIndent && !state.isEmpty(line)) return false; // outside the list that it is in
    const start = line === startLine ? from + 2 : Math.min(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
    const text = state.src.slice(start, state.eMarks[line]), end = text.indexOf(ending);
    if (end < 0) {
      lines.push(text);
      continue;
    }
    lines.push(text.slice(0, end));
    const tex = lines.join("\n");
    if (text.slice(end + 2).trim() || !tex.trim() || tex.length > MOST_LETTERS || isBeyond(state, tex.length)) return false;
    if (isSilent) return true;
    push(state, tex, opening, true).map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}

// Showing --------------------------------------------------------------------------------------------------------------

let temml = null, loading = null;
const waiting = []; // [element, token] until Temml is here
const kept = new Map(); // delimiters and TeX -> what was made of it

/** Return a formula as an element: its TeX, until Temml is here or where it is none. */
export function formulaOf(token) {
  const { content, markup } = token, isDisplay = markup === "$$" || markup === "\\[";
  const source = `${markup}${content}${ENDS[markup]}`;
  const more = isDisplay ? { tabindex: 0, role: "region", "aria-label": "Formula" } : {};
  const element = make(isDisplay && token.block ? "div" : "span", { class: isDisplay ? "formula is-display" : "formula", "data-tex": content, ...more }, source);
  if (temml) paint(element, content, isDisplay);
  else {
    waiting.push([element, content, isDisplay]);
    load();
  }
  return element;
}

async function load() {
  loading ??= import("./temml.js");
  try {
    temml = (await loading).default;
  } catch {
    loading = null; // the next formula tries again
    waiting.length = 0;
    return;
  }
  for (const [element, tex, isDisplay] of waiting.splice(0)) if (element.isConnected) paint(element, tex, isDisplay);
  document.dispatchEvent(new Event("formulas"));
}

function paint(element, tex, isDisplay) {
  const key = `${isDisplay} ${tex}`;
  if (!kept.has(key)) {
    if (kept.size >= MOST_FORMULAS) kept.delete(kept.keys().next().value);
    kept.set(key, mathOf(tex, isDisplay));
  }
  const math = kept.get(key);
  if (math === null) element.classList.add("is-text");
  else element.replaceChildren(math.cloneNode(true));
}

/** Return TeX as MathML, null where it is no formula or more than a page should make of one. */
function mathOf(tex, isDisplay) {
  const of = (pattern) => tex.match(pattern)?.length ?? 0;
  if (tex.length > MOST_LETTERS || REFUSED.test(tex) || of(/&/g) * of(/\\(?:\\|cr|newline)/g) > MOST_CELLS) return null;
  try {
    const tree = temml.__renderToMathMLTree(tex.replaceAll(NUMBERED, "\\$1{$2*}"), {
      displayMode: isDisplay, wrap: isDisplay ? "none" : "tex", throwOnError: true, trust: false, maxExpand: MOST_EXPANSIONS,
      maxSize: [MOST_EM, MOST_EM * 12], macros: {},
    });
    return built(tree, { left: MOST_NODES }, 0);
  } catch {
    return null; // not TeX, or braces within braces beyond the stack of a browser
  }
}

/** Return a node of Temml's tree as a node of the page. Errors: Error where it holds anything else than a formula does. */
function built(node, count, depth) {
  count.left -= 1;
  if (count.left < 0 || depth > MOST_DEPTH) throw new Error("larger than a formula is");
  if (typeof node.text === "string") return document.createTextNode(node.text);
  if (node.type === undefined && !node.href && !node.src && !node.attributes) return filled(document.createDocumentFragment(), node, count, depth);
  if (!ELEMENTS.has(node.type)) throw new Error(`no element of a formula: ${node.type}`);
  const element = document.createElementNS(MATHML, node.type);
  for (const [name, value] of Object.entries(node.attributes)) if (ATTRIBUTES.has(name)) element.setAttribute(name, String(value));
  for (const [name, value] of Object.entries(node.style)) {
    if (STYLES.has(name) && /^[\w\s.,%#()-]*$/.test(value) && !/url|var|image/i.test(value)) element.style[name] = value;
  }
  const classes = node.classes.flatMap((names) => names.split(" ")).filter((name) => CLASS.test(name));
  if (classes.length) element.setAttribute("class", classes.join(" "));
  return filled(element, node, count, depth);
}

function filled(parent, { children }, count, depth) {
  for (const child of children) parent.append(built(child, count, depth + 1));
  return parent;
}
