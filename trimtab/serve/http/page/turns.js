// How a conversation looks: each message of the reader, and the answers to it, alone or side by side.

import { chanceView, hideTip } from "./chances.js";
import { markDifferences, unmark, wordCounts } from "./differ.js";
import { byId, counted, icon, make, refill, tell, tool } from "./dom.js";
import { codeOf, copyButton, showMarkdown } from "./markdown.js";
import { shown } from "./media.js";

const MOST_MARKED = 0.8; // of the words of two answers

/** Return a voice as readers call it: the adapter's name, or the model's. */
export function nameOf(voice) {
  const at = voice.indexOf(":");
  return at < 0 ? `${voice} (base)` : voice.slice(at + 1);
}

export const versionOf = (slot) => slot.versions[slot.at];

/** Return facts in which no line ends between a number and its unit. */
const unbroken = (facts) => facts.replaceAll(/(?<=\d) (?=ms\b|s\b|tok|\+)|(?<=\+) (?=\d)/g, "\u00a0");

/** Whether an answer has a beginning that a model can continue. A JSON answer is held to its form as a whole. */
function isCut({ how, text, isJson }) {
  return how !== null && how !== undefined && text.trim() !== "" && !isJson;
}

function continueButton(onclick, name) {
  return make(
    "button", { type: "button", class: "quiet-button worded", "aria-label": `Continue the answer of ${name}`, "data-idle": true, onclick },
    icon("on"), "Continue",
  );
}

/** Return a box with a text to change. take(text): called unless the box is empty. isOneLine: Enter takes the text, else Ctrl+Enter does. */
function editorOf({ name, text, hint = null, yes, isOneLine, mayBeEmpty = false, take, cancel }) {
  const box = make("textarea", { class: "edited", rows: 3, "aria-label": name });
  box.value = text;
  const form = make(
    "form", { class: "editor" }, box,
    hint === null ? null : make("p", { class: "hint" }, hint),
    make("div", { class: "row end" },
      make("button", { type: "button", onclick: cancel }, "Cancel"),
      make("button", { type: "submit", class: "main" }, yes)),
  );
  const send = () => (box.value.trim() || mayBeEmpty) && take(box.value.trim());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.isComposing && (isOneLine ? !event.shiftKey : event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
  });
  return form;
}

/** One turn. acts: {edit(turn, text), again(turn, slot), goOn(turn, slot), change(turn, slot, text) -> whether it could, remove(turn), compare(turn, voice),
 *  pick(turn, slot, at), voices()}: what its buttons do. */
export class TurnView {
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.question = make("div", { class: "asked" });
    this.pairs = make("div", { class: "pairs" });
    this.between = make("div", { class: "between" });
    this.element = make("section", { class: "turn", "aria-label": "Message and answer" }, this.question, this.between, this.pairs);
    this.answers = [];
    this.marks = true;
    this.showQuestion();
    this.showAnswers();
  }

  showQuestion() {
    const { text, media } = this.turn;
    refill(
      this.question,
      ...(media.length ? [make("div", { class: "media" }, ...media.map(shown))] : []),
      ...(text ? [make("p", { class: "bubble" }, text)] : []),
      make("div", { class: "tools" },
        tool("edit", "Edit this message", () => this.edit(), { "data-idle": true }),
        text ? copyButton(() => text, "Copy this message") : null,
        tool("delete", "Delete this message and its answer", () => this.acts.remove(this.turn), { "data-idle": true })),
    );
  }

  /** Put a box in the place of the message. */
  edit() {
    const form = editorOf({
      name: "Edited message", text: this.turn.text, yes: "Send", isOneLine: true, mayBeEmpty: this.turn.media.length > 0,
      hint: this.isLast ? null : "Sending it removes all later messages.",
      take: (text) => this.acts.edit(this.turn, text),
      cancel: () => {
        this.showQuestion();
        this.question.querySelector(".tools button")?.focus();
      },
    });
    refill(this.question, form);
    form.querySelector("textarea").focus();
  }

  showAnswers() {
    this.answers = this.turn.slots.map((slot) => new AnswerView(this, slot));
    this.element.classList.toggle("is-pair", this.answers.length > 1);
    refill(this.pairs, ...this.answers.map(({ element }) => element));
    this.showBetween();
  }

  /** What stands over two answers: how many words they do not share, once both are there. */
  showBetween() {
    const [first, second] = this.answers;
    this.between.replaceChildren();
    if (!second || first.version.isBusy || second.version.isBusy) return;
    for (const { body } of this.answers) unmark(body);
    if (this.answers.some(({ hasChances }) => hasChances)) return;
    const found = this.marks ? markDifferences(first.body, second.body) : null;
    const total = found && wordCounts(first.body, second.body);
    // Where hardly a word is shared, marks everywhere say nothing and only make both hard to read.
    const isOther = found !== null && found[0].pieces + found[1].pieces > MOST_MARKED * (total[0].pieces + total[1].pieces);
    if (isOther) for (const { body } of this.answers) unmark(body);
    const words = !this.marks ? "Differences not marked"
      : found === null ? "Too long to compare word by word"
        : isOther ? `Most words differ: ${found[0].words} of ${total[0].words} and ${found[1].words} of ${total[1].words}`
        : found[0].pieces + found[1].pieces === 0 ? "The answers are identical"
          : found[0].words + found[1].words === 0 ? "Only punctuation differs"
            : `Differing words: ${found[0].words} and ${found[1].words}`;
    this.between.append(
      make("p", { class: "hint" }, words),
      make("button", {
        type: "button", class: "quiet-button", "aria-pressed": String(this.marks), onclick: () => {
          this.marks = !this.marks;
          this.showBetween();
          this.between.querySelector("button")?.focus();
        },
      }, "Mark differences"),
    );
  }

  /** Show another version of one answer. */
  turnTo(slot, at) {
    this.answers.find((answer) => answer.slot === slot)?.turnTo(at);
  }

  /** Show what only the last turn has, or take it away. */
  setLast(isLast) {
    this.isLast = isLast;
    for (const answer of this.answers) answer.showTools();
  }
}

/** One answer: its name, text, facts and buttons. */
export class AnswerView {
  constructor(turnView, slot) {
    this.turnView = turnView;
    this.slot = slot;
    this.hasChances = false;
    this.name = make("h2", { class: "voice-name" });
    this.thinking = make("details", { class: "thinking" }, make("summary", {}, "Thinking"), make("p", {}));
    this.body = make("div", { class: "text" });
    this.facts = make("p", { class: "facts" });
    this.trouble = make("p", { class: "error", role: "alert" });
    this.tools = make("div", { class: "tools" });
    this.element = make("article", { class: "answer" }, this.name, this.thinking, this.body, this.trouble,
      make("div", { class: "answer-foot" }, this.tools, this.facts));
    this.show();
  }

  get version() {
    return versionOf(this.slot);
  }

  show() {
    const { version } = this;
    this.name.textContent = nameOf(version.voice);
    this.element.setAttribute("aria-label", `Answer of ${nameOf(version.voice)}`);
    this.body.replaceChildren();
    this.body.blocks = null;
    this.grow();
    this.end();
  }

  /** Show what has come so far. */
  grow() {
    const { version } = this;
    this.element.setAttribute("aria-busy", String(version.isBusy));
    this.thinking.hidden = !version.thinking;
    this.thinking.querySelector("p").textContent = version.thinking;
    if (this.hasChances && version.tokens.length) {
      refill(this.body, chanceView(version.tokens));
    } else if (version.isJson && version.text) {
      const [shown] = this.body.children;
      if (shown?.growCode) shown.growCode(version.text);
      else refill(this.body, codeOf(version.text, "json"));
    } else {
      showMarkdown(this.body, version.text);
    }
    this.facts.textContent = unbroken(version.facts);
  }

  end() {
    const { version } = this;
    this.element.setAttribute("aria-busy", String(version.isBusy));
    this.facts.textContent = unbroken(version.facts);
    this.trouble.textContent = version.error ?? "";
    this.trouble.hidden = !version.error;
    this.showTools();
  }

  showTools() {
    const { version, slot, turnView } = this, { turn, acts } = turnView;
    const parts = [];
    if (slot.versions.length > 1) {
      const arrow = (name, label, at, isEnd) => tool(name, label, () => this.turnTo(at), {
        disabled: isEnd, "data-held": name, "data-idle": turnView.isLast ? null : isEnd ? "never" : true,
      });
      parts.push(make("span", { class: "versions" },
        arrow("left", "Earlier version", slot.at - 1, slot.at === 0),
        make("span", {}, `${slot.at + 1} of ${slot.versions.length}`),
        arrow("right", "Later version", slot.at + 1, slot.at === slot.versions.length - 1)));
    }
    if (!version.isBusy) {
      if (version.text) {
        parts.push(copyButton(() => version.text, "Copy this answer"),
          tool("edit", "Edit this answer", () => this.edit(), { "data-idle": true, "data-held": "edit" }));
      }
      if (version.tokens.length) {
        parts.push(tool("chances", "Token probabilities", () => this.turnChances(), { "aria-pressed": String(this.hasChances), "data-held": "chances" }));
      }
      if (turnView.isLast) {
        if (isCut(version)) parts.push(continueButton(() => acts.goOn(turn, slot), nameOf(version.voice)));
        parts.push(tool("again", `Regenerate with ${nameOf(version.voice)}`, () => acts.again(turn, slot), { "data-idle": true }));
        if (turn.slots.length === 1) parts.push(this.compareSelect());
      }
    }
    refill(this.tools, ...parts);
  }

  /** Put a box in the place of the answer. What is saved is one more version, without the old one's times and probabilities. */
  edit() {
    const { slot, turnView } = this;
    const end = () => {
      form.remove();
      this.body.hidden = this.tools.hidden = false;
      this.tools.querySelector("[data-held=edit]")?.focus();
    };
    const form = editorOf({
      name: "Edited answer", text: this.version.text, yes: "Save", isOneLine: false,
      hint: turnView.isLast ? null : "Later answers stay as they are.",
      take: (text) => {
        if (text !== this.version.text) {
          if (!turnView.acts.change(turnView.turn, slot, text)) return tell(byId("ask-error"), "Save it when the answer is complete");
          tell(byId("ask-error"), "");
          this.hasChances = false;
          this.show();
          turnView.showBetween();
        }
        end();
      },
      cancel: end,
    });
    hideTip();
    this.body.hidden = this.tools.hidden = true;
    this.body.after(form);
    form.querySelector("textarea").focus();
  }

  /** A list that answers the same message beside this one. */
  compareSelect() {
    const { turn, acts } = this.turnView;
    const others = acts.voices().filter((voice) => voice !== this.version.voice);
    if (!others.length) return null;
    const select = make("select", { class: "compare", "aria-label": "Compare with another adapter", "data-idle": true },
      make("option", { value: "" }, "Compare with"), ...others.map((voice) => make("option", { value: voice }, nameOf(voice))));
    select.addEventListener("change", () => select.value && acts.compare(turn, select.value));
    return select;
  }

  turnChances() {
    this.hasChances = !this.hasChances;
    hideTip();
    this.body.replaceChildren();
    this.body.blocks = null;
    this.grow();
    this.showTools();
    this.tools.querySelector("[data-held=chances]")?.focus();
    this.turnView.showBetween();
  }

  turnTo(at) {
    const wasLeft = at < this.slot.at;
    if (!this.turnView.acts.pick(this.turnView.turn, this.slot, at)) return;
    this.hasChances = false;
    this.show();
    this.turnView.showBetween();
    const [first, second] = wasLeft ? ["left", "right"] : ["right", "left"];
    const held = (side) => this.tools.querySelector(`[data-held=${side}]:not(:disabled)`);
    (held(first) ?? held(second))?.focus();
  }
}

/** Return what a chat says as a Markdown text. */
export function textOf(chat) {
  const lines = [`# ${chat.title}`, ""];
  for (const { text, media, slots } of chat.turns) {
    lines.push("## Message", "", ...media.map(({ kind, name }) => `[${kind}: ${name}]`), text, "");
    for (const slot of slots) {
      const { voice, text: said, facts } = versionOf(slot);
      lines.push(`## ${nameOf(voice)}`, "", said, "", `<!-- ${facts}; version ${slot.at + 1} of ${counted(slot.versions.length, "version")} -->`, "");
    }
  }
  return lines.join("\n");
}
