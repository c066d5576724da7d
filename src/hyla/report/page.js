(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("curves-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const pressed = (button) => button.getAttribute("aria-pressed") === "true";
  const splitButtons = [...document.querySelectorAll("[data-split]")];
  const seriesButtons = [...document.querySelectorAll("[data-series]")];
  const groupChoice = document.getElementById("group");
  const seedsButton = document.getElementById("seeds");
  const number = data.percent ? ".1f" : ".3f";
  const value = "step %{x:,}<br>" + data.label + " %{y:" + number + "}" + (data.percent ? " %" : "");

  function faded(colour, alpha) {
    const part = (at) => parseInt(colour.slice(at, at + 2), 16);
    return "rgba(" + part(1) + "," + part(3) + "," + part(5) + "," + alpha + ")";
  }

  function traces(split) {
    const list = [];
    split.variants.forEach((m) => {
      if (!pressed(seriesButtons[m.series]) || (groupChoice && m.group !== Number(groupChoice.value))) return;
      const line = (extra) => Object.assign({ type: "scatter", mode: "lines", showlegend: false, name: m.name }, extra);
      if (m.band) {
        const edge = { width: 0, color: m.colour };
        list.push(line({ x: m.x, y: m.low, line: edge, hoverinfo: "skip" }));
        list.push(line({ x: m.x, y: m.high, line: edge, hoverinfo: "skip", fill: "tonexty",
          fillcolor: faded(m.colour, 0.16) }));
      }
      m.seeds.forEach((seed) => {
        if (seed.finished && (m.runs < 2 || !pressed(seedsButton))) return;
        const hover = "<b>" + m.name + "</b>, " + seed.name + "<br>" + value + "<extra></extra>";
        list.push(line({ x: seed.x, y: seed.y, hovertemplate: hover,
          line: { color: faded(m.colour, seed.finished ? 0.5 : 0.9), width: 1, dash: seed.finished ? "solid" : "dot" } }));
        if (!seed.finished && seed.x.length) {
          list.push(line({ x: seed.x.slice(-1), y: seed.y.slice(-1), mode: "markers", hovertemplate: hover,
            marker: { symbol: "x-thin", size: 9, line: { color: m.colour, width: 2 } } }));
        }
      });
      if (m.x.length) {
        const who = m.runs > 1 ? ", mean of " + m.runs + " seeds" : "";
        const range = m.runs > 1 ? "<br>%{customdata[0]:" + number + "} to %{customdata[1]:" + number + "}" : "";
        list.push(line({ x: m.x, y: m.y, mode: m.x.length > 1 ? "lines" : "markers",
          customdata: m.low.map((low, k) => [low, m.high[k]]), line: { color: m.colour, width: 2.6, dash: m.dash },
          marker: { color: m.colour, size: 7 }, hovertemplate: "<b>" + m.name + "</b>" + who + "<br>" + value + range +
          "<extra></extra>" }));
      }
      m.reported.forEach((r) => list.push(line({ x: [data.last * 0.955, data.last * 1.03], y: [r.y, r.y],
        cliponaxis: false, line: { color: m.colour, width: 2, dash: "3px,2px" },
        hovertemplate: "<b>" + m.name + "</b><br>" + r.text + "<extra></extra>" })));
    });
    return list;
  }

  function theme() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue("--" + name).trim();
    const axis = { color: colour("soft"), gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false,
      automargin: true, tickfont: { size: 12 } };
    return { colour: colour, axis: axis, layout: {
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 52, r: 18, t: 34, b: 44 }, hovermode: "closest", dragmode: coarse ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink"), size: 13 } },
      uirevision: "keep" } };
  }

  function layout(split) {
    const { colour, axis, layout } = theme();
    const shapes = [], annotations = [];
    if (split.ceiling_in_view) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: split.ceiling, y1: split.ceiling,
        line: { color: colour("soft"), width: 1.2, dash: "dot" } });
      annotations.push({ xref: "paper", x: 0, xanchor: "left", y: split.ceiling, yanchor: "bottom", showarrow: false,
        text: "ceiling " + split.ceiling.toFixed(data.percent ? 1 : 3), font: { size: 11, color: colour("soft") } });
    }
    if (split.above) {
      annotations.push({ xref: "paper", yref: "paper", x: 1, xanchor: "right", y: 1, yanchor: "top", showarrow: false,
        text: split.above, font: { size: 11, color: colour("soft") } });
    }
    return Object.assign(layout, {
      title: { text: split.title, x: 0, xref: "paper", xanchor: "left", y: 0.985, yanchor: "top",
        font: { size: 14, color: colour("ink") } },
      xaxis: Object.assign({ range: [0, data.last * 1.035], title: { text: "training steps", standoff: 8 }, nticks: 6,
        tickformat: ",d", showgrid: false, showline: true }, axis),
      yaxis: Object.assign({ range: split.range, title: { text: split.axis, standoff: 6 }, nticks: 7 }, axis),
      shapes: shapes, annotations: annotations,
    });
  }

  function drawLines() {
    (data.lines || []).forEach((panel, i) => {
      const { colour, axis, layout } = theme();
      const list = [];
      panel.lines.forEach((l) => {
        const hover = "%{text}<br>" + data.label + " %{y:" + number + "}<extra></extra>";
        list.push({ type: "scatter", mode: "lines+markers", showlegend: false, x: l.x, y: l.y, text: l.text,
          line: { color: l.colour, width: 2.2, dash: l.dash }, marker: { size: 6, color: l.colour }, hovertemplate: hover });
        list.push({ type: "scatter", mode: "markers", showlegend: false, x: l.seed_x, y: l.seed_y, text: l.seed_text,
          marker: { size: 6, color: faded(l.colour, 0.45) }, hovertemplate: hover });
      });
      const shapes = data.line_ceiling === null ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.line_ceiling,
        y1: data.line_ceiling, line: { color: colour("soft"), width: 1.2, dash: "dot" } }];
      Plotly.react(document.getElementById("line-" + i), list, Object.assign(layout, { shapes: shapes,
        margin: { l: 52, r: 12, t: 10, b: 44 },
        xaxis: Object.assign({ title: { text: panel.axis, standoff: 8 }, type: panel.kind, tickvals: panel.values,
          ticktext: panel.ticks, showgrid: false, showline: true }, axis),
        yaxis: Object.assign({ range: data.line_range, title: { text: data.line_label, standoff: 6 }, nticks: 6 }, axis) }),
        { responsive: true, displayModeBar: false });
    });
  }

  function draw() {
    const shown = splitButtons.filter(pressed).length;
    document.getElementById("plots").classList.toggle("one", shown === 1);
    data.splits.forEach((split, i) => {
      const place = document.getElementById("plot-" + i);
      place.hidden = !pressed(splitButtons[i]);
      if (place.hidden) return;
      Plotly.react(place, traces(split), layout(split), { responsive: true, displaylogo: false,
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], displayModeBar: coarse ? false : "hover" });
      Plotly.Plots.resize(place);
    });
    drawLines();
  }

  [...splitButtons, ...seriesButtons, seedsButton].filter(Boolean).forEach((button) => {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(!pressed(button)));
      draw();
    });
  });
  if (groupChoice) groupChoice.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
})();

(function () {
  "use strict";
  // Headers become buttons that sort their table: first click by each column's own order, then the other way round.
  const value = (row, place) => {
    const cell = row.cells[place];
    const text = "value" in cell.dataset ? cell.dataset.value : cell.textContent.trim();
    if (text === "" || text === "\u2013") return null;
    return cell.classList.contains("number") && !isNaN(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });

  function sort(table, heads, place) {
    const head = heads[place], body = table.tBodies[0];
    const now = head.getAttribute("aria-sort"), first = head.dataset.first || "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const wanted = now === first ? other : first;
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", wanted);
    const keyed = [...body.rows].map((row) => ({ row: row, key: value(row, place) }));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);  // no value: last, either way
      return wanted === "ascending" ? compare(a.key, b.key) : compare(b.key, a.key);
    });
    body.append(...keyed.map((one) => one.row));
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, heads, place));
    });
  });
  // A link to a run that lies in a closed part of the page opens that part.
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const part = target && target.closest("details");
    if (part) { part.open = true; target.scrollIntoView(); }
  };
  window.addEventListener("hashchange", open);
  open();
})();
