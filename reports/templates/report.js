(function () {
  "use strict";
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const narrowScreen = window.matchMedia("(max-width: 640px)");
  const hidden = {};

  function theme() {
    return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
  }

  // A deep copy in the colours of the theme.
  function coloured(part) {
    if (Array.isArray(part)) return part.map(coloured);
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, coloured(value)]));
    }
    return theme() === "dark" && typeof part === "string" && page.dark[part] ? page.dark[part] : part;
  }

  function put(tree, path, value) {
    const steps = path.split(".");
    const last = steps.pop();
    let at = tree;
    for (const step of steps) at = at[step] = at[step] || {};
    at[last] = value;
  }

  function decoded(text) {
    return text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  function element(name, attributes) {
    const made = document.createElementNS("http:" + "//www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  const dashes = { dash: "6 3", dot: "2 3", dashdot: "6 3 2 3" };

  function swatch(trace) {
    const icon = element("svg", { width: 22, height: 12, "aria-hidden": "true" });
    const marker = trace.marker || {};
    const colour = typeof marker.color === "string" ? marker.color : (trace.line || {}).color;
    if (trace.type === "bar") {
      const edge = marker.line || {};
      const box = { x: 4.5, y: 0.5, width: 13, height: 11, rx: 2, fill: colour, "fill-opacity": marker.opacity || 1 };
      if (edge.width) Object.assign(box, { stroke: edge.color, "stroke-width": 1 });
      icon.append(element("rect", box));
      if ((marker.pattern || {}).shape) {
        const ink = marker.pattern.fgcolor;
        icon.append(element("path", { d: "M6 11 L14 1 M11 11 L17 3", stroke: ink, "stroke-width": 1.2, fill: "none" }));
      }
      return icon;
    }
    if (trace.fillcolor) icon.append(element("rect", { x: 0, y: 1, width: 22, height: 10, fill: trace.fillcolor }));
    if ((trace.mode || "").includes("lines")) {
      const line = { x1: 0, x2: 22, y1: 6, y2: 6, stroke: trace.line.color, "stroke-width": 2 };
      const dash = dashes[trace.line.dash];
      if (dash) line["stroke-dasharray"] = dash;
      icon.append(element("line", line));
    }
    if ((trace.mode || "").includes("markers")) {
      const symbol = Array.isArray(marker.symbol) ? marker.symbol[0] : marker.symbol || "circle";
      const look = { stroke: (marker.line || {}).color || colour, "stroke-width": 1.5, fill: colour };
      if (symbol.endsWith("-open")) look.fill = "none";
      if (symbol.startsWith("circle")) icon.append(element("circle", { cx: 11, cy: 6, r: 3.6, ...look }));
      else if (symbol.startsWith("square")) icon.append(element("rect", { x: 7.5, y: 2.5, width: 7, height: 7, ...look }));
      else icon.append(element("path", { d: "M11 1 L16 6 L11 11 L6 6 Z", ...look }));
    }
    return icon;
  }

  // The key is HTML, not part of the figure: it wraps with the page and never covers the data.
  function drawKey(name, figure) {
    const list = document.getElementById("key-" + name);
    list.replaceChildren();
    const toggles = (figure.layout.meta || {}).toggles;
    const seen = new Set();
    for (const trace of figure.data) {
      const group = trace.legendgroup || trace.name;
      if (trace.showlegend === false || !trace.name || seen.has(group)) continue;
      seen.add(group);
      const item = document.createElement("li");
      const entry = toggles ? document.createElement("button") : item;
      entry.append(swatch(trace), decoded(trace.name));
      if (toggles) {
        entry.type = "button";
        entry.setAttribute("aria-pressed", String(!hidden[name].has(group)));
        entry.addEventListener("click", () => {
          if (!hidden[name].delete(group)) hidden[name].add(group);
          draw(name);
        });
        item.append(entry);
      }
      list.append(item);
    }
  }

  function draw(name) {
    const plot = page.plots[name];
    const figure = coloured(plot.figures[plot.chosen.join(",")]);
    const layout = figure.layout;
    const narrow = narrowScreen.matches;
    hidden[name] = hidden[name] || new Set();
    drawKey(name, figure);
    for (const trace of figure.data) {
      if (hidden[name].has(trace.legendgroup || trace.name)) trace.visible = false;
    }
    layout.template = page.templates[theme()];
    const meta = layout.meta || {};
    if (narrow) Object.entries(meta.narrow || {}).forEach(([path, value]) => put(layout, path, value));
    if (meta.zooms && !narrow) {
      layout.dragmode = "zoom";
      meta.zooms.forEach((axis) => put(layout, axis + ".fixedrange", false));
    }
    if (narrow && !(meta.narrow || {}).margin) layout.margin = { l: 44, r: 8, t: 8, b: 44, ...layout.margin };
    layout.autosize = true;
    const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };
    const canvas = document.getElementById("plot-" + name);
    Plotly.react(canvas, figure.data, layout, config);
    canvas.classList.toggle("linked", Boolean(meta.links));
    canvas.removeAllListeners("plotly_click");
    if (meta.links) canvas.on("plotly_click", (event) => follow(meta.links + event.points[0].customdata));
  }

  // Goes to a row of a table, which may be closed.
  function follow(id) {
    const row = document.getElementById(id);
    if (!row) return;
    row.closest("details").open = true;
    location.hash = id;
    row.scrollIntoView({ block: "center" });
  }

  function drawAll() {
    Object.keys(page.plots).forEach(draw);
    const other = theme() === "dark" ? "light" : "dark";
    document.getElementById("theme").textContent = other;
  }

  document.querySelectorAll("[data-choice]").forEach((control) => {
    control.addEventListener("change", () => {
      page.plots[control.dataset.plot].chosen[Number(control.dataset.choice)] = Number(control.value);
      draw(control.dataset.plot);
    });
  });
  document.getElementById("theme").addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("report-theme", next); } catch (error) { /* a page may be barred from storage */ }
    drawAll();
  });
  narrowScreen.addEventListener("change", drawAll);
  drawAll();
})();
