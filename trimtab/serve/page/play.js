// The playground: one question, to one adapter or to two side by side, answered in pieces.

import { stream } from "./api.js";
import { byId, counted, make, rate, seconds, tell } from "./dom.js";
import { Attachments, Recorder, shown } from "./media.js";

const DRAFT = "trimtab-draft";
const SPOKEN_EVERY_MS = 1500;

/** model(): the status of the model that is shown, or null. */
export function startPlayground(model) {
  const question = byId("question"), form = byId("ask");
  const fail = (text) => tell(byId("ask-error"), text);
  const attachments = new Attachments(() => model()?.takes ?? [], fail);
  const recorder = new Recorder((file) => attachments.add([file]), fail);
  const histories = new Map(); // voice -> messages so far
  let running = null;

  keepDraft(question);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  takeFiles(form, attachments);
  byId("beside").addEventListener("change", (event) => { byId("voice-b-field").hidden = !event.target.checked; });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    for (const one of byId("answers").querySelectorAll("img, audio")) URL.revokeObjectURL(one.src);
    byId("answers").replaceChildren();
    histories.clear();
  });
  for (const id of ["temperature", "top-p", "max-tokens", "seed", "json", "system", "remember"]) {
    byId(id).addEventListener("input", showOptions);
  }
  showOptions();

  async function ask() {
    if (running) return;
    running = new AbortController();
    await attachments.reading;
    const text = question.value.trim();
    fail("");
    if (!text && !attachments.items.length) {
      fail("Write a question, or add a picture or a sound");
      question.focus();
      running = null;
      return;
    }
    const media = attachments.take();
    const content = media.length
      ? [...media.map((item) => item.part), ...(text ? [{ type: "text", text }] : [])]
      : text;
    const voices = [byId("voice-a").value];
    if (byId("beside").checked) voices.push(byId("voice-b").value);
    const remembers = byId("remember").checked;
    if (!remembers) histories.clear();
    setRunning(true);
    const answers = voices.map((voice) => new Answer(voice, byId("json").checked));
    byId("answers").prepend(turnOf(text, media, answers));
    question.value = "";
    question.dispatchEvent(new Event("input"));
    const speaker = new Speaker(answers.length > 1);
    await Promise.all(answers.map(async (answer) => {
      const before = histories.get(answer.voice) ?? [];
      const messages = [...before, { role: "user", content }];
      await answer.run(bodyOf(answer.voice, messages), running.signal, speaker);
      if (remembers && answer.isWhole) {
        histories.set(answer.voice, [...messages, { role: "assistant", content: answer.said }]);
      }
    }));
    running = null;
    setRunning(false);
  }

  function setRunning(isRunning) {
    const send = byId("send"), stop = byId("stop");
    const hadFocus = document.activeElement;
    send.disabled = isRunning;
    stop.disabled = !isRunning;
    if (isRunning && hadFocus === send) stop.focus();
    if (!isRunning && (hadFocus === stop || hadFocus === document.body)) question.focus({ preventScroll: true });
  }

  /** Follow what the model takes. */
  return function follow(status) {
    byId("add-image").disabled = !status.takes.includes("image");
    byId("add-sound").disabled = !status.takes.includes("audio");
    byId("record").disabled = recorder.isMissing || !status.takes.includes("audio");
  };
}

function bodyOf(voice, messages) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  return {
    model: voice,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    response_format: byId("json").checked ? { type: "json_object" } : undefined,
    stream: true, stream_options: { include_usage: true },
  };
}

function showOptions() {
  const parts = [`temperature ${byId("temperature").value || "1"}`];
  for (const [id, word] of [["top-p", "top p"], ["max-tokens", "max tokens"], ["seed", "seed"]]) {
    if (byId(id).value) parts.push(`${word} ${byId(id).value}`);
  }
  if (byId("json").checked) parts.push("JSON");
  if (byId("system").value.trim()) parts.push("system message");
  if (byId("remember").checked) parts.push("going on");
  byId("options-summary").textContent = parts.join(", ");
}

function keepDraft(question) {
  try {
    question.value = sessionStorage.getItem(DRAFT) ?? "";
    question.addEventListener("input", () => sessionStorage.setItem(DRAFT, question.value));
  } catch {
    // A browser that keeps nothing forgets the draft.
  }
}

function takeFiles(form, attachments) {
  for (const [button, input] of [["add-image", "image-file"], ["add-sound", "sound-file"]]) {
    byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", async (event) => {
      await attachments.add([...event.target.files]);
      event.target.value = "";
    });
  }
  byId("question").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    attachments.add(files);
  });
  form.addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    form.classList.add("is-over");
  });
  form.addEventListener("dragleave", () => form.classList.remove("is-over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("is-over");
    attachments.add([...event.dataTransfer.files]);
  });
  // A file dropped beside the form would otherwise replace the page.
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
}

function turnOf(text, media, answers) {
  return make(
    "div", { class: "turn" },
    make("div", { class: "asked" }, ...media.map(shown), text ? make("p", {}, text) : null),
    make("div", { class: "pairs" }, ...answers.map((answer) => answer.element)),
  );
}

/** One answer on its way: what it says, how fast, and how it ended. */
class Answer {
  constructor(voice, isJson) {
    this.voice = voice;
    this.said = "";
    this.isWhole = false;
    this.text = make("p", { class: isJson ? "text is-json" : "text" });
    this.facts = make("p", { class: "facts" }, "waiting");
    this.element = make("article", { class: "answer", "aria-busy": "true", "aria-label": `Answer of ${nameOf(voice)}` },
      make("h3", {}, nameOf(voice)), this.text, this.facts);
  }

  async run(body, signal, speaker) {
    const began = performance.now();
    let first = null, usage = null, finish = null, how = null;
    try {
      for await (const chunk of stream("/v1/chat/completions", body, signal)) {
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        finish = choice?.finish_reason ?? finish;
        const piece = choice?.delta?.content;
        if (!piece) continue;
        if (first === null) {
          first = performance.now();
          this.facts.textContent = `first token after ${seconds((first - began) / 1000)}`;
        }
        this.said += piece;
        this.text.append(piece);
        speaker.say(this.voice, piece);
      }
      this.isWhole = true;
      how = finish === "length" ? "cut at its length" : null;
    } catch (error) {
      how = error.name === "AbortError" ? "stopped" : "failed";
      if (how === "failed") this.element.append(make("p", { class: "error", role: "alert" }, wordsOf(error)));
    }
    this.text.normalize();
    this.element.setAttribute("aria-busy", "false");
    this.facts.textContent = factsOf({ began, first, usage, how });
    speaker.end(this.voice, how ?? "answer complete");
  }
}

function factsOf({ began, first, usage, how }) {
  const now = performance.now();
  const facts = how ? [how] : [];
  if (first !== null) facts.push(`first token after ${seconds((first - began) / 1000)}`);
  if (usage && usage.completion_tokens > 1 && first !== null && now > first) {
    facts.push(`${rate(((usage.completion_tokens - 1) * 1000) / (now - first))} tok/s`);
  }
  if (usage) facts.push(`${usage.prompt_tokens} + ${counted(usage.completion_tokens, "token")}`);
  facts.push(seconds((now - began) / 1000));
  return facts.join(", ");
}

/** Return an error in words, with every problem it lists. */
export function wordsOf(error) {
  return [error.message, ...(error.problems ?? []).filter((text) => !error.message.includes(text))].join("\n");
}

/** Return a voice as readers call it: the adapter's name, or the model's. */
function nameOf(voice) {
  const at = voice.indexOf(":");
  return at < 0 ? `${voice} (base)` : voice.slice(at + 1);
}

/** What a screen reader hears of answers that grow: a sentence or so at a time, and one voice after the other. */
class Speaker {
  constructor(isTwo) {
    this.isTwo = isTwo;
    this.waiting = new Map();
    this.region = byId("spoken");
    this.region.textContent = "";
    this.timer = null;
  }

  say(voice, piece) {
    this.waiting.set(voice, (this.waiting.get(voice) ?? "") + piece);
    this.timer ??= setTimeout(() => this.speak(), SPOKEN_EVERY_MS);
  }

  end(voice, how) {
    this.say(voice, ` (${how})`);
  }

  speak() {
    this.timer = null;
    const heard = [...this.waiting].map(([voice, text]) => (this.isTwo ? `${nameOf(voice)}: ${text}` : text));
    this.waiting.clear();
    this.region.textContent = heard.join(". ");
  }
}
