"use strict";
const page = JSON.parse(document.getElementById("page-data").textContent);

function unitFor(span) {
  return span >= 1e6 ? ["s", 1e6] : span >= 1e3 ? ["ms", 1e3] : ["us", 1];
}
function three(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}
function timeText(microseconds) {
  const [name, factor] = unitFor(Math.abs(microseconds));
  return three(microseconds / factor) + " " + name;
}
function roundStep(span, about) {
  const rough = span / about, power = Math.pow(10, Math.floor(Math.log10(rough)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
}

// The figures: SVG made of elements and text, so that nothing in a name can be markup.
(() => {
  const WIDTH = 900;
  function mark(parent, name, attributes, text, tip) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (tip) mark(element, "title", {}, tip);
    parent.appendChild(element);
    return element;
  }
  function drawing(id, label, width, height) {
    const attributes = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label };
    return mark(document.getElementById(id), "svg", { ...attributes, class: width > 600 ? "figure broad" : "figure" });
  }
  function number(value) {
    return value >= 999.5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }
  function vertical(svg, y, top, scale, left, right, title) {
    const step = roundStep(top / scale, 5);
    for (let i = 0; i * step * scale <= top; i += 1) {
      const place = y(i * step * scale);
      mark(svg, "line", { x1: left, y1: place, x2: right, y2: place, class: i ? "grid" : "rule" });
      mark(svg, "text", { x: left - 6, y: place + 4, class: "end" }, number(i * step));
    }
    const middle = (y(0) + y(top)) / 2;
    mark(svg, "text", { transform: `translate(12 ${middle}) rotate(-90)`, class: "upright" }, title);
  }

  function drawSteps(steps) {
    const [name, factor] = unitFor(steps.top), [left, right, above, below] = [62, WIDTH - 70, 14, 214];
    const top = steps.top * 1.05, many = steps.points.length < steps.count;
    const [worst, longest] = steps.longest;
    const svg = drawing("step-times", `${steps.count} steps, half of them above ${timeText(steps.usual)}, the longest `
      + timeText(longest), WIDTH, 260);
    const x = (step) => left + (right - left) * (step + 0.5) / steps.count;
    const y = (time) => below - (below - above) * Math.min(time, top) / top;
    vertical(svg, y, top, factor, left, right, `time per step (${name})`);
    const apart = Math.max(1, roundStep(steps.count, 10));
    for (let step = 0; step < steps.count; step += apart) {
      mark(svg, "text", { x: x(step), y: below + 16, class: "middle" }, number(step));
    }
    mark(svg, "text", { x: (left + right) / 2, y: below + 36, class: "middle axis" }, "step");
    const path = (points) => points.map(([at, time], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(time).toFixed(1)}`);
    if (many) {
      const high = steps.points.map((one) => [one[0], one[3]]), low = steps.points.map((one) => [one[0], one[1]]);
      mark(svg, "path", { d: path([...high, ...low.reverse()]).join("") + "z", class: "band" });
    }
    mark(svg, "path", { d: path(steps.points.map((one) => [one[0], one[2]])).join(""), class: "curve" });
    const size = steps.count <= 150 ? 5 : 3;
    for (const [at, , median, high] of steps.points) {
      if (high > top) mark(svg, "path", { d: `M${x(at) - 4} 12h8l-4 -8z`, class: "beyond" }, undefined, timeText(high));
      if (many || median > top) continue;
      const place = { x: x(at) - size / 2, y: y(median) - size / 2, width: size, height: size, class: "point" };
      mark(svg, "rect", place, undefined, `step ${at}: ${timeText(median)}`);
    }
    if (longest > top) {
      const start = x(worst) < WIDTH / 2, text = `beyond the scale: step ${worst} with ${timeText(longest)}`;
      mark(svg, "text", { x: x(worst) + (start ? 9 : -9), y: 11, class: start ? "small" : "small end" }, text);
    }
    mark(svg, "line", { x1: left, y1: y(steps.usual), x2: right, y2: y(steps.usual), class: "median" });
    mark(svg, "text", { x: right + 6, y: y(steps.usual) + 4, class: "small" }, `p50 ${timeText(steps.usual)}`);
  }

  function drawTensors(tensors) {
    const sums = tensors.map(([, parts]) => parts.reduce((a, b) => a + b, 0)), top = Math.max(...sums, 1e-3);
    const [name, factor] = unitFor(top), [left, right, line] = [250, WIDTH - 76, 20], below = line * tensors.length + 4;
    const svg = drawing("tensor-phases", `The ${tensors.length} tensors with the most time, by phase`, WIDTH, below + 46);
    const x = (time) => left + (right - left) * time / top, step = roundStep(top / factor, 6);
    for (let i = 0; i * step * factor <= top; i += 1) {
      const place = x(i * step * factor);
      mark(svg, "line", { x1: place, y1: 0, x2: place, y2: below, class: "grid" });
      mark(svg, "text", { x: place, y: below + 15, class: "middle" }, number(i * step));
    }
    mark(svg, "text", { x: (left + right) / 2, y: below + 36, class: "middle axis" },
      `sum over all operations (${name}); operations of a fused batch run at the same time`);
    tensors.forEach(([tensor, parts], index) => {
      const y = index * line + 3;
      let done = 0;
      mark(svg, "text", { x: left - 8, y: y + 12, class: "end" }, tensor);
      parts.forEach((time, group) => {
        if (!time) return;
        const place = { x: x(done), y, width: x(done + time) - x(done), height: line - 5, class: `g${group}` };
        mark(svg, "rect", place, undefined, `${tensor}, ${page.groupNames[group]}: ${timeText(time)}`);
        done += time;
      });
      mark(svg, "text", { x: x(done) + 5, y: y + 12, class: "small" }, timeText(done));
    });
  }

  if (page.steps) drawSteps(page.steps);
  drawTensors(page.tensors);
})();

// Operation by operation: a canvas that zooms.
(() => {
  const data = page.lanes;
  const root = document.getElementById("lanes");
  if (!root || !data.operations.length) return;

  const [LANE, KIND, BEGIN, NEGOTIATED, START, END, BYTES, PHASES, LAST_RANK, LATE] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
  const AXIS = 30, ROW = 22, SHORTEST = 1;
  const canvas = document.getElementById("canvas");
  const scroller = document.getElementById("scroller");
  const spacer = document.getElementById("spacer");
  const shown = document.getElementById("shown");
  const tip = document.getElementById("tip");
  const details = document.getElementById("details");
  const surface = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const colours = page.groupNames.map((_, group) => colour("g" + group));
  const byLane = data.lanes.map(() => []);
  for (const operation of data.operations) byLane[operation[LANE]].push(operation);

  const view = { first: 0, last: data.length };
  let width = 0, height = 0, label = 230, waiting = false, chosen = null;

  root.classList.add("interactive");
  const total = AXIS + data.lanes.length * ROW + 6;

  function bytesText(bytes) {
    if (bytes === null) return "size unknown";
    for (const [name, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (bytes >= factor) return three(bytes / factor) + " " + name;
    }
    return bytes + " B";
  }
  function placeText(time) {
    return ((data.origin + time) / 1e6).toFixed(6) + " s";
  }
  function x(time) {
    return label + (time - view.first) / (view.last - view.first) * (width - label);
  }
  function timeAt(place) {
    return view.first + (place - label) / (width - label) * (view.last - view.first);
  }
  function fits(text, room) {
    if (surface.measureText(text).width <= room) return text;
    let keep = Math.max(2, Math.floor(room / 6.5) - 1);
    for (;;) {
      const head = Math.floor(keep / 4);
      const cut = text.slice(0, head) + "…" + text.slice(text.length - (keep - head));
      if (keep <= 2 || surface.measureText(cut).width <= room) return cut;
      keep -= 1;
    }
  }

  function show(first, last) {
    const span = Math.min(Math.max(last - first, SHORTEST), data.length);
    view.first = Math.min(Math.max(first, 0), data.length - span);
    view.last = view.first + span;
    shown.textContent = placeText(view.first) + " to " + placeText(view.last) + " (" + timeText(span) + ")";
    request();
  }
  function zoom(factor, around) {
    const centre = around === undefined ? (view.first + view.last) / 2 : around;
    const span = Math.min(Math.max((view.last - view.first) * factor, SHORTEST), data.length);
    const share = (centre - view.first) / (view.last - view.first);
    show(centre - share * span, centre + (1 - share) * span);
  }
  function pan(share) {
    const by = (view.last - view.first) * share;
    show(view.first + by, view.last + by);
  }
  function request() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function bar(first, last, top, deep, colour) {
    const left = Math.max(x(first), label), right = Math.min(x(last), width);
    if (right < label || left > width) return;
    surface.fillStyle = colour;
    surface.fillRect(left, top, Math.max(right - left, 0.8), deep);
  }
  function drawOperation(operation, top) {
    bar(operation[START], operation[END], top + 3, ROW - 6, colour("rest"));
    if (operation[NEGOTIATED] !== null) bar(operation[BEGIN], operation[NEGOTIATED], top + 3, ROW - 6, colours[0]);
    const phases = operation[PHASES];
    for (let i = 0; i < phases.length; i += 3) {
      bar(phases[i + 1], phases[i + 2], top + 3, ROW - 6, colours[data.groups[phases[i]]]);
    }
    if (operation === chosen) {
      const left = Math.max(x(operation[BEGIN]), label);
      surface.strokeStyle = colour("ink");
      surface.lineWidth = 2;
      surface.strokeRect(left, top + 2, Math.max(Math.min(x(operation[END]), width) - left, 2), ROW - 4);
      surface.lineWidth = 1;
    }
  }
  function tickTimes() {
    const [name, factor] = unitFor(view.last - view.first);
    const step = roundStep((view.last - view.first) / factor, Math.max(2, (width - label) / 110));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = Math.ceil(view.first / factor / step); i * step * factor <= view.last; i += 1) {
      ticks.push([x(i * step * factor), (i * step).toFixed(decimals)]);
    }
    return [name, ticks];
  }
  function drawGrid(ticks, bottom) {
    surface.fillStyle = colour("grid");
    for (const [place] of ticks) surface.fillRect(place, AXIS, 1, bottom - AXIS);
  }
  function drawAxis(name, ticks) {
    surface.fillStyle = colour("ink");
    surface.textAlign = "center";
    for (const [place, text] of ticks) {
      if (place < width - 12) surface.fillText(text, place, 13);
    }
    surface.textAlign = "left";
    surface.fillText("time in the window (" + name + ")", 8, 13);
    surface.fillStyle = colour("edge");
    for (const cycle of data.cycles) {
      if (cycle >= view.first && cycle <= view.last) surface.fillRect(x(cycle), AXIS - 6, 1, 5);
    }
  }
  function drawSteps(bottom) {
    let free = label;
    surface.textAlign = "left";
    for (const [number, time] of data.steps) {
      if (time < view.first || time > view.last) continue;
      const place = x(time);
      surface.fillStyle = colour("mark");
      for (let y = AXIS; y < bottom; y += 6) surface.fillRect(place, y, 1, 3);
      if (place >= free && place < width - 50) {
        surface.fillText("step " + number, place + 3, 25);
        free = place + 70;
      }
    }
  }
  function draw() {
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = height + "px";
    }
    surface.setTransform(scale, 0, 0, scale, 0, 0);
    surface.font = "12px system-ui, sans-serif";
    surface.fillStyle = colour("paper");
    surface.fillRect(0, 0, width, height);
    const down = scroller.scrollTop;
    const bottom = Math.min(height, total - down - 6);
    const firstLane = Math.max(0, Math.floor(down / ROW));
    const lastLane = Math.min(data.lanes.length - 1, Math.floor((down + height - AXIS) / ROW));
    for (let lane = firstLane; lane <= lastLane; lane += 1) {
      if (lane % 2) {
        surface.fillStyle = colour("wash");
        surface.fillRect(0, AXIS + lane * ROW - down, width, ROW);
      }
    }
    const [name, ticks] = tickTimes();
    drawGrid(ticks, bottom);
    surface.save();
    surface.beginPath();
    surface.rect(0, AXIS, width, height - AXIS);
    surface.clip();
    for (let lane = firstLane; lane <= lastLane; lane += 1) {
      const top = AXIS + lane * ROW - down;
      for (const operation of byLane[lane]) {
        if (operation[BEGIN] <= view.last && operation[END] >= view.first) drawOperation(operation, top);
      }
      surface.textAlign = "left";
      surface.fillStyle = colour("ink");
      surface.fillText(fits(data.lanes[lane], label - 16), 8, top + 15);
    }
    surface.restore();
    drawAxis(name, ticks);
    drawSteps(bottom);
  }

  function find(event) {
    const box = canvas.getBoundingClientRect();
    const left = event.clientX - box.left, y = event.clientY - box.top;
    const lane = Math.floor((y - AXIS + scroller.scrollTop) / ROW);
    if (y < AXIS || left < 0 || lane < 0 || lane >= data.lanes.length) return null;
    if (left < label) return { lane };
    const time = timeAt(left), near = (view.last - view.first) / (width - label) * 3;
    let best = null, distance = Infinity;
    for (const operation of byLane[lane]) {
      const away = Math.max(operation[BEGIN] - time, time - operation[END], 0);
      if (away <= near && away <= distance) { best = operation; distance = away; }
    }
    return best ? { lane, operation: best, time } : null;
  }
  function phaseAt(operation, time) {
    if (operation[NEGOTIATED] !== null && time <= operation[NEGOTIATED]) {
      return ["NEGOTIATE_" + data.words[operation[KIND]], operation[BEGIN], operation[NEGOTIATED]];
    }
    const phases = operation[PHASES];
    let best = null;
    for (let i = 0; i < phases.length; i += 3) {
      const inside = phases[i + 1] <= time && time <= phases[i + 2];
      if (inside && (!best || phases[i + 2] - phases[i + 1] < best[2] - best[1])) {
        best = [data.words[phases[i]], phases[i + 1], phases[i + 2]];
      }
    }
    return best;
  }
  function hover(event) {
    const found = find(event);
    if (!found) { tip.style.display = "none"; return; }
    const lines = [data.lanes[found.lane]];
    if (found.operation) {
      const operation = found.operation, phase = phaseAt(operation, found.time);
      lines.push(data.words[operation[KIND]] + ", " + bytesText(operation[BYTES]) + ", "
        + timeText(operation[END] - operation[BEGIN]) + " in all");
      if (phase) lines.push(phase[0] + ": " + timeText(phase[2] - phase[1]));
      if (operation[LAST_RANK] !== null) {
        lines.push("last: rank " + operation[LAST_RANK] + ", " + timeText(operation[LATE]) + " after the first");
      }
    }
    tip.textContent = lines.join("\n");
    tip.style.display = "block";
    const wide = tip.offsetWidth, deep = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8)) + "px";
    const under = event.clientY + 18;
    tip.style.top = (under + deep > window.innerHeight ? event.clientY - deep - 10 : under) + "px";
  }
  function row(table, cells, heading) {
    const line = table.insertRow();
    cells.forEach((text, index) => {
      const cell = document.createElement(heading || index === 0 ? "th" : "td");
      cell.textContent = text;
      if (heading && index === 0) cell.className = "left";
      if (heading) cell.scope = "col"; else if (index === 0) cell.scope = "row";
      line.appendChild(cell);
    });
  }
  function choose(operation) {
    chosen = operation;
    details.textContent = "";
    if (operation) {
      const table = document.createElement("table");
      const caption = table.createCaption();
      caption.textContent = data.words[operation[KIND]] + " of " + data.lanes[operation[LANE]] + ", "
        + bytesText(operation[BYTES]) + ", " + timeText(operation[END] - operation[BEGIN]) + " from "
        + placeText(operation[BEGIN]);
      const head = table.createTHead();
      row(head, ["phase", "after the start", "time"], true);
      const body = table.createTBody();
      if (operation[NEGOTIATED] !== null) {
        row(body, ["NEGOTIATE_" + data.words[operation[KIND]], timeText(0),
          timeText(operation[NEGOTIATED] - operation[BEGIN])]);
      }
      const phases = operation[PHASES];
      for (let i = 0; i < phases.length; i += 3) {
        row(body, [data.words[phases[i]], timeText(phases[i + 1] - operation[BEGIN]),
          timeText(phases[i + 2] - phases[i + 1])]);
      }
      details.appendChild(table);
    }
    request();
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, first: view.first, last: view.last, down: scroller.scrollTop, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { hover(event); return; }
    const right = event.clientX - drag.x, below = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(right, below) < 4) return;
    drag.moved = true;
    canvas.classList.add("dragged");
    tip.style.display = "none";
    const by = right / (width - label) * (drag.last - drag.first);
    scroller.scrollTop = drag.down - below;
    show(drag.first - by, drag.last - by);
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved;
    drag = null;
    canvas.classList.remove("dragged");
    if (clicked) {
      const found = find(event);
      choose(found && found.operation ? found.operation : null);
    }
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragged"); });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("wheel", (event) => {
    tip.style.display = "none";
    const box = canvas.getBoundingClientRect();
    if (event.clientX - box.left < label) return;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / (width - label));
      return;
    }
    const whole = view.last - view.first >= data.length;
    if (event.deltaY > 0 && whole) return;
    event.preventDefault();
    zoom(Math.pow(1.0015, event.deltaY), timeAt(event.clientX - box.left));
  }, { passive: false });
  const actions = {
    "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), earlier: () => pan(-0.5), later: () => pan(0.5),
    whole: () => show(0, data.length),
  };
  for (const button of root.querySelectorAll("button[data-action]")) {
    button.addEventListener("click", actions[button.dataset.action]);
  }
  const keys = {
    "+": actions["zoom-in"], "=": actions["zoom-in"], "-": actions["zoom-out"], ArrowLeft: () => pan(-0.2),
    ArrowRight: () => pan(0.2), ArrowUp: () => { scroller.scrollTop -= 2 * ROW; },
    ArrowDown: () => { scroller.scrollTop += 2 * ROW; }, Home: actions.whole, 0: actions.whole, Escape: () => choose(null),
  };
  canvas.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  scroller.addEventListener("scroll", request);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", request);
  function resize() {
    width = scroller.clientWidth;
    label = Math.min(230, width * 0.3);
    height = Math.min(total, 560);
    spacer.style.height = Math.max(0, total - height) + "px";
    request();
  }
  new ResizeObserver(resize).observe(scroller);
  resize();
  show(0, data.length);
})();
