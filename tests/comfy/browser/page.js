// What the tests and the builder of the workflows do inside the page, through the frontend's own API.
window.vc = (() => {
  const GAP = 24, TITLE = 30, GROUP_PADDING = 20, GROUP_HEAD = 64, COLUMN_GAP = 60;

  function widget(node, name) {
    const found = node.widgets?.find((w) => w.name === name);
    if (!found) throw new Error(`${node.type} has no widget ${name}`);
    return found;
  }

  function setWidget(node, name, value) {
    const w = widget(node, name);
    w.value = value;
    w.callback?.(value, app.canvas, node);
  }

  function widgets(node) {
    return Object.fromEntries((node.widgets ?? []).map((w) => [w.name, w.value]));
  }

  function addNode(description) {
    const node = LiteGraph.createNode(description.type);
    if (!node) throw new Error(`the frontend knows no node ${description.type}`);
    if (description.title) node.title = description.title;
    app.graph.add(node);
    for (const [name, value] of Object.entries(description.widgets ?? {})) setWidget(node, name, value);
    if (description.models) node.properties.models = description.models;
    if (description.color) Object.assign(node, LGraphCanvas.node_colors[description.color]);
    return node;
  }

  function placeColumn(column, nodes, x, top) {
    const width = column.width ?? 320;
    let y = top;
    for (const key of column.nodes) {
      const node = nodes[key.name];
      const height = key.tall ?? node.computeSize()[1];
      node.pos = [x, y + TITLE];
      node.setSize([Math.max(width, node.computeSize()[0]), Math.max(height, node.computeSize()[1])]);
      y += TITLE + node.size[1] + GAP;
    }
    const widest = Math.max(...column.nodes.map((key) => nodes[key.name].size[0]));
    if (column.title) {
      const group = new LiteGraph.LGraphGroup(column.title);
      group.pos = [x - GROUP_PADDING, top - GROUP_HEAD + TITLE];
      group.size = [widest + 2 * GROUP_PADDING, y - top + GROUP_HEAD - TITLE - GAP + GROUP_PADDING];
      if (column.color) group.color = column.color;
      app.graph.add(group);
    }
    return { width: widest, bottom: y };
  }

  // Columns of nodes, left to right; a column is a group, or several groups below each other.
  function build(graph) {
    app.graph.clear();
    app.graph.id = crypto.randomUUID();
    const nodes = {};
    let x = 0;
    for (const stack of graph.columns) {
      let top = 0, widest = 0;
      for (const column of stack) {
        for (const description of column.nodes) nodes[description.name] = addNode(description);
        const { width, bottom } = placeColumn(column, nodes, x, top);
        widest = Math.max(widest, width);
        top = bottom + GROUP_HEAD;
      }
      x += widest + COLUMN_GAP + 2 * GROUP_PADDING;
    }
    for (const [from, output, to, input] of graph.links) {
      const slot = nodes[from].findOutputSlot(output);
      if (slot < 0) throw new Error(`${from} has no output ${output}`);
      if (!nodes[from].connect(slot, nodes[to], input)) throw new Error(`${from} ${output} does not fit ${to} ${input}`);
    }
    for (const description of graph.columns.flat().flatMap((column) => column.nodes)) {
      // Again: connecting a widget may have reset others.
      for (const [name, value] of Object.entries(description.widgets ?? {})) setWidget(nodes[description.name], name, value);
    }
    app.graph.setDirtyCanvas(true, true);
  }

  function fit() {
    const boxes = [...app.graph._nodes, ...app.graph._groups].map((item) => item.boundingRect ?? item._bounding);
    const left = Math.min(...boxes.map((b) => b[0])), top = Math.min(...boxes.map((b) => b[1]));
    const right = Math.max(...boxes.map((b) => b[0] + b[2])), bottom = Math.max(...boxes.map((b) => b[1] + b[3]));
    const element = app.canvas.canvas.getBoundingClientRect();
    const scale = Math.min(element.width / (right - left + 80), element.height / (bottom - top + 80), 1);
    app.canvas.ds.scale = scale;
    app.canvas.ds.offset = [40 - left, 40 - top + 40 / scale];
    app.canvas.setDirty(true, true);
    return [right - left, bottom - top];
  }

  function byType(type) {
    return app.graph._nodes.filter((node) => node.type === type);
  }

  // Where a node's part is on the screen: [x, y] in canvas units of the node, from its top left corner.
  function onScreen(node, [x, y]) {
    const { scale, offset } = app.canvas.ds;
    const element = app.canvas.canvas.getBoundingClientRect();
    return [(node.pos[0] + x + offset[0]) * scale + element.left, (node.pos[1] + y + offset[1]) * scale + element.top];
  }

  function view(x, y, scale = 1) {
    app.canvas.ds.scale = scale;
    app.canvas.ds.offset = [x, y];
    app.canvas.setDirty(true, true);
  }

  // What a user reads on the node.
  function status(node) {
    return node.widgets?.find((w) => w.name === "vc_attention_status")?.element?.innerText ?? "";
  }

  // How the prompts of this page ended, from now on.
  const endings = [];
  const progress = [];
  function watch() {
    endings.length = progress.length = 0;
    if (watch.on) return;
    watch.on = true;
    for (const kind of ["execution_success", "execution_interrupted", "execution_error"])
      app.api.addEventListener(kind, () => endings.push(kind));
    app.api.addEventListener("progress", ({ detail }) => progress.push(detail.value));
  }

  return { endings, progress, status, view, watch, addNode, build, byType, fit, onScreen, setWidget, widget, widgets };
})();
