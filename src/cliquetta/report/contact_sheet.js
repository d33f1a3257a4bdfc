"use strict";
// Shows a part of the images at a time: 20,000 of them are 100 tiles, and text that waits.
const PER_PAGE = 100;
const data = JSON.parse(document.getElementById("images").textContent);
const controls = document.getElementById("controls");
const tiles = document.getElementById("tiles");
const status = document.getElementById("status");
const previous = document.getElementById("previous");
const next = document.getElementById("next");
let chosen = [];
let page = 0;

function value(name) {
  const control = controls.elements[name];
  return control ? control.value : "";
}

// Pictures are kept as lines of text, some hundred in a block, and read when they are shown.
const blocks = new Map();
function picture(image) {
  const number = Math.floor(image / data.block);
  if (!blocks.has(number)) {
    const block = document.getElementById("pictures-" + number);
    blocks.set(number, block.textContent.trim().split("\n"));
    if (blocks.size > 40) blocks.delete(blocks.keys().next().value);
  }
  return blocks.get(number)[image % data.block];
}

// What adapting did to an image: its class, and whether that is right, where it is known.
function change(image, method) {
  const before = data.zero_shot ? data.zero_shot[image] : null;
  const after = data.predictions[method][image];
  const label = data.labels ? data.labels[image] : -1;
  if (before === null || before === after) return "same";
  if (label < 0) return "moved";
  if (after === label) return "repaired";
  return before === label ? "broken" : "moved";
}

function matches(image, method) {
  const predicted = data.predictions[method][image];
  const label = data.labels ? data.labels[image] : -1;
  const wanted = (name, index) => value(name) === "" || Number(value(name)) === index;
  if (!wanted("predicted", predicted)) return false;
  if (!wanted("folder", data.folders ? data.folders[image] : 0)) return false;
  if (!wanted("label", label)) return false;
  const truth = value("truth");
  if (truth === "right" && predicted !== label) return false;
  if (truth === "wrong" && (label < 0 || predicted === label)) return false;
  const changed = value("changed");
  const kind = changed === "" ? "" : change(image, method);
  if (changed === "changed") return kind !== "same";
  return changed === "" || kind === changed;
}

function choose() {
  const method = Number(value("method") || 0);
  chosen = [];
  for (let image = 0; image < data.paths.length; image++) {
    if (matches(image, method)) chosen.push(image);
  }
  const sure = data.probabilities[method];
  if (value("sort") === "most") chosen.sort((one, other) => sure[other] - sure[one]);
  if (value("sort") === "least") chosen.sort((one, other) => sure[one] - sure[other]);
  page = 0;
  show();
}

function line(text, kind) {
  const part = document.createElement("span");
  part.textContent = text;
  if (kind) part.className = kind;
  return part;
}

function tile(image) {
  const method = Number(value("method") || 0);
  const label = data.labels ? data.labels[image] : -1;
  const name = index => data.classes[index];
  const kind = change(image, method);
  const wrong = label >= 0 && data.predictions[method][image] !== label;
  const item = document.createElement("li");
  item.className = "tile " + kind + (wrong ? " wrong" : "");
  item.title = data.paths[image];
  const source = picture(image);
  if (source === "-") {
    item.append(line("no picture", "note"));
  } else {
    const img = document.createElement("img");
    img.loading = "lazy";
    img.alt = data.paths[image];
    img.src = "data:image/webp;base64," + source;
    item.append(img);
  }
  data.methods.forEach((who, number) => {
    const sign = label < 0 ? "" : data.predictions[number][image] === label ? "✓ " : "✗ ";
    const words = (who ? who + ": " : "") + name(data.predictions[number][image]);
    const percent = Math.round(100 * data.probabilities[number][image]);
    item.append(line(sign + words + " " + percent + "\u00a0%", "prediction"));
  });
  if (data.zero_shot) {
    const percent = Math.round(100 * data.zero_shot_probabilities[image]);
    item.append(line("zero-shot: " + name(data.zero_shot[image]) + " " + percent + "\u00a0%"));
  }
  if (data.labels) item.append(line(label < 0 ? "no label" : "is " + name(label), "truth"));
  item.append(line(data.paths[image].split("/").pop(), "note"));
  return item;
}

function show() {
  const pages = Math.max(1, Math.ceil(chosen.length / PER_PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  const first = page * PER_PAGE;
  const part = chosen.slice(first, first + PER_PAGE);
  tiles.replaceChildren(...part.map(tile));
  const count = chosen.length.toLocaleString("en");
  const range = (first + 1).toLocaleString("en") + " to " +
    (first + part.length).toLocaleString("en") + " of ";
  status.textContent = (part.length ? range : "") + count + (chosen.length === 1 ? " image" : " images");
  previous.disabled = page === 0;
  next.disabled = page === pages - 1;
}

controls.addEventListener("change", choose);
controls.addEventListener("submit", event => event.preventDefault());
previous.addEventListener("click", () => { page -= 1; show(); });
next.addEventListener("click", () => { page += 1; show(); });
choose();
