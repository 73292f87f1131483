// Code in colors: which of its words are keywords, texts, comments. The readers of languages are CodeMirror's (folder `modes`),
// which go line by line. Each is fetched from this server when code in its language is first shown.

import { make } from "./dom.js";

// File in `modes`, what it exports, and the names that models give to the language.
const READERS = [
  ["python", "python", "python py py3 python3 pycon ipython"],
  ["javascript", "javascript", "javascript js jsx mjs cjs node"],
  ["javascript", "typescript", "typescript ts tsx"],
  ["javascript", "json", "json jsonc json5 jsonl ndjson"],
  ["clike", "c", "c h"],
  ["clike", "cpp", "cpp c++ cc cxx hpp cuda cu"],
  ["clike", "java", "java"],
  ["clike", "csharp", "csharp cs c#"],
  ["clike", "kotlin", "kotlin kt"],
  ["clike", "scala", "scala"],
  ["clike", "dart", "dart"],
  ["clike", "objectiveC", "objectivec objective-c objc"],
  ["shell", "shell", "shell bash sh zsh console shell-session"],
  ["powershell", "powerShell", "powershell ps1 pwsh"],
  ["css", "css", "css"],
  ["css", "sCSS", "scss"],
  ["css", "less", "less"],
  ["xml", "html", "html htm xhtml vue svelte"],
  ["xml", "xml", "xml svg"],
  ["sql", "standardSQL", "sql sqlite mysql"],
  ["sql", "pgSQL", "postgresql postgres pgsql"],
  ["go", "go", "go golang"],
  ["rust", "rust", "rust rs"],
  ["swift", "swift", "swift"],
  ["ruby", "ruby", "ruby rb"],
  ["lua", "lua", "lua"],
  ["r", "r", "r"],
  ["yaml", "yaml", "yaml yml"],
  ["toml", "toml", "toml"],
  ["properties", "properties", "ini properties conf cfg dotenv env"],
  ["diff", "diff", "diff patch"],
  ["dockerfile", "dockerFile", "dockerfile docker containerfile"],
];
const BY_NAME = new Map(READERS.flatMap(([file, name, words]) => words.split(" ").map((word) => [word, { file, name }])));

// What a reader calls a word -> the style of it. What is not here is plain, as is all that is next to each other without meaning.
const KINDS = {
  keyword: "keyword", controlKeyword: "keyword", operatorKeyword: "keyword", modifier: "keyword", qualifier: "keyword", self: "keyword",
  string: "string", "string-2": "string", attributeValue: "string", regexp: "string", character: "string", escape: "string",
  number: "number", atom: "number", bool: "number", null: "number", unit: "number", color: "number",
  comment: "comment", def: "name", builtin: "type", type: "type", typeName: "type", className: "type", namespace: "type",
  tag: "keyword", tagName: "keyword", attribute: "property", attributeName: "property", property: "property", propertyName: "property",
  meta: "meta", documentMeta: "meta", processingInstruction: "meta", macroName: "meta", labelName: "meta", header: "name", heading: "name",
  inserted: "inserted", deleted: "deleted", "variableName.definition": "name", "variableName.function": "name",
  "variableName.standard": "type", "variableName.constant": "number", "propertyName.definition": "name", "string.special": "string",
};
const MOST_LETTERS = 300_000; // of one piece of code: more is shown without colors
const LONGEST_LINE = 500, LONGEST_OF = { yaml: 120 }; // a longer line has no colors: a reader's time grows faster than a line
const SLICE_MS = 8; // at a time; between two slices the page answers its reader
const STUCK = 10; // calls of a reader that read nothing

const loaded = new Map(); // file -> its exports, null where it cannot be had

/** Fetch the reader of a language. Returns it, or null: an unknown language, or a server that does not answer. */
async function readerOf(language) {
  const known = BY_NAME.get(language.toLowerCase());
  if (!known) return null;
  const { file, name } = known;
  if (!loaded.has(file)) {
    try {
      loaded.set(file, await import(`./modes/${file}.js`));
    } catch {
      return null; // the next code in this language tries again
    }
  }
  return loaded.get(file)[name];
}

function readerNow(language) {
  const known = BY_NAME.get(language.toLowerCase());
  return known && loaded.has(known.file) ? loaded.get(known.file)[known.name] : null;
}

/** Code in an element, in colors once its language's reader is there. What is colored stays when the code grows. */
export class Painter {
  constructor(element, language) {
    this.element = element;
    this.language = language;
    this.tail = make("span"); // the line that is being written, and what is not read yet
    this.text = "";
    this.reader = readerNow(language);
    this.timer = null;
    this.longest = LONGEST_OF[BY_NAME.get(language.toLowerCase())?.file] ?? LONGEST_LINE;
    this.restart();
    if (!this.reader && BY_NAME.has(language.toLowerCase())) this.wait();
  }

  async wait() {
    this.reader = await readerOf(this.language);
    if (!this.reader) return;
    this.restart();
    this.show(this.text);
  }

  restart() {
    this.done = 0; // letters of whole lines that have their colors
    this.before = "";
    this.state = this.reader?.startState?.(2) ?? {};
    this.element.replaceChildren(this.tail);
  }

  /** Show a text that begins like the one before, or another one. */
  show(text) {
    if (!text.startsWith(this.before)) this.restart();
    this.text = text;
    clearTimeout(this.timer);
    if (!this.reader || text.length > MOST_LETTERS) {
      if (this.done) this.restart();
      this.tail.replaceChildren(text);
      return;
    }
    const end = performance.now() + SLICE_MS, whole = document.createDocumentFragment();
    let stop = text.indexOf("\n", this.done);
    while (stop >= 0 && performance.now() < end) {
      whole.append(...this.line(text.slice(this.done, stop), this.state), "\n");
      this.done = stop + 1;
      stop = text.indexOf("\n", this.done);
    }
    this.before = text.slice(0, this.done);
    this.tail.before(whole);
    const rest = text.slice(this.done);
    if (stop < 0) {
      this.tail.replaceChildren(...this.line(rest, copied(this.reader, this.state)));
    } else {
      this.tail.replaceChildren(rest);
      this.timer = setTimeout(() => this.element.isConnected && this.show(this.text), 0);
    }
  }

  /** Return a line's nodes; the state becomes that of the line's end. */
  line(text, state) {
    if (text.length > this.longest) return [text];
    try {
      return wordsOf(this.reader, text, state);
    } catch {
      return [text]; // a reader that cannot read this line: the code is whole, its colors are not
    }
  }
}

function wordsOf(reader, text, state) {
  if (!text) {
    reader.blankLine?.(state, 2);
    return [];
  }
  const nodes = [], stream = new Line(text);
  while (!stream.eol()) {
    let style = null;
    stream.start = stream.pos;
    for (let call = 0; stream.pos === stream.start; call += 1) {
      if (call === STUCK) throw new Error("the reader stands still");
      style = reader.token(stream, state);
    }
    const kind = kindOf(style), word = stream.current(), last = nodes.at(-1);
    if (last && last.kind === kind) last.word += word;
    else nodes.push({ kind, word });
  }
  return nodes.map(({ kind, word }) => (kind ? make("span", { class: `code-${kind}` }, word) : word));
}

function kindOf(style) {
  for (const one of (style ?? "").split(" ")) {
    const kind = KINDS[one] ?? KINDS[one.split(".")[0]];
    if (kind) return kind;
  }
  return null;
}

function copied(reader, state) {
  if (reader.copyState) return reader.copyState(state);
  return Object.fromEntries(Object.entries(state).map(([name, value]) => [name, Array.isArray(value) ? [...value] : value]));
}

/** A line as the readers of `modes` want it: the interface of CodeMirror's StringStream. */
class Line {
  constructor(string) {
    this.string = string;
    this.pos = this.start = 0;
    this.indentUnit = 2;
  }

  eol() { return this.pos >= this.string.length; }
  sol() { return this.pos === 0; }
  peek() { return this.string.charAt(this.pos) || undefined; }
  next() { return this.pos < this.string.length ? this.string.charAt(this.pos++) : undefined; }
  current() { return this.string.slice(this.start, this.pos); }
  skipToEnd() { this.pos = this.string.length; }
  backUp(count) { this.pos -= count; }
  column() { return this.widthOf(this.start); }
  indentation() { return this.widthOf(/^\s*/.exec(this.string)[0].length); }
  widthOf(end) { return [...this.string.slice(0, end)].reduce((sum, letter) => sum + (letter === "\t" ? 4 - (sum % 4) : 1), 0); }

  eat(match) {
    const letter = this.string.charAt(this.pos);
    if (!letter || !(typeof match === "string" ? letter === match : match instanceof RegExp ? match.test(letter) : match(letter))) return undefined;
    this.pos += 1;
    return letter;
  }

  eatWhile(match) {
    const from = this.pos;
    while (this.eat(match)) { /* on */ }
    return this.pos > from;
  }

  eatSpace() { return this.eatWhile(/[\s\u00a0]/); }

  skipTo(letter) {
    const at = this.string.indexOf(letter, this.pos);
    if (at < 0) return false;
    this.pos = at;
    return true;
  }

  match(pattern, isEaten = true, isAnyCase = false) {
    if (typeof pattern === "string") {
      const part = this.string.slice(this.pos, this.pos + pattern.length), as = (text) => (isAnyCase ? text.toLowerCase() : text);
      if (as(part) !== as(pattern)) return null;
      if (isEaten !== false) this.pos += pattern.length;
      return true;
    }
    const hit = this.string.slice(this.pos).match(pattern);
    if (hit && hit.index > 0) return null;
    if (hit && isEaten !== false) this.pos += hit[0].length;
    return hit;
  }
}
