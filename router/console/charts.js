// Charts on canvases. A chart is drawn whole each time; the colours are those of the style sheet.

import { USES, OWNERS } from "./store.js";

const LEFT = 46, BOTTOM = 20, TOP = 6;

export function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

export function numBins(canvas) {
  // Of its place: a hidden canvas has no width.
  return Math.max(20, Math.floor((canvas.parentElement.clientWidth - LEFT) / 4));
}

export function timeAt(canvas, x, begin, end) {
  return begin + Math.max(0, (x - LEFT) / Math.max(1, canvas.clientWidth - LEFT)) * (end - begin);
}

let colours = {};
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [...USES, ...OWNERS, "text", "soft", "line", "accent", "panel"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

function axes({ pen, width, height }, top, begin, end, clock) {
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colours.soft;
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(height - BOTTOM - part * (height - BOTTOM - TOP)) + 0.5;
    pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(width, y); pen.stroke();
    pen.fillText(short(top * part), LEFT - 6, Math.max(TOP + 3, y));
  }
  pen.textBaseline = "alphabetic";
  const num = width < 500 ? 2 : Math.round(end - begin) === 60 ? 6 : 5;
  for (let i = 0; i <= num; i++) {
    pen.textAlign = i === 0 ? "left" : i === num ? "right" : "center";
    pen.fillText(clock(begin + i / num * (end - begin)), LEFT + i / num * (width - LEFT), height - 5);
  }
}

export function short(number) {
  const digits = (n) => n.toFixed(n < 10 && n % 1 ? 1 : 0);
  if (number >= 1e6) return `${digits(number / 1e6)}M`;
  return number >= 1e4 ? `${digits(number / 1e3)}k` : digits(number);
}

// Tokens per step by use. A step is a bar where each has its place, else a bar is a mean of steps.
export function drawSteps(canvas, store, worker, bins, selected, clock) {
  const area = prepare(canvas), { pen, width, height } = area;
  const { begin, end } = bins;
  const rings = store.ringsOf(worker);
  const isSingle = rings.length === 1 && bins.total <= (width - LEFT) / 3;
  let top = 1;
  for (let bin = 0; bin < bins.num; bin++) {
    if (bins.steps[bin]) top = Math.max(top, USES.reduce((sum, _, use) => sum + bins.uses[use][bin], 0) / bins.steps[bin]);
  }
  axes(area, top, begin, end, clock);
  const x = (time) => LEFT + (time - begin) / (end - begin) * (width - LEFT);
  const scale = (height - BOTTOM - TOP) / top;
  const bar = (from, to, tokens) => {
    let y = height - BOTTOM;
    for (let use = 0; use < 4; use++) {
      const size = tokens(use) * scale;
      pen.fillStyle = colours[USES[use]];
      pen.fillRect(from, y - size, to - from, size);
      y -= size;
    }
  };
  if (isSingle) {
    const ring = rings[0][1];
    for (let i = ring.countUntil(begin), last = ring.countUntil(end); i < last; i++) {
      const from = Math.max(LEFT, x(ring.end(i) - ring.at(3, i)));
      bar(from, Math.max(from + 1, x(ring.end(i)) - 0.5), (use) => ring.at(5 + use, i));
    }
  } else {
    const size = (width - LEFT) / bins.num;
    for (let bin = 0; bin < bins.num; bin++) {
      if (bins.steps[bin]) bar(LEFT + bin * size, LEFT + (bin + 1) * size - 0.5, (use) => bins.uses[use][bin] / bins.steps[bin]);
    }
  }
  if (selected && selected.time > begin && selected.time <= end) {
    const at = Math.round(x(selected.time)) - 0.5;
    pen.strokeStyle = colours.text; pen.lineWidth = 2;
    pen.beginPath(); pen.moveTo(at, TOP); pen.lineTo(at, height - BOTTOM); pen.stroke();
    pen.fillStyle = colours.text;
    pen.beginPath(); pen.moveTo(at - 5, 0); pen.lineTo(at + 5, 0); pen.lineTo(at, 7); pen.fill();
  }
  return isSingle;
}

// KV blocks by owner, as stacked areas.
export function drawBlocks(canvas, bins, clock) {
  const area = prepare(canvas), { pen, width, height } = area;
  let top = 1;
  for (let bin = 0; bin < bins.num; bin++) top = Math.max(top, bins.owners[0][bin] + bins.owners[1][bin] + bins.owners[2][bin]);
  const size = (width - LEFT) / bins.num, scale = (height - BOTTOM - TOP) / top;
  for (let bin = 0; bin < bins.num; bin++) {
    let y = height - BOTTOM;
    for (let owner = 0; owner < 3; owner++) {
      const part = bins.owners[owner][bin] * scale;
      pen.fillStyle = colours[OWNERS[owner]];
      pen.fillRect(LEFT + bin * size, y - part, size + 0.5, part);
      y -= part;
    }
  }
  axes(area, top, bins.begin, bins.end, clock);
}
