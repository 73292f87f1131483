// A model's text as elements. The reader (markdown-it, without HTML) gives tokens; only the tags listed here are made of them,
// with text inside. Nothing is loaded: an image is shown as its words, and a link waits for a click and says where it leads.

import MarkdownIt from "./markdown-it.js";
import { icon, make, refill } from "./dom.js";
import { keepTex, texOf } from "./tex.js";

const reader = new MarkdownIt({ html: false, linkify: true, breaks: true });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
keepTex(reader);

const TAGS = new Set([
  "p", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s",
]);
const HEADINGS = ["h1", "h2", "h3", "h4", "h5", "h6"];
const SCHEMES = ["http:", "https:", "mailto:"];
const FIRST_HEADING = 3; // an answer stands below a heading of the second rank
const COPIED_MS = 1500;

/** Show a text in an element. What the element already shows of it stays as it is, so that an answer can grow. */
export function showMarkdown(element, text) {
  const blocks = blocksOf(text), kept = element.blocks ?? [];
  let same = 0;
  while (same < kept.length && same < blocks.length && kept[same].source === blocks[same].source) same += 1;
  // Code that grows is the same element all the time: what a reader has selected or scrolled to stays.
  const code = kept[same]?.node.firstChild, growing = codeIn(blocks[same]);
  if (code?.growCode && growing && code.language === growing.language) {
    code.growCode(growing.text);
    kept[same].source = blocks[same].source;
    same += 1;
  }
  for (const { node } of kept.splice(same)) node.remove();
  for (const { source, tokens } of blocks.slice(same)) {
    const node = nodesOf(tokens);
    kept.push({ source, node });
    element.append(node);
  }
  element.blocks = kept;
}

/** Return a text's outermost blocks: {source: what it was made of, tokens}. */
function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  let level = FIRST_HEADING - 1, open = 0;
  for (const token of reader.parse(text, {})) {
    if (open === 0) {
      const [from, to] = token.map ?? [0, 0];
      // The rank that readers hear goes down one at a time, whatever the model wrote.
      if (HEADINGS.includes(token.tag)) {
        level = Math.max(FIRST_HEADING, Math.min(level + 1, 6, FIRST_HEADING - 1 + Number(token.tag[1])));
      }
      blocks.push({ source: `${token.type} ${level} ${lines.slice(from, to).join("\n")}`, tokens: [] });
    }
    const block = blocks.at(-1);
    if (HEADINGS.includes(token.tag)) token.meta = { level };
    block.tokens.push(token);
    open += token.nesting;
  }
  return blocks;
}

/** Return the {text, language} of a block that is code and nothing else, null of another. */
function codeIn(block) {
  const [token, ...more] = block?.tokens ?? [];
  return token && !more.length && ["fence", "code_block"].includes(token.type) ? codeOfToken(token) : null;
}

const codeOfToken = (token) => ({ text: token.content, language: token.info.trim().split(/\s+/)[0] });

function nodesOf(tokens) {
  const root = make("div", { class: "block" });
  let at = root;
  const opened = [];
  for (const token of tokens) {
    if (token.nesting > 0) {
      opened.push(at);
      at = opening(token, at);
    } else if (token.nesting < 0) {
      at = opened.pop() ?? root;
    } else {
      at.append(leafOf(token));
    }
  }
  return root;
}

/** Return what the children of an opening token go into. */
function opening(token, parent) {
  if (token.hidden) return parent; // a paragraph of a tight list
  const element = elementOf(token);
  if (element === null) return parent;
  if (token.tag === "table") {
    parent.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, element));
  } else {
    parent.append(element);
  }
  return element;
}

function elementOf(token) {
  if (token.type === "link_open") return linkOf(token.attrGet("href"));
  if (HEADINGS.includes(token.tag)) return make(`h${token.meta?.level ?? 6}`, { class: `rank-${token.tag[1]}` });
  if (!TAGS.has(token.tag)) return null;
  const element = make(token.tag);
  if (token.tag === "ol" && token.attrGet("start") !== null) element.start = Number(token.attrGet("start"));
  const side = /text-align:(right|center)/.exec(token.attrGet("style") ?? "");
  if (side) element.className = `to-${side[1]}`;
  return element;
}

function leafOf(token) {
  switch (token.type) {
    case "inline": return inlineOf(token.children);
    case "text": return document.createTextNode(token.content);
    case "softbreak":
    case "hardbreak": return make("br");
    case "code_inline": return make("code", {}, token.content);
    case "fence":
    case "code_block": {
      const { text, language } = codeOfToken(token);
      return codeOf(text, language);
    }
    case "hr": return make("hr");
    case "tex": return texOf(token);
    case "image": return imageOf(token);
    default: return document.createTextNode(token.content);
  }
}

function inlineOf(tokens) {
  const found = document.createDocumentFragment(), node = nodesOf(tokens);
  found.append(...node.childNodes);
  // A link whose words are not its address says where it leads.
  for (const link of found.querySelectorAll("a")) {
    const place = placeOf(link.href);
    if (place && !link.textContent.includes(place)) link.append(make("span", { class: "leads-to" }, ` (${place})`));
  }
  return found;
}

function placeOf(href) {
  const url = new URL(href);
  return url.host || url.pathname;
}

/** Return a link, null where it leads to something else than a page or a mailbox elsewhere. */
function linkOf(href) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return null;
  }
  if (!SCHEMES.includes(url.protocol)) return null;
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href });
}

function imageOf(token) {
  const words = `[image: ${token.content || "no description"}]`, link = linkOf(token.attrGet("src"));
  if (link === null) return document.createTextNode(words);
  link.append(words);
  return link;
}

/** Return code with its language and a button that copies it. Its growCode(text) shows a text that has become longer. */
export function codeOf(text, language = "") {
  const code = make("code");
  const element = make(
    "div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, language || "text"), copyButton(() => code.textContent, "Copy code", true)),
    make("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code),
  );
  element.language = language;
  element.growCode = (longer) => {
    const whole = longer.replace(/\n$/, ""), shown = code.textContent, words = code.firstChild;
    if (code.childNodes.length !== 1 || !(words instanceof Text)) {
      code.textContent = whole; // nothing yet, or marks of differing words
      return;
    }
    let same = 0; // letters that stay the same node, and so selected
    while (same < shown.length && shown[same] === whole[same]) same += 1;
    words.replaceData(same, shown.length - same, whole.slice(same));
  };
  element.growCode(text);
  return element;
}

/** Return a button that copies what text() returns, and says so. */
export function copyButton(text, label, isWorded = false) {
  const words = isWorded ? make("span", {}, "Copy") : null;
  const button = make("button", { type: "button", class: "quiet-button", "aria-label": label, title: label }, icon("copy"), words);
  button.addEventListener("click", async () => {
    const isDone = await copied(text());
    refill(button, icon(isDone ? "done" : "close"), ...(words ? [make("span", {}, isDone ? "Copied" : "Not copied")] : []));
    button.setAttribute("aria-label", isDone ? "Copied" : "The browser did not allow it");
    setTimeout(() => {
      refill(button, icon("copy"), ...(words ? [words] : []));
      button.setAttribute("aria-label", label);
    }, COPIED_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers give the clipboard to this machine's pages and to https; elsewhere a selection can still be copied.
  }
  const held = make("textarea", { class: "unseen", "aria-hidden": "true" }), focused = document.activeElement;
  held.value = text;
  document.body.append(held);
  held.select();
  const isDone = document.execCommand("copy");
  held.remove();
  focused?.focus({ preventScroll: true });
  return isDone;
}
