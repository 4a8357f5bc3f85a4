// The page's side of VC Attention: puts each run's status on its node, and holds the pack's one setting.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { addStatusLine } from "./status_line.js";

const NODE = "VCAttentionPatch";
const EVENT = "vc_attention.status";
const TEXT_WIDGET = "$$node-text-preview"; // the frontend's own, for a server's progress text
const LEVELS = { default: "as ComfyUI's own", warning: "warnings only", info: "info", debug: "debug" };

// main.json of locales/<language> has the same keys.
const ENGLISH = {
  none: "no render yet",
  starting: "sampling starts",
  step: "step {step} of {steps}",
  stopped: "stopped at step {step} of {steps}",
  counts: "{accelerated} of {calls} calls · {groupings} regroupings · {percent} % of the time",
  idle: "not active",
  off: "off",
  causeCounts: "{accelerated} of {calls} calls: {cause}",
  left: "Left to the attention before:",
};

let texts = ENGLISH;
const statuses = new Map(); // "workflow/node" -> the last status
const lines = new WeakMap(); // node -> shows a status in its row
const heights = new WeakMap(); // node -> its height while it was running

function say(key, values = {}) {
  const text = texts[key] ?? ENGLISH[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

const rootGraph = () => app.rootGraph ?? app.graph;

// "12:7" is node 7 inside the subgraph node 12.
function findNode(path) {
  let graph = rootGraph();
  let node;
  for (const id of path.split(":")) {
    node = graph?.getNodeById?.(Number.isNaN(Number(id)) ? id : Number(id));
    graph = node?.subgraph;
  }
  return node;
}

// A prompt that names no workflow is its sender's alone: node ids repeat from workflow to workflow.
function isForThisPage(status) {
  return Boolean(status.workflow) || status.client === (api.clientId ?? api.initialClientId);
}

function show(status) {
  if (status.workflow && status.workflow !== rootGraph()?.id) return; // another tab's workflow
  const node = findNode(status.node);
  if (!lines.has(node)) return;
  lines.get(node)(status);
  if (status.state === "running") heights.set(node, node.size[1]);
}

// The row shows the report, in full under the pointer: without this the node would carry it twice. The frontend adds
// its text widget in its own handler of the same event, hence the wait.
function dropText({ detail }) {
  setTimeout(() => {
    const node = findNode(String(detail?.nodeId));
    const index = lines.has(node) ? node.widgets.findIndex((widget) => widget.name === TEXT_WIDGET) : -1;
    if (index < 0) return;
    node.widgets[index].onRemove?.();
    node.widgets.splice(index, 1);
    node.setSize([node.size[0], Math.min(node.size[1], heights.get(node) ?? node.size[1])]);
    node.setDirtyCanvas?.(true, true);
  });
}

function keep(status) {
  statuses.set(`${status.workflow}/${status.node}`, status);
}

async function fetchTexts() {
  const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
  if (language === "en") return;
  const all = await (await api.fetchApi("/i18n")).json();
  texts = { ...ENGLISH, ...(all[language]?.vcAttention ?? {}) };
}

async function fetchStatuses() {
  const answer = await api.fetchApi("/vc_attention/status");
  if (!answer.ok) return;
  for (const status of (await answer.json()).statuses) {
    if (isForThisPage(status) && !statuses.has(`${status.workflow}/${status.node}`)) keep(status);
  }
}

app.registerExtension({
  name: "VCAttention",
  settings: [
    {
      id: "VCAttention.LogLevel",
      category: ["VC Attention", "Log", "LogLevel"],
      name: "Log level",
      tooltip: "How much VC Attention writes to ComfyUI's log. Takes effect at once, and whenever a page is opened.",
      type: "combo",
      options: Object.entries(LEVELS).map(([value, text]) => ({ value, text })),
      defaultValue: "default",
      onChange: (level, before) => {
        if (level === "default" && (before === undefined || before === level)) return;
        api.fetchApi("/vc_attention/log_level", {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify({ level }),
        });
      },
    },
  ],
  async setup() {
    api.addEventListener(EVENT, ({ detail }) => {
      if (!isForThisPage(detail)) return;
      keep(detail);
      show(detail);
    });
    api.addEventListener("progress_text", dropText);
    await Promise.allSettled([fetchTexts(), fetchStatuses()]);
    statuses.forEach(show);
  },
  nodeCreated(node) {
    if (node.comfyClass === NODE) lines.set(node, addStatusLine(node, say));
  },
  afterConfigureGraph() {
    statuses.forEach(show);
  },
});
