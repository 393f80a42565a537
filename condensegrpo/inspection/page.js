"use strict";
// Shared by the pages: elements, numbers, the address and the colour scheme. Text reaches the page through textContent only.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("root");

/** An element with attributes (`on…`: a listener) and children; a string becomes text. */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `h`, of SVG. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) { // not as arguments: there may be more than a call takes
    if (child !== null && child !== undefined && child !== false) node.append(typeof child === "string" ? visible(child) : child);
  }
  return node;
}

/** A text with control and invisible characters, such as marks of the direction of writing, as visible signs. */
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (char) => {
    const code = char.codePointAt(0);
    if (char === "\n" || char === "\t") return char;
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A number with some significant digits. */
function digits(value, most = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(most)));
}

function counted(count, one, many) {
  return `${digits(count)} ${count === 1 ? one : many}`;
}

/** The settings behind the # of the address. */
function address() {
  return new URLSearchParams(location.hash.slice(1));
}

/** Put settings behind the #, without an entry in the history; null removes one. */
function setAddress(settings) {
  const parts = address();
  for (const [name, value] of Object.entries(settings)) {
    if (value === null || value === "") parts.delete(name);
    else parts.set(name, value);
  }
  const text = parts.toString().replaceAll("%2F", "/").replaceAll("%2C", ",").replaceAll("%3D", "=");
  history.replaceState(null, "", `${location.pathname}${location.search}${text ? `#${text}` : ""}`);
}

const PICTURE = /(\[image\/[a-z]+ [0-9a-f]{12}\])/;

/** A text with the pictures that the page holds in their places; `written` makes the nodes of the rest. */
function withPictures(text, pictures, written = (part) => [part]) {
  return text.split(PICTURE).flatMap((part) => (pictures[part] ? [h("img", { src: pictures[part], alt: part, title: part })] : written(part)));
}

/** Correct, wrong, malformed …: a word in the colour of its quality. */
function verdictOf({ verdict: [text, quality] }) {
  return h("b", { class: quality === "partial" ? "warn" : quality }, text);
}

/** A command with a button that copies it. */
function command(text) {
  const done = h("button", { type: "button", class: "quiet", onclick: copy }, "copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      done.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code); // no permission: it is selected, Ctrl-C copies it
      done.textContent = "selected";
    }
    setTimeout(() => (done.textContent = "copy"), 1500);
  }
  const code = h("code", {}, text);
  return h("span", { class: "command" }, code, done);
}

const SCHEMES = ["system", "light", "dark"];

/** The button that switches between light, dark and the system's colours. */
function schemeButton() {
  let scheme = "system";
  try {
    scheme = localStorage.getItem("scheme") ?? "system";
  } catch {} // a browser may refuse storage to files
  const button = h("button", { type: "button", class: "quiet", title: "light, dark or the system's colours", onclick: next });
  function next() {
    scheme = SCHEMES[(SCHEMES.indexOf(scheme) + 1) % SCHEMES.length];
    try {
      localStorage.setItem("scheme", scheme);
    } catch {}
    apply();
  }
  function apply() {
    if (scheme === "light" || scheme === "dark") document.documentElement.dataset.scheme = scheme;
    else delete document.documentElement.dataset.scheme;
    button.textContent = `colours: ${scheme}`;
  }
  apply();
  return button;
}
