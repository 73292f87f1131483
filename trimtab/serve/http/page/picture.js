// The load line, live: one bar a device, loaded tier by tier up to its budget. The same bytes as `trimtab plan --picture`.

import { byId, bytes, draw, make, refill, renew } from "./dom.js";

const HEIGHT = 74, TOP = 18, DEPTH = 38;
const PATTERNED = ["resident", "gather", "stream", "host", "disk", "adapters", "kv_cache", "activations"];
const TIERS = ["resident", "gather", "stream", "host", "disk"];
const NAMES = {
  resident: "resident", gather: "gathered", stream: "streamed", host: "computed on the host", disk: "from disk",
  adapters: "adapters", kv_cache: "KV cache", activations: "activations", other: "buffers and the process",
};
const PARTS = ["language", "table", "head", "vision", "audio", "connector"];
// A bar that is nearly empty is drawn larger, with a fold before its load line.
const FOLD_BELOW = 0.3, FOLDED_SHARE = 0.62;

/** Return the bars of a plan: {name, device, segments: [{fill, part, bytes}], budget_bytes, peak}. */
export function barsOf(plan) {
  const placed = (device) => {
    const found = new Map();
    for (const block of plan.placements) {
      const count = block[`${device}_bytes`];
      if (!count) continue;
      // What cannot leave the device stays there whatever the block's tier: it is resident.
      const fill = device === "gpu" ? "resident" : block.tier;
      const key = `${fill} ${block.part}`;
      const held = found.get(key) ?? { fill, part: block.part, bytes: 0 };
      held.bytes += count;
      found.set(key, held);
    }
    return [...found.values()].sort(
      (a, b) => TIERS.indexOf(a.fill) - TIERS.indexOf(b.fill) || PARTS.indexOf(a.part) - PARTS.indexOf(b.part),
    );
  };
  const items = (named) => named
    .filter(([, count]) => count > 0)
    .map(([name, count]) => ({
      fill: PATTERNED.includes(name) ? name : "other", part: name.replaceAll("_", " "), bytes: count,
    }))
    .sort((a, b) => (a.fill === "other") - (b.fill === "other"));
  const onDevice = placed("gpu");
  const shared = (plan.gpu.weights ?? 0) + (plan.gpu.fixed ?? 0) - sum(onDevice);
  const deviceItems = Object.entries(plan.gpu).filter(([name]) => name !== "weights" && name !== "fixed");
  const hostItems = Object.entries(plan.host).filter(([name]) => !name.endsWith("weights"));
  if (shared > 0) onDevice.push({ fill: "resident", part: "shared look-up tables", bytes: shared });
  const bars = [
    { name: plan.execution_device, device: "gpu", segments: [...onDevice, ...items(deviceItems)],
      budget_bytes: plan.gpu_budget_bytes },
    { name: "host memory", device: "host", segments: [...placed("host"), ...items(hostItems)],
      budget_bytes: plan.host_budget_bytes },
  ];
  if (plan.disk_bytes) bars.push({ name: "disk", device: "disk", segments: placed("disk"), budget_bytes: null });
  return bars;
}

export const sum = (segments) => segments.reduce((total, segment) => total + segment.bytes, 0);

/** Draw the picture of a model's status, its legend and its table. */
export function drawPicture(model) {
  const host = byId("bars");
  if (!model.plan) {
    // Another model's picture, or an older one, would be a lie about this one.
    const words = "The chart appears once the model is loaded.";
    renew(host, null, () => refill(host, make("p", { class: "quiet" }, words)));
    renew(byId("legend"), null, () => byId("legend").replaceChildren());
    byId("numbers").hidden = true;
    return;
  }
  const bars = barsOf(model.plan);
  const live = liveMarks(model);
  if (!host.clientWidth) return; // in a dialog that is closed
  const width = Math.max(240, Math.floor(host.clientWidth));
  renew(host, [bars, live, width, model.state], () => {
    refill(host, ...bars.map((bar) => figureOf(bar, live[bar.device] ?? [], width, model.state)));
  });
  drawLegend(bars);
  drawTable(bars);
}

/** Draw the slim bar of the device that computes, and say how full it is. */
export function drawSlim(model) {
  const svg = byId("memory-bar"), text = byId("memory-text");
  const bar = model.plan ? barsOf(model.plan)[0] : null;
  const marks = bar ? liveMarks(model)[bar.device] : [];
  const isLoaded = model.state === "ready";
  renew(svg, [bar, marks, isLoaded], () => {
    if (bar === null) {
      svg.replaceChildren();
      text.textContent = "Memory";
      return;
    }
    const loaded = sum(bar.segments), budget = bar.budget_bytes;
    const whole = Math.max(loaded, budget ?? 0, ...marks.map(([, count]) => count)) * 1.02;
    const place = (count) => (100 * count) / whole;
    const kinds = [["weights", ["resident", "gather", "stream", "host", "disk"]], ["adapters", ["adapters"]], ["rest", ["kv_cache", "activations", "other"]]];
    let left = 0;
    const parts = kinds.map(([kind, fills]) => {
      const wide = place(sum(bar.segments.filter(({ fill }) => fills.includes(fill))));
      left += wide;
      return draw("rect", { class: `slim-${kind}`, x: left - wide, y: 1, width: wide, height: 8 });
    });
    const used = marks.map(([, count]) => draw("rect", {
      class: count > (budget ?? Infinity) ? "slim-mark over" : "slim-mark", x: place(count) - 0.6, y: 0, width: 1.2, height: 10,
    }));
    const line = budget === null ? [] : [draw("rect", { class: "slim-line", x: place(budget) - 0.6, y: 0, width: 1.2, height: 10 })];
    refill(svg, draw("rect", { class: "slim-trough", x: 0, y: 1, width: 100, height: 8 }), ...(isLoaded ? parts : []), ...used, ...line);
    const now = marks.find(([what]) => what === "in use now");
    refill(text, ...(isLoaded
      ? [`${bar.name} ${bytes(now ? now[1] : loaded)}`, make("span", { class: "memory-of" }, budget === null ? "" : ` of ${bytes(budget)}`)]
      : [`${bar.name}: nothing loaded`]));
  });
}

function liveMarks(model) {
  const memory = model.numbers?.memory ?? {};
  const marks = { gpu: [], host: [] };
  const onDevice = model.plan.execution_device !== "cpu";
  if (onDevice && memory.gpu_bytes) marks.gpu.push(["in use now", memory.gpu_bytes]);
  if (onDevice && memory.gpu_peak_bytes) marks.gpu.push(["peak so far", memory.gpu_peak_bytes]);
  if (memory.host_peak_bytes) marks.host.push(["peak so far", memory.host_peak_bytes]);
  return marks;
}

/** Return how a bar is drawn: {isFolded, scale (pixels a byte), line (the load line's place, null for none)}.
 *  Everything that was in use has its true place, also beyond the plan's end and beyond the budget. */
export function scaleOf(loaded, budget, marks, width) {
  const used = Math.max(loaded, ...marks, 1);
  const isFolded = budget !== null && used < FOLD_BELOW * budget;
  const whole = Math.max(used, budget ?? 0) * 1.04;
  const scale = isFolded ? (width * FOLDED_SHARE) / used : width / (budget === null ? used : whole);
  const line = budget === null ? null : Math.round(isFolded ? width * 0.96 : budget * scale);
  return { isFolded, scale, line };
}

function figureOf(bar, marks, width, state) {
  const loaded = sum(bar.segments), budget = bar.budget_bytes;
  const { isFolded, scale, line } = scaleOf(loaded, budget, marks.map(([, count]) => count), width);
  const isOver = budget !== null && loaded > budget;
  const head = make("p", { class: "bar-head" }, make("span", {}, make("strong", {}, bar.name), ` ${bytes(loaded)} planned`));
  if (budget !== null) {
    const free = isOver ? `${bytes(loaded - budget)} over the load line` : `${bytes(budget - loaded)} free`;
    head.append(make("span", { class: isOver ? "bar-over" : null }, `budget ${bytes(budget)}, ${free}`));
  }
  const picture = draw("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false",
  });
  picture.append(draw("rect", { class: "trough", x: 0.5, y: TOP + 0.5, width: width - 1, height: DEPTH - 1 }));
  let left = 0;
  for (const segment of bar.segments) {
    const wide = segment.bytes * scale;
    picture.append(segmentOf(segment, left, wide));
    left += wide;
  }
  const end = Math.max(left, ...marks.map(([, count]) => count * scale));
  if (isFolded) picture.append(foldAt((end + line) / 2));
  if (line !== null) {
    picture.append(
      draw("path", { class: "load-line", d: `M${line} ${TOP - 6}V${TOP + DEPTH + 8}` }),
      draw("circle", { class: "load-disc", cx: line, cy: TOP - 10, r: 6 }),
      draw("path", { class: "load-line", d: `M${line - 10} ${TOP - 10}h20` }),
    );
  }
  for (const [what, count] of marks) {
    const at = count * scale, isBeyond = count > loaded;
    // What was used beyond the plan's end is drawn up to where it came.
    if (isBeyond) {
      picture.append(draw("rect", { class: "beyond", x: left, y: TOP + DEPTH - 5, width: Math.max(1, at - left), height: 5 }));
    }
    picture.append(draw("path", { class: isBeyond ? "now over" : "now", "data-mark": what, d: `M${at} ${TOP + DEPTH + 2}l5 9h-10z` }));
  }
  const said = marks.map(([what, count]) => {
    const beyond = budget !== null && count > budget ? `, ${bytes(count - budget)} over the budget`
      : count > loaded ? `, ${bytes(count - loaded)} more than planned` : "";
    return `${what} ${bytes(count)}${beyond}`;
  }).join("; ");
  const note = [said && `▲ ${said}`, isFolded && "not to scale: shortened before the load line"].filter(Boolean).join("; ");
  const isLoading = state === "loading" || state === "restarting";
  return make(
    "figure", { class: isLoading ? "bar is-loading" : "bar" }, head, picture,
    note ? make("figcaption", { class: "hint" }, note) : null,
  );
}

function segmentOf(segment, left, wide) {
  const label = segment.fill === "other" ? segment.part : `${segment.part} (${NAMES[segment.fill]})`;
  const group = draw("g", { class: "segment" }, draw("title", {}, `${label}: ${bytes(segment.bytes)}`));
  group.append(draw("rect", { class: `fill-${segment.fill}`, x: left, y: TOP, width: Math.max(wide, 1), height: DEPTH }));
  if (wide > 3) group.append(draw("path", { class: "seam", d: `M${left + wide} ${TOP}v${DEPTH}` }));
  const text = [`${segment.part} ${bytes(segment.bytes)}`, bytes(segment.bytes)].find((words) => words.length * 6.6 + 18 < wide);
  if (text) {
    const long = text.length * 6.6 + 8;
    const middle = left + wide / 2, centre = TOP + DEPTH / 2;
    group.append(
      draw("rect", { class: "plate", x: middle - long / 2, y: centre - 10, width: long, height: 20, rx: 3 }),
      draw("text", { x: middle, y: centre + 4, "text-anchor": "middle" }, text),
    );
  }
  return group;
}

function foldAt(at) {
  const zigzag = (x) => `M${x} ${TOP - 3}l5 11l-10 11l10 11l-5 11`;
  return draw("path", { class: "fold", d: `${zigzag(at - 4)}${zigzag(at + 4)}` });
}

function drawLegend(bars) {
  const totals = new Map();
  for (const { segments } of bars) {
    for (const { fill, bytes: count } of segments) totals.set(fill, (totals.get(fill) ?? 0) + count);
  }
  const shown = [...PATTERNED, "other"].filter((fill) => totals.has(fill));
  const legend = byId("legend");
  renew(legend, [...totals], () => {
    refill(legend, ...shown.map((fill) => make(
      "li", {},
      draw("svg", { viewBox: "0 0 22 14", "aria-hidden": "true", focusable: "false" },
        draw("rect", { class: `fill-${fill}`, x: 0.5, y: 0.5, width: 21, height: 13 })),
      make("span", {}, `${NAMES[fill]} ${bytes(totals.get(fill))}`),
    )));
  });
}

function drawTable(bars) {
  const table = byId("tiers");
  byId("numbers").hidden = false;
  renew(table, bars, () => {
    const fills = [...PATTERNED, "other"].filter((fill) => bars.some((bar) => bar.segments.some((one) => one.fill === fill)));
    const cell = (count) => make("td", { class: "number" }, count ? bytes(count) : "-");
    const row = (name, counts) => make("tr", {}, make("th", { scope: "row" }, name), ...counts.map(cell));
    refill(table.tHead, make("tr", {}, make("th", { scope: "col" }, "What"),
      ...bars.map((bar) => make("th", { scope: "col", class: "number" }, bar.name))));
    refill(table.tBodies[0], ...fills.map((fill) => row(
      NAMES[fill], bars.map((bar) => sum(bar.segments.filter((one) => one.fill === fill))),
    )));
    refill(table.tFoot, row("planned", bars.map((bar) => sum(bar.segments))), row("budget", bars.map((bar) => bar.budget_bytes)));
  });
}
