// The status row of a VC Attention Patch node: an element that both of ComfyUI's node renderers show as a widget.

const CLASS = "vc-attention-status";
const HEIGHT = 44; // two lines of text and a bar
const MARGIN = 8; // around the row in the classic renderer, which takes it from the widget's height

const STYLE = `
.${CLASS} { box-sizing: border-box; width: 100%; height: 100%; max-height: ${HEIGHT}px; padding: 5px 8px; border-radius: 6px;
  overflow: hidden; font-size: 11px; line-height: 15px; color: var(--input-text, #ddd);
  background: var(--comfy-input-bg, #222); border-left: 3px solid var(--vc-level); cursor: default; user-select: none;
  --vc-level: var(--descrip-text, #999); }
.${CLASS}[data-level="active"] { --vc-level: var(--p-green-500, #22c55e); }
.${CLASS}[data-level="idle"] { --vc-level: var(--p-orange-500, #f97316); }
.${CLASS}[data-level="none"] .vc-bar { visibility: hidden; }
.${CLASS} > div { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.${CLASS} .vc-head { font-weight: 600; }
.${CLASS}[data-level="idle"] .vc-head { color: var(--vc-level); }
.${CLASS} .vc-rest { color: var(--descrip-text, #999); }
.${CLASS} .vc-bar { height: 3px; margin-top: 1px; border-radius: 2px; background: var(--border-color, #444); }
.${CLASS} .vc-bar > i { display: block; height: 100%; border-radius: 2px; background: var(--vc-level); }
`;

function addStyle() {
  if (document.getElementById(CLASS)) return;
  const style = document.createElement("style");
  style.id = CLASS;
  style.textContent = STYLE;
  document.head.append(style);
}

function child(parent, name) {
  const made = document.createElement("div");
  made.className = name;
  parent.append(made);
  return made;
}

// Adds the row as the node's last widget. It is never saved and never part of a prompt.
export function addStatusLine(node, say) {
  addStyle();
  const element = document.createElement("div");
  element.className = CLASS;
  element.setAttribute("role", "status");
  const parts = { head: child(element, "vc-head"), rest: child(element, "vc-rest"), bar: child(element, "vc-bar") };
  parts.share = parts.bar.appendChild(document.createElement("i"));
  const widget = node.addDOMWidget("vc_attention_status", "VC_ATTENTION_STATUS", element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => HEIGHT + 2 * MARGIN,
    getMaxHeight: () => HEIGHT + 2 * MARGIN,
  });
  widget.serialize = false;
  const show = (status) => draw(element, parts, status, say);
  show(null);
  return show;
}

function draw(element, parts, status, say) {
  const text = describe(status, say);
  element.dataset.level = text.level;
  element.dataset.state = status?.state ?? "none";
  element.title = text.hover;
  parts.head.textContent = text.head;
  parts.rest.textContent = text.rest;
  parts.share.style.width = `${text.percent}%`;
}

// What the row says. Plain text from plain numbers, so that it can be read without a page.
export function describe(status, say) {
  if (!status) return { level: "none", head: say("none"), rest: "", hover: "", percent: 0 };
  if (status.state === "off") return { level: "none", head: say("off"), rest: "", hover: "", percent: 0 };
  const running = status.state === "running";
  const calls = status.accelerated + status.declined;
  const active = status.accelerated > 0;
  const waiting = running && calls === 0;
  const mode = status.modes.map((served) => served.join(" · ")).join(", ");
  const where = running ? say("step", status) : status.state === "stopped" ? say("stopped", status) : "";
  const head = active ? mode : waiting ? say("starting") : say("idle");
  const percent = Math.round(100 * status.share);
  const well = active && !status.fault;
  const rest = well
    ? say("counts", { ...status, calls, percent })
    : waiting
      ? ""
      : say("causeCounts", { ...status, calls, cause: cause(status) });
  return {
    level: well ? "active" : waiting ? "none" : "idle",
    head: where ? `${head} · ${where}` : head,
    rest,
    hover: hover(status, say),
    percent: active ? percent : 0,
  };
}

function cause(status) {
  if (status.fault) return status.fault;
  const told = status.lines[0] ?? "";
  const after = told.indexOf("): ");
  return after >= 0 ? told.slice(after + 3) : (status.reasons[0]?.[0] ?? told);
}

function hover(status, say) {
  if (status.lines.length) return status.lines.join("\n");
  const reasons = status.reasons.map(([reason, count]) => `${count} × ${reason}`);
  return reasons.length ? [say("left"), ...reasons].join("\n") : "";
}
