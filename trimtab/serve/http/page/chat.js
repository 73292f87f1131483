// The conversation: what is sent, to one adapter or to two side by side, how answers come, and what is kept of them.

import { stream } from "./api.js";
import { addSlot, addVersion, chooseVersion, hasBranches } from "./branches.js";
import { tokensOf } from "./chances.js";
import { byId, counted, make, rate, seconds, tell } from "./dom.js";
import { Attachments, Recorder, filesAsText, partOf } from "./media.js";
import * as options from "./options.js";
import { download, fileName } from "./save.js";
import * as store from "./store.js";
import { TurnView, nameOf, textOf, versionOf } from "./turns.js";
import { endUndo, offerUndo } from "./undo.js";

const DRAFT = "trimtab-draft", CURRENT = "trimtab-chat";
const SPOKEN_EVERY_MS = 1500, KEPT_EVERY_MS = 2000, NEAR_END_PX = 80;
const SHOWN_SHARE = 4; // between two looks at a growing answer: so many times what the last one took
const TITLE_LETTERS = 60;
const FULL_SHARE = 0.9; // of the context: little is left for the next message

/** model(): the status of the model that is shown, or null. onKept(chat): called when a chat was kept. */
export function startChat(model, onKept) {
  const question = byId("question"), form = byId("ask"), scroller = byId("scroller");
  const fail = (text) => tell(byId("ask-error"), text);
  const attachments = new Attachments(() => model()?.takes ?? [], fail);
  const recorder = new Recorder((file) => attachments.add([file]), fail);
  let chat = fresh(), views = [], running = null, isPreparing = false, keptAt = 0, isAtEnd = true, wish = [], shownVoices = "";

  const acts = {
    edit: (turn, text) => resend(turn, text),
    again: (turn, slot) => {
      addVersion(turn, slot, versionFor(versionOf(slot).voice), []);
      return answer(turn, [slot]);
    },
    goOn: (turn, slot) => {
      versionOf(slot).isBusy = true;
      return answer(turn, [slot], true);
    },
    compare: (turn, voice) => {
      addSlot(turn, { at: 0, versions: [versionFor(voice)] });
      return answer(turn, [turn.slots.at(-1)]);
    },
    /** Keep an edited answer. Returns whether that is possible now. */
    change: (turn, slot, text) => {
      if (running) return false;
      const later = chat.turns.slice(chat.turns.indexOf(turn) + 1);
      const edited = { ...versionOf(slot), text, tokens: [], facts: "edited", how: "edited", error: null, used: null };
      addVersion(turn, slot, edited, later);
      forgetUse(later);
      showContext();
      keep();
      return true;
    },
    remove: async (turn) => {
      const left = chat.turns.filter((other) => other !== turn);
      forgetUse(chat.turns.slice(chat.turns.indexOf(turn) + 1));
      setTurns(left, "Message and answer deleted", { isFocused: true });
      if (left.length) return keep();
      await store.forget(chat.id);
      chat.revision = 0;
      onKept(chat);
    },
    /** Show another version of an answer, with the turns that followed it. Returns whether that is possible now. */
    pick: (turn, slot, at) => {
      const mine = chat, before = slot.at, place = chat.turns.indexOf(turn) + 1, left = chat.turns.length - place;
      if (running && (left || hasBranches(turn))) return false;
      endUndo();
      chat.turns = [...chat.turns.slice(0, place), ...chooseVersion(turn, slot, at, chat.turns.slice(place))];
      show(true);
      if (left) {
        offerUndo(`${counted(left, "later message")} stay${left === 1 ? "s" : ""} with version ${before + 1}`, () => {
          if (mine === chat && slot.at === at) views.find((view) => view.turn === turn)?.turnTo(slot, before);
        });
      }
      keep();
      return true;
    },
    voices: () => [...byId("voice-a").options].map(({ value }) => value),
  };

  // What the reader does --------------------------------------------------------------------------------------------

  keepDraft(question);
  question.addEventListener("input", () => grow(question));
  grow(question);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "ArrowUp" && !question.value && views.length && !running) {
      event.preventDefault();
      views.at(-1).edit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("beside").addEventListener("click", () => setBeside(byId("beside").getAttribute("aria-pressed") !== "true"));
  takeFiles(form, attachments);
  scroller.addEventListener("scroll", noteEnd);
  byId("to-end").addEventListener("click", () => {
    toEnd(true);
    question.focus({ preventScroll: true });
  });

  /** Choose the voices of the chat that was opened, as soon as the server has named its own. */
  function takeVoices() {
    if (!byId("voice-a").options.length) return;
    ["voice-a", "voice-b"].forEach((id, at) => wish[at] && choose(id, wish[at]));
    wish = [];
  }

  function setBeside(isOn) {
    byId("beside").setAttribute("aria-pressed", String(isOn));
    byId("voice-b-field").hidden = !isOn;
  }

  async function send() {
    if (running || isPreparing) return;
    isPreparing = true;
    await attachments.reading;
    isPreparing = false;
    const text = question.value.trim();
    fail("");
    if (!text && !attachments.items.length) {
      question.focus();
      return;
    }
    endUndo();
    const media = attachments.take();
    question.value = "";
    question.dispatchEvent(new Event("input"));
    await begin(text, media);
  }

  /** Send a message again, changed; what came after it goes. */
  async function resend(turn, text) {
    if (running) return;
    const at = chat.turns.indexOf(turn), later = chat.turns.length - at - 1;
    setTurns(chat.turns.slice(0, at), later ? `${counted(later, "later message")} removed` : "The earlier message was replaced");
    await begin(text, turn.media);
  }

  /** Take turns out of the conversation, and offer to undo that. */
  function setTurns(turns, words, more = {}) {
    const mine = chat, { title, turns: before } = chat;
    chat.turns = turns;
    show();
    offerUndo(words, () => {
      if (mine !== chat) return;
      running?.abort();
      Object.assign(chat, { turns: before, title });
      show();
      return keep();
    }, more);
  }

  async function begin(text, media) {
    const voices = [byId("voice-a").value];
    if (byId("beside").getAttribute("aria-pressed") === "true") voices.push(byId("voice-b").value);
    const turn = { text, media, slots: voices.map((voice) => ({ at: 0, versions: [versionFor(voice)] })) };
    if (!chat.turns.length && !chat.isNamed) chat.title = titleOf(text, media);
    chat.options = options.values();
    chat.turns.push(turn);
    isAtEnd = true;
    await answer(turn, turn.slots);
  }

  // How it is answered ----------------------------------------------------------------------------------------------

  /** isContinued: the answers go on where they end. */
  async function answer(turn, slots, isContinued = false) {
    const at = chat.turns.indexOf(turn), mine = chat;
    if (views[at]) views[at].showAnswers();
    show();
    running = new AbortController();
    const { signal } = running;
    setRunning(true);
    const view = views[at], speaker = new Speaker(slots.length > 1);
    await keep();
    await Promise.all(slots.map(async (slot) => {
      const answerView = view.answers[turn.slots.indexOf(slot)], version = versionOf(slot);
      let leftOut = "";
      const bodyOf = async () => {
        const found = await messagesOf(mine.turns.slice(0, at + 1), version.voice, model());
        const body = options.bodyOf(version.voice, found.messages);
        leftOut = found.leftOut;
        if (isContinued) continueIn(body, version);
        return body;
      };
      await run(version, bodyOf, signal, {
        grow: () => {
          if (mine !== chat) return;
          answerView.grow();
          toEnd();
          if (performance.now() - keptAt > KEPT_EVERY_MS) keep();
        },
        say: (piece) => speaker.say(version.voice, piece),
      });
      if (leftOut) version.facts += `; ${leftOut}`;
      speaker.end(version.voice, version.how ?? "answer complete");
      answerView.end();
      showContext();
    }));
    running = null;
    view.showBetween();
    setRunning(false);
    toEnd();
    await keep(mine);
  }

  function setRunning(isRunning) {
    const send = byId("send"), stop = byId("stop"), focused = document.activeElement;
    send.hidden = isRunning;
    stop.hidden = !isRunning;
    for (const one of byId("turns").querySelectorAll("[data-idle]")) one.disabled = isRunning || one.dataset.idle === "never";
    if (isRunning && (focused === send || focused === document.body)) stop.focus({ preventScroll: true });
    if (!isRunning && (focused === stop || document.activeElement === document.body)) question.focus({ preventScroll: true });
  }

  async function keep(what = chat) {
    keptAt = performance.now();
    if (!what.turns.length || what.isGone) return;
    what.at = Date.now();
    try {
      await store.keep(what);
      sessionKeep(CURRENT, chat.id);
    } catch (error) {
      if (error instanceof store.ChangedError) {
        if (what === chat) await takeOther();
        return;
      }
      fail("The browser's storage is full: this chat is not saved");
    }
    onKept(what);
  }

  /** Show the chat as another tab has left it. A message that is in neither goes back to where it was written. */
  async function takeOther() {
    const lost = chat.turns.at(-1).text;
    await open(chat.id);
    if (!question.value && !chat.turns.some(({ text }) => text === lost)) question.value = lost;
    fail("This chat was changed or deleted in another tab: here is what is kept of it");
  }

  // What is seen ----------------------------------------------------------------------------------------------------

  /** isStill: what is in view stays there. */
  function show(isStill = false) {
    byId("welcome").hidden = chat.turns.length > 0;
    byId("save-chat").hidden = !chat.turns.length;
    views = chat.turns.map((turn) => views.find((view) => view.turn === turn) ?? new TurnView(turn, acts));
    views.forEach((view, at) => view.setLast(at === views.length - 1));
    const wanted = views.map(({ element }) => element), shown = [...byId("turns").children];
    shown.filter((element) => !wanted.includes(element)).forEach((element) => element.remove());
    wanted.filter((element) => !element.isConnected).forEach((element) => byId("turns").append(element));
    showContext();
    if (isStill) noteEnd();
    else toEnd();
  }

  /** Show how much of the context the last answer and its prompt take. */
  function showContext() {
    const most = model()?.plan?.request.context_tokens ?? 0, last = chat.turns.at(-1);
    const used = chat.turns.map(({ slots }) => Math.max(...slots.map((slot) => versionOf(slot).used ?? 0)));
    const known = used.findLast((count) => count > 0) ?? 0, isWhole = known > 0 && used.at(-1) > 0;
    byId("context").hidden = !(last && known && most);
    if (byId("context").hidden) return;
    const words = `${isWhole ? "" : "more than "}${known} of ${most}`, meter = byId("context-meter");
    meter.max = most;
    meter.value = known;
    byId("context").classList.toggle("is-full", known > FULL_SHARE * most);
    if (byId("context-text").textContent !== words) byId("context-text").textContent = words;
    meter.setAttribute("aria-valuetext", `${words} tokens`);
  }

  /** What comes before these turns has changed: how much of the context they take is not known any more. */
  function forgetUse(turns) {
    for (const { slots } of turns) slots.forEach((slot) => (versionOf(slot).used = null));
  }

  function toEnd(isForced = false) {
    if (isAtEnd || isForced) {
      scroller.scrollTop = scroller.scrollHeight;
      noteEnd(); // what became shorter may not scroll at all
    }
  }

  function noteEnd() {
    isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
    byId("to-end").hidden = isAtEnd;
  }

  /** Show another chat, or a new one for null. What is being answered is stopped. */
  async function open(id) {
    running?.abort();
    endUndo();
    const found = id === null ? null : await store.read(id);
    chat = found ?? fresh();
    for (const { slots } of chat.turns) {
      for (const { versions } of slots) versions.filter(({ isBusy }) => isBusy).forEach(interrupt);
    }
    sessionKeep(CURRENT, chat.id);
    options.take(chat.options ?? null);
    isAtEnd = true;
    fail("");
    show();
    const last = chat.turns.at(-1);
    if (last) {
      // The next message goes where the last one went, as far as that is still there.
      wish = last.slots.map((slot) => versionOf(slot).voice);
      setBeside(wish.length > 1);
      takeVoices();
    }
    onKept(chat);
    if (matchMedia("(pointer: fine)").matches) question.focus({ preventScroll: true });
  }

  byId("save-chat").addEventListener("click", () => {
    download(textOf(chat), fileName(chat, "md"), "text/markdown");
  });

  for (const event of ["input", "change"]) {
    byId("options").addEventListener(event, () => {
      chat.options = options.values();
      if (event === "change" && !running) keep();
    });
  }

  show();
  const before = sessionRead(CURRENT);
  if (before) open(before);

  return {
    open,
    current: () => chat.id,
    /** Forget a chat, or all of them for null; a new one is shown if it is the one that is seen. */
    async forget(id) {
      if (id === null || id === chat.id) {
        chat.isGone = true;
        running?.abort();
      }
      await (id === null ? store.forgetAll() : store.forget(id));
      if (chat.isGone) await open(null);
    },
    async rename(id, title) {
      const other = id === chat.id ? chat : await store.read(id);
      if (!other) return;
      Object.assign(other, { title, isNamed: true });
      try {
        await store.keep(other);
      } catch (error) {
        if (!(error instanceof store.ChangedError)) throw error;
        if (other === chat) await takeOther();
      }
    },
    /** Follow what the model takes. */
    follow(status) {
      takeVoices();
      showContext();
      byId("record").disabled = recorder.isMissing || !status.takes.includes("audio");
      const voices = acts.voices().join();
      if (voices === shownVoices || running) return;
      shownVoices = voices;
      views.at(-1)?.setLast(true);
    },
  };
}

// Messages ---------------------------------------------------------------------------------------------------------------

/** Return the messages that a voice gets: every turn with its own answer, or the one beside it where it has none. */
async function messagesOf(turns, voice, model) {
  const most = model?.plan?.request.images ?? Infinity;
  const last = turns.at(-1);
  const whole = turns.filter((turn) => turn === last || answerOf(turn, voice));
  // The plan has room for so many images of one prompt: the newest are sent.
  const images = whole.flatMap(({ media }) => media.filter(({ kind }) => kind === "image"));
  const dropped = new Set(images.slice(0, Math.max(0, images.length - Math.max(most, last.media.filter(({ kind }) => kind === "image").length))));
  const sounds = whole.flatMap(({ media }) => media.filter(({ kind }) => kind === "sound"));
  for (const sound of sounds) if (!last.media.includes(sound) && last.media.some(({ kind }) => kind === "sound")) dropped.add(sound);
  const messages = [];
  for (const turn of whole) {
    const parts = await Promise.all(turn.media.filter((item) => item.kind !== "text" && !dropped.has(item)).map(partOf));
    const words = [filesAsText(turn.media), turn.text].filter(Boolean).join("\n\n");
    const text = words || (parts.length ? "" : `[${turn.media.map(({ name }) => name).join(", ")}]`);
    messages.push({ role: "user", content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text });
    if (turn !== last) messages.push({ role: "assistant", content: answerOf(turn, voice).text });
  }
  const leftOut = dropped.size ? `${counted(dropped.size, "earlier attachment")} left out: the plan allows no more in one prompt` : "";
  return { messages, leftOut };
}

function answerOf({ slots }, voice) {
  const slot = slots.find((one) => versionOf(one).voice === voice) ?? slots[0], version = versionOf(slot);
  return version.text ? version : null;
}

const versionFor = (voice) => ({
  voice, text: "", thinking: "", tokens: [], facts: "waiting", how: null, error: null, isBusy: true, isJson: byId("json").checked,
});

/** Ask for the rest of a version instead of a new answer. Its tokens have probabilities all or none. */
function continueIn(body, { text, thinking, tokens }) {
  body.messages.push({ role: "assistant", content: text, ...(thinking ? { reasoning_content: thinking } : {}) });
  Object.assign(body, { continue_final_message: true, add_generation_prompt: false, ...options.chancesOf(tokens.length > 0) });
}

function interrupt(version) {
  Object.assign(version, { isBusy: false, how: "interrupted", facts: "interrupted" });
}

/** Send a request and put into a version what comes. bodyOf(): the request's body; its errors are the answer's. */
async function run(version, bodyOf, signal, { grow, say }) {
  const began = performance.now(), isContinued = version.text !== "";
  let first = null, usage = null, finish = null, frame = null, shownMs = 0;
  version.error = null;
  // A long answer takes longer to show: then it is shown less often, so that the page stays quick.
  const soon = () => {
    frame ??= setTimeout(() => requestAnimationFrame(() => {
      frame = null;
      if (!version.isBusy) return;
      const from = performance.now();
      grow();
      shownMs = performance.now() - from;
    }), SHOWN_SHARE * shownMs);
  };
  soon();
  try {
    for await (const chunk of stream("/v1/chat/completions", await bodyOf(), signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      version.tokens.push(...tokensOf(choice?.logprobs));
      version.thinking += choice?.delta?.reasoning_content ?? "";
      const piece = choice?.delta?.content;
      if (!piece) continue;
      if (first === null) {
        first = performance.now();
        version.facts = `first token after ${seconds((first - began) / 1000)}`;
      }
      version.text += piece;
      say(piece);
      soon();
    }
    version.how = finish === "length" ? "cut at the token limit" : null;
  } catch (error) {
    version.how = error.name === "AbortError" ? "stopped" : "failed";
    if (version.how === "failed") version.error = wordsOf(error);
  }
  if (version.isJson && version.how === null) version.text = indented(version.text);
  version.used = usage ? usage.prompt_tokens + usage.completion_tokens : null;
  version.facts = factsOf({ began, first, usage, how: version.how, isContinued, isEmpty: !version.text && version.how === null });
  grow();
  version.isBusy = false;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function factsOf({ began, first, usage, how, isContinued, isEmpty }) {
  const now = performance.now();
  const facts = [...(isContinued ? ["continued"] : []), ...(how ? [how] : [])];
  if (isEmpty) facts.push("the answer is empty: the model ended it immediately");
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

// Small things -----------------------------------------------------------------------------------------------------------

const fresh = () => ({ id: newId(), title: "New chat", at: Date.now(), turns: [] });

// crypto.randomUUID is for secure contexts alone.
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((value) => value.toString(16).padStart(2, "0")).join("");

function titleOf(text, media) {
  const words = text.replaceAll(/\s+/g, " ") || media.map(({ name }) => name).join(", ");
  return words.length > TITLE_LETTERS ? `${words.slice(0, TITLE_LETTERS - 1)}…` : words;
}

function choose(id, value) {
  const select = byId(id);
  if ([...select.options].some((option) => option.value === value)) select.value = value;
}

function sessionKeep(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    // A browser that keeps nothing begins anew.
  }
}

function sessionRead(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

function keepDraft(question) {
  question.value = sessionRead(DRAFT) ?? "";
  question.addEventListener("input", () => sessionKeep(DRAFT, question.value));
}

function grow(question) {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function takeFiles(form, attachments) {
  byId("attach").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async (event) => {
    await attachments.add([...event.target.files]);
    event.target.value = "";
    byId("question").focus();
  });
  byId("question").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    attachments.add(files);
  });
  // The whole window takes what is dropped: beside the form it would otherwise replace the page.
  window.addEventListener("dragover", (event) => {
    event.preventDefault();
    if (event.dataTransfer?.types.includes("Files")) form.classList.add("is-over");
  });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) form.classList.remove("is-over"); });
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("is-over");
    if (event.dataTransfer?.files.length) attachments.add([...event.dataTransfer.files]);
  });
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
