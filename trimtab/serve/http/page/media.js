// Images and sounds on their way to the model: chosen, dropped, pasted or recorded, in a form that the server takes.

import { byId, bytes, icon, make, refill, seconds, tool } from "./dom.js";

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp"];
const RATE = 16000;
const MAX_RECORDING_S = 120;
const TEXT_NAMES = /\.(txt|md|rst|tex|csv|tsv|log|json|jsonl|xml|html?|css|[cm]?[jt]sx?|py|ipynb|sh|c|h|cc|cpp|hpp|cu|cs|java|kt|go|rs|rb|php|swift|scala|lua|r|sql|ya?ml|toml|ini|cfg|conf|diff|patch)$/i;
const MOST_TEXT_BYTES = 2 ** 20; // of a text file: far more than a context holds

/** One thing to send, as a chat keeps it: {kind: "image" or "sound", name, format, blob}, or {kind: "text", name, format, text}. */
async function imageOf(file) {
  const blob = IMAGE_TYPES.includes(file.type) ? file : await asPng(file);
  return { kind: "image", name: file.name || "image", format: blob.type, blob: new Blob([await blob.arrayBuffer()], { type: blob.type }) };
}

async function asPng(file) {
  const bitmap = await createImageBitmap(file);
  const canvas = make("canvas", { width: bitmap.width, height: bitmap.height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return new Promise((done, failed) => {
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("cannot be drawn"))), "image/png");
  });
}

async function soundOf(file) {
  const head = new TextDecoder("latin1").decode(await file.slice(0, 12).arrayBuffer());
  // What the server reads itself goes as it is; anything else this browser can play becomes wav first.
  const format = head.startsWith("RIFF") && head.endsWith("WAVE") ? "wav" : head.startsWith("fLaC") ? "flac" : null;
  const encoded = await file.arrayBuffer(); // the file may change before it is sent
  const blob = format ? encoded : await asWav(encoded);
  const held = new Blob([blob], { type: `audio/${format ?? "wav"}` });
  return { kind: "sound", name: file.name || "recording.wav", format: format ?? "wav", blob: held };
}

async function textOf(file) {
  if (file.size > MOST_TEXT_BYTES) throw new Error(`larger than ${bytes(MOST_TEXT_BYTES)}`);
  const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  if (text.includes("\0")) throw new Error("not a text");
  return { kind: "text", name: file.name || "text", format: "text/plain", text };
}

/** Return the text files of a message as a model reads them: each with its name, in a fence that it does not hold. */
export function filesAsText(media) {
  return media.filter(({ kind }) => kind === "text").map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length)), fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }).join("\n\n");
}

/** Return a kept image or sound in the shape of OpenAI's message parts. */
export async function partOf({ kind, format, blob }) {
  const data = await base64(blob);
  return kind === "image"
    ? { type: "image_url", image_url: { url: `data:${format};base64,${data}` } }
    : { type: "input_audio", input_audio: { data, format } };
}

async function asWav(encoded) {
  // An offline context of our rate resamples what it decodes.
  const found = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(encoded);
  const mono = new Float32Array(found.length);
  for (let channel = 0; channel < found.numberOfChannels; channel += 1) {
    found.getChannelData(channel).forEach((value, at) => { mono[at] += value / found.numberOfChannels; });
  }
  return wav(mono, RATE);
}

/** Return samples in -1..1 as a wav file of 16-bit numbers. */
export function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (at, text) => [...text].forEach((letter, place) => view.setUint8(at + place, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, at) => view.setInt16(44 + 2 * at, Math.round(Math.max(-1, Math.min(1, value)) * 32767), true));
  return new Blob([view], { type: "audio/wav" });
}

export function base64(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}

const urls = new WeakMap(); // blob -> its address in this tab

function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

/** What is attached to the message. takes(): which kinds the model takes. fail(text): tells the reader. */
export class Attachments {
  constructor(takes, fail) {
    this.items = [];
    this.reading = Promise.resolve(); // what is sent waits for it
    this.takes = takes;
    this.fail = fail;
    this.list = byId("attached");
  }

  add(files) {
    this.reading = this.reading.then(() => this.read(files));
    return this.reading;
  }

  async read(files) {
    this.fail("");
    for (const file of files) {
      const kind = file.type.startsWith("image/") ? "image"
        : file.type.startsWith("audio/") || /\.(wav|flac)$/i.test(file.name) ? "sound"
          : file.type.startsWith("text/") || TEXT_NAMES.test(file.name) ? "text" : null;
      if (kind === null) {
        this.fail(`${file.name}: neither an image nor audio nor a text file`);
      } else if (kind !== "text" && !this.takes().includes(kind === "sound" ? "audio" : "image")) {
        this.fail(`${file.name || "This"}: the model takes no ${kind}s`);
      } else {
        try {
          this.items.push(await { image: imageOf, sound: soundOf, text: textOf }[kind](file));
        } catch (error) {
          this.fail(`${file.name}: ${kind === "text" ? `cannot be sent as text (${error.message})` : "this browser cannot read it"}`);
        }
      }
    }
    this.show();
  }

  /** Return everything and begin anew. */
  take() {
    const taken = this.items;
    this.items = [];
    this.show();
    return taken;
  }

  show() {
    refill(this.list, ...this.items.map((item, place) => make(
      "li", {}, item.kind === "text" ? icon("file") : shown(item),
      make("span", { class: "name" }, `${item.name}, ${bytes(item.blob?.size ?? new Blob([item.text]).size)}`),
      tool("close", `Remove ${item.name}`, () => this.remove(place)),
    )));
  }

  remove(place) {
    this.items.splice(place, 1);
    this.show();
    (this.list.querySelectorAll("button")[Math.max(0, place - 1)] ?? byId("question")).focus();
  }
}

/** Return a kept image, sound or text as something to look at, listen to or read. */
export function shown(item) {
  if (item.kind === "text") {
    return make("details", { class: "file" }, make("summary", {}, icon("file"), item.name), make("pre", { tabindex: 0 }, item.text));
  }
  if (item.kind === "image") {
    return make("button", { type: "button", class: "image", title: `Enlarge ${item.name}`, onclick: () => enlarge(item) },
      make("img", { src: urlOf(item.blob), alt: item.name }));
  }
  return make("audio", { src: urlOf(item.blob), controls: true, preload: "metadata", "aria-label": item.name });
}

function enlarge({ name, blob }) {
  byId("image-name").textContent = name;
  refill(byId("image-box"), make("img", { id: "image-large", src: urlOf(blob), alt: name }));
  byId("image-dialog").showModal();
}

/** The microphone: a button that records until it is pressed again. done(file): gets a wav of 16 kHz. */
export class Recorder {
  constructor(done, fail) {
    this.button = byId("record");
    this.text = byId("record-text");
    this.done = done;
    this.fail = fail;
    this.stopping = null;
    this.button.addEventListener("click", () => (this.stopping ? this.stopping() : this.record()));
    if (!navigator.mediaDevices?.getUserMedia) {
      this.button.title = "Browsers allow the microphone only on this machine or over https";
      this.isMissing = true;
    }
  }

  async record() {
    if (this.isAsking) return;
    this.fail("");
    this.isAsking = true;
    let microphone;
    try {
      microphone = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    } catch (error) {
      this.fail(error.name === "NotAllowedError" ? "The browser denied access to the microphone" : "There is no microphone");
      return;
    } finally {
      this.isAsking = false;
    }
    const context = new AudioContext();
    await context.audioWorklet.addModule("/page/recorder.js");
    const source = context.createMediaStreamSource(microphone), tap = new AudioWorkletNode(context, "tap");
    const pieces = [];
    tap.port.onmessage = ({ data }) => pieces.push(data);
    source.connect(tap).connect(context.destination);
    const began = performance.now();
    const clock = setInterval(() => {
      const passed = (performance.now() - began) / 1000;
      this.text.textContent = `Stop recording, ${passed.toFixed(0)} s`;
      if (passed > MAX_RECORDING_S) this.stopping?.();
    }, 250);
    this.button.setAttribute("aria-pressed", "true");
    this.text.textContent = "Stop recording";
    this.text.classList.remove("unseen");
    this.stopping = async () => {
      this.stopping = null;
      clearInterval(clock);
      microphone.getTracks().forEach((track) => track.stop());
      this.button.setAttribute("aria-pressed", "false");
      this.text.textContent = "Record audio";
      this.text.classList.add("unseen");
      const rate = context.sampleRate;
      await context.close();
      if (pieces.length) this.done(await resampled(pieces, rate));
      else this.fail("Nothing was recorded");
    };
  }
}

async function resampled(pieces, rate) {
  const length = pieces.reduce((total, piece) => total + piece.length, 0);
  const offline = new OfflineAudioContext(1, Math.max(1, Math.round((length * RATE) / rate)), RATE);
  const buffer = offline.createBuffer(1, length, rate);
  let at = 0;
  for (const piece of pieces) {
    buffer.copyToChannel(piece, 0, at);
    at += piece.length;
  }
  const source = offline.createBufferSource();
  source.buffer = buffer;
  source.connect(offline.destination);
  source.start();
  const found = (await offline.startRendering()).getChannelData(0);
  return new File([wav(found, RATE)], `recording ${seconds(found.length / RATE)}.wav`, { type: "audio/wav" });
}
