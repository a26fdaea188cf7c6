"use strict";
// Text of the record reaches the page as text nodes and attribute values alone, never as markup.
const record = JSON.parse(document.getElementById("report").textContent);
const SHOWN = 60;
let ids = 0;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null) node.append(child);
  return node;
}

const us = (value) => (value == null ? "-" : value >= 1e4 ? Math.round(value).toString() : String(Number(value.toPrecision(4))));
const times = (ratio) => ratio.toFixed(ratio < 9.995 ? 2 : 1);
const ms = (value) => (value == null ? "-" : value.toFixed(value < 10 ? 3 : 1));
// Where one kernel is this much slower than the best one, the next colour begins.
const STEPS = [1.02, 1.1, 1.3, 2, 4];
const heat = (ratio) => "h" + STEPS.filter((step) => ratio > step).length;

function part(id, title, ...children) {
  const heading = id + "-title";
  document.getElementById("main").append(
    el("section", { id, "aria-labelledby": heading }, el("h2", { id: heading }, title), ...children));
  document.getElementById("links").append(el("li", {}, el("a", { href: "#" + id }, title)));
}

function region(label, ...children) {
  return el("div", { class: "scroll", role: "region", "aria-label": "table: " + label, tabindex: "0" }, ...children);
}

// A table that is filtered by words and sorted by its headers; `cells(row)` are {text, sort?, class?}, `open(row)`
// is what a row shows beneath itself.
function grid(label, columns, rows, cells, open) {
  const body = el("tbody");
  const count = el("p", { class: "soft", role: "status" });
  const more = el("button", { type: "button", hidden: true }, "Show all");
  const state = { column: -1, down: false, words: [], all: false };
  const drawn = rows.map((row) => {
    const parts = cells(row);
    return { row, parts, text: parts.map((cell) => cell.text).join(" ").toLowerCase() };
  });
  const head = columns.map((column, at) => {
    const number = column.number ? "number" : null;
    const button = el("button", { type: "button", on: { click: () => sortBy(at) } }, column.name);
    return el("th", { scope: "col", class: number, "aria-sort": "none" }, button);
  });
  const input = el("input", { type: "search" });
  input.addEventListener("input", () => { state.words = input.value.toLowerCase().split(/\s+/).filter(Boolean); draw(); });
  more.addEventListener("click", () => { state.all = true; draw(); });
  const table = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, head)), body);

  function sortBy(at) {
    state.down = state.column === at ? !state.down : Boolean(columns[at].number);
    state.column = at;
    head.forEach((cell, i) => cell.setAttribute("aria-sort", i !== at ? "none" : state.down ? "descending" : "ascending"));
    draw();
  }
  function draw() {
    let kept = drawn.filter((each) => state.words.every((word) => each.text.includes(word)));
    if (state.column >= 0) {
      const value = (each) => { const cell = each.parts[state.column]; return cell.sort ?? cell.text; };
      const side = state.down ? -1 : 1;
      kept = [...kept].sort((a, b) => {
        const x = value(a), y = value(b);
        return side * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
      });
    }
    const shown = state.all ? kept : kept.slice(0, SHOWN);
    body.replaceChildren(...shown.map(line));
    count.textContent = `${kept.length} of ${rows.length} rows` + (shown.length < kept.length ? `, the first ${shown.length} shown` : "");
    more.hidden = shown.length === kept.length;
  }
  function line(each) {
    const row = el("tr", { class: open ? "opens" : null });
    let button = null, beneath = null;
    each.parts.forEach((cell, at) => {
      const mark = cell.mark ? el("span", { class: "hidden-text" }, " " + cell.mark) : null;
      if (open && at === 0) {
        button = el("button", { type: "button", "aria-expanded": "false" }, cell.text);
        row.append(el("td", { class: "call" }, button));
      } else row.append(el("td", { class: cell.class }, cell.text, mark));
    });
    if (open) row.addEventListener("click", () => {
      if (beneath) { beneath.remove(); beneath = null; }
      else {
        const held = el("div", { class: "explanation" }, open(each.row));
        const box = row.closest(".scroll");
        held.style.setProperty("--seen", (box ? box.clientWidth - 30 : 600) + "px");
        beneath = el("tr", { class: "why" }, el("td", { colspan: columns.length }, held));
        row.after(beneath);
      }
      button.setAttribute("aria-expanded", String(Boolean(beneath)));
    });
    return row;
  }
  draw();
  const tools = rows.length > 5 ? el("div", { class: "tools" }, el("label", {}, "Filter " + label, input), more) : null;
  return el("div", {}, tools, rows.length > 5 ? count : null, region(label, table));
}

const plain = (names) => names.map((name) => ({ name }));
const asText = (row) => row.map((text, at) => ({ text: String(text), class: at ? "wide" : null }));

function simple(label, columns, rows, none) {
  return rows.length ? grid(label, plain(columns), rows, asText) : el("p", { class: "soft" }, none);
}

// -- parts ---------------------------------------------------------------------------------------------

function overview() {
  const calls = record.maps.flatMap((each) => each.calls);
  const regrets = calls.map((call) => call.regret).filter((value) => value != null);
  const mean = regrets.length ? Math.exp(regrets.reduce((sum, r) => sum + Math.log(r), 0) / regrets.length) : null;
  const done = record.ledger.filter((row) => row.state === "done").length;
  const cards = [
    ["calls measured", calls.length],
    ["times", calls.reduce((sum, call) => sum + call.times.length, 0)],
    ["choice over best, mean", mean == null ? "-" : times(mean)],
    ["libraries that do not work", record.missing.length],
    ["kernels out of service", record.health.filter((row) => row[1] !== "closed").length],
    ["problems", record.problems.length],
  ];
  if (record.ledger.length) cards.push(["requirements done", `${done} of ${record.ledger.length}`]);
  part("overview", "Overview",
    el("div", { class: "cards", role: "list" }, cards.map(([name, value]) =>
      el("div", { role: "listitem" }, el("span", {}, name), el("strong", {}, String(value))))),
    record.problems.map((text) => el("p", { class: "bad" }, "problem: " + text)),
    record.notes.map((text) => el("p", { class: "soft" }, "note: " + text)));
}

function machine() {
  part("machine", "Machine and backends",
    el("h3", {}, "What does not work, and what would help"),
    simple("what does not work", ["library", "state", "what would help"], record.missing, "Every optional library works."),
    record.machine.flatMap((table) => [el("h3", {}, table.title), simple(table.title, table.columns, table.rows, "none")]));
}

function explanation(map, call) {
  const name = (at) => (at < 0 ? "no kernel" : map.kernels[at]);
  const measured = new Map(call.times.map(([kernel, value]) => [kernel, value]));
  const order = [...call.verdicts].sort((a, b) =>
    (b[0] === call.chosen) - (a[0] === call.chosen) || (a[1] ?? Infinity) - (b[1] ?? Infinity) || a[2].length - b[2].length);
  const rows = order.map(([kernel, expected, texts]) => el("tr", {},
    el("th", { scope: "row" }, name(kernel), kernel === call.chosen ? " (taken)" : ""),
    el("td", { class: "verdict" }, (expected == null ? "refuses: " : "takes it: ") + texts.map((at) => map.texts[at]).join("; ")),
    el("td", { class: "number" }, us(expected)),
    el("td", { class: "number" }, us(measured.get(kernel)))));
  return el("div", {},
    el("p", {}, el("strong", {}, name(call.chosen)), ": " + map.texts[call.why]),
    region("verdicts on " + call.op + " " + call.call, el("table", { "aria-label": "verdicts" },
      el("thead", {}, el("tr", {}, ["kernel", "verdict", "expected us", "measured us"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows))),
    call.elsewhere >= 0 ? el("p", { class: "soft" }, map.texts[call.elsewhere]) : null);
}

function heatMap(map, op) {
  const calls = map.calls.filter((call) => call.op === op);
  const kernels = [...new Set(calls.flatMap((call) => call.times.map((timed) => timed[0])))];
  const columns = [{ name: "call" }, { name: "launch" }, { name: "regret", number: true },
    ...kernels.map((at) => ({ name: map.kernels[at], number: true }))];
  return grid("calls of " + op, columns, calls, (call) => {
    const takers = new Set(call.verdicts.filter((said) => said[1] != null).map((said) => said[0]));
    const total = (timed) => timed[1] + timed[3];
    const rivals = call.times.filter((timed) => takers.has(timed[0]));
    const best = Math.min(...(rivals.length ? rivals : call.times).map(total));
    const byKernel = new Map(call.times.map((timed) => [timed[0], timed]));
    return [
      { text: call.call, class: "call" }, { text: call.launch },
      { text: call.regret == null ? "-" : times(call.regret), sort: call.regret ?? 0, class: "number" },
      ...kernels.map((at) => {
        const timed = byKernel.get(at);
        if (!timed) return { text: "-", sort: -1, class: "number" };
        const ratio = total(timed) / best, taken = at === call.chosen, takes = takers.has(at);
        const state = taken ? ", taken" : takes ? "" : ", refuses the call";
        return { text: times(ratio) + (takes ? "" : " no"), sort: ratio,
          class: `number ${takes ? heat(ratio) : "soft"}${taken ? " taken" : ""}`, mark: `times the best, ${us(total(timed))} us${state}` };
      }),
    ];
  }, (call) => explanation(map, call));
}

function maps() {
  const usable = record.maps.filter((map) => map.calls.length);
  const own = record.maps.find((map) => map.is_own);
  const empty = own && !own.calls.length ? el("p", { class: "bad" },
    "Nothing was measured on this machine: lz tune measures its kernels, until then choices rest on shipped tables and estimates.") : null;
  if (!usable.length) { part("maps", "Kernels by call", empty, el("p", { class: "soft" }, "There is no table for this hardware either, so there is no map.")); return; }
  const place = el("div");
  const source = el("select", {}, usable.map((map, at) => el("option", { value: at }, `${map.source} (${map.machine})`)));
  const op = el("select");
  const ops = (map) => [...new Set(map.calls.map((call) => call.op))];
  const draw = () => place.replaceChildren(heatMap(usable[source.value], op.value));
  const choose = () => { op.replaceChildren(...ops(usable[source.value]).map((name) => el("option", { value: name }, name))); draw(); };
  source.addEventListener("change", choose);
  op.addEventListener("change", draw);
  const rows = usable.flatMap((map) => ops(map).map((name) => {
    const calls = map.calls.filter((call) => call.op === name);
    const regrets = calls.map((call) => call.regret).filter((value) => value != null);
    const mean = regrets.length ? Math.exp(regrets.reduce((sum, r) => sum + Math.log(r), 0) / regrets.length) : 1;
    return { map, name, calls: calls.length, mean, worst: Math.max(1, ...regrets), best: regrets.filter((r) => r < STEPS[0]).length };
  }));
  part("maps", "Kernels by call", empty,
    el("p", {}, "A number is a kernel's time, with the changes of layout that it needs, over the least of those that take the call. Framed is the kernel that is taken; regret is its number; \"no\" refuses the call. A row opens why."),
    el("ul", { class: "legend" }, ["best", ...STEPS.map((step) => "above " + step)].map((text, at) => el("li", { class: "h" + at }, text))),
    el("div", { class: "tools" }, el("label", {}, "Measured on", source), el("label", {}, "Op", op)), place,
    el("h3", {}, "Regret by op"),
    grid("regret by op", [{ name: "op" }, { name: "measured on" }, { name: "calls", number: true }, { name: "best one taken", number: true },
      { name: "mean", number: true }, { name: "worst", number: true }], rows, (row) => [
      { text: row.name }, { text: row.map.source }, { text: String(row.calls), sort: row.calls, class: "number" },
      { text: String(row.best), sort: row.best, class: "number" },
      { text: times(row.mean), sort: row.mean, class: "number " + heat(row.mean) },
      { text: times(row.worst), sort: row.worst, class: "number " + heat(row.worst) }]));
  choose();
}

function traffic() {
  if (!record.traffic.length) { part("traffic", "Batches and waiting", el("p", { class: "soft" },
    "No batch was recorded: name a trace (--trace) or a running process (--metrics).")); return; }
  const rows = record.traffic;
  part("traffic", "Batches and waiting",
    grid("batches", [{ name: "of" }, { name: "from" }, { name: "batches", number: true }, { name: "calls", number: true },
      { name: "calls a batch", number: true }, { name: "waited ms, mean", number: true }, { name: "p95", number: true },
      { name: "longest", number: true }, { name: "why then" }], rows, (row) => [
      { text: row.name }, { text: row.source }, { text: String(row.batches), sort: row.batches, class: "number" },
      { text: String(row.calls), sort: row.calls, class: "number" },
      { text: (row.calls / row.batches).toFixed(1), sort: row.calls / row.batches, class: "number" },
      { text: ms(row.mean_wait_ms), sort: row.mean_wait_ms ?? -1, class: "number" },
      { text: ms(row.p95_wait_ms), sort: row.p95_wait_ms ?? -1, class: "number" },
      { text: ms(row.max_wait_ms), sort: row.max_wait_ms ?? -1, class: "number" },
      { text: row.whys.map(([why, count]) => `${why} ${count}`).join(", ") || "-", class: "wide" }]),
    rows.filter((row) => row.sizes.length).map((row) => {
      const most = Math.max(...row.sizes.map((size) => size[1]));
      return el("div", {}, el("h3", {}, `Calls in a batch: ${row.name}, ${row.source}`),
        el("div", { class: "bars", role: "list", "aria-label": "batches by their calls, " + row.name }, row.sizes.flatMap(([size, count]) => {
          const bar = el("span", { class: "bar", "aria-hidden": "true" });
          bar.style.width = (100 * count) / most + "%";
          return [el("span", { role: "listitem" }, String(size), el("span", { class: "hidden-text" }, ` calls: ${count} batches`)), bar,
            el("span", { class: "soft", "aria-hidden": "true" }, String(count))];
        })));
    }));
}

function timeline() {
  const excerpt = record.timeline;
  if (!excerpt) { part("timeline", "Timeline", el("p", { class: "soft" }, "No trace was named: lz trace run records one, --trace shows it here.")); return; }
  const span = Math.max(excerpt.end_us - excerpt.begin_us, 1e-9);
  const all = excerpt.rows.flatMap((row) => row.slices.map((slice) => [row.name, ...slice]));
  part("timeline", "Timeline",
    el("p", {}, `${(span / 1e3).toFixed(3)} ms around the largest batch of ${excerpt.source}; ${excerpt.left_out} slices of the trace are left out.`),
    el("div", { class: "tracks", role: "img", "aria-label": `timeline of ${excerpt.rows.length} rows; the table below has the same slices` },
      excerpt.rows.map((row) => {
        let end = -Infinity;
        return el("div", {}, el("div", { class: "soft" }, row.name), el("div", { class: "track" }, row.slices.map(([begin, length, name, note]) => {
          const inner = begin < end;
          end = Math.max(end, begin + length);
          const slice = el("i", { class: inner ? "inner" : null, title: `${excerpt.texts[name]}, ${us(length)} us ${excerpt.texts[note]}` });
          slice.style.left = (100 * (begin - excerpt.begin_us)) / span + "%";
          slice.style.width = (100 * length) / span + "%";
          return slice;
        })));
      })),
    el("details", {}, el("summary", {}, "The slices as a table"),
      grid("slices", [{ name: "row" }, { name: "what" }, { name: "begins us", number: true }, { name: "lasts us", number: true }, { name: "note" }], all,
        ([row, begin, length, name, note]) => [{ text: row }, { text: excerpt.texts[name] },
          { text: (begin - excerpt.begin_us).toFixed(1), sort: begin, class: "number" }, { text: us(length), sort: length, class: "number" },
          { text: excerpt.texts[note], class: "wide" }])));
}

function comparison(id, title, changes, none) {
  if (!changes) { part(id, title, el("p", { class: "soft" }, none)); return; }
  part(id, title, el("p", {}, el("strong", {}, changes.sentence), "."),
    el("p", { class: "soft" }, `First: ${changes.first}. Second: ${changes.second}. ${changes.only_first} calls are in the first alone, ${changes.only_second} in the second.`),
    el("h3", {}, "Facts that differ"),
    simple("facts that differ", ["fact", "first", "second"], changes.facts.map((fact) => [fact.name, fact.first, fact.second]), "none"),
    el("h3", {}, "Choices that differ"),
    simple("choices that differ", ["op", "call", "first", "second", "why"], changes.choices.map((c) => [c.op, c.call, c.first, c.second, c.why]), "none"),
    el("h3", {}, "By op"),
    changes.ops.length ? grid("ops compared", [{ name: "op" }, { name: "calls", number: true }, { name: "second over first", number: true },
      { name: "shorter", number: true }, { name: "longer", number: true }, { name: "choices that differ", number: true }], changes.ops, (op) => [
      { text: op.op }, { text: String(op.calls), sort: op.calls, class: "number" }, { text: times(op.ratio), sort: op.ratio, class: "number " + heat(op.ratio) },
      { text: String(op.faster), sort: op.faster, class: "number" }, { text: String(op.slower), sort: op.slower, class: "number" },
      { text: String(op.choices), sort: op.choices, class: "number" }]) : el("p", { class: "soft" }, "No call is in both."),
    el("h3", {}, "Times that differ by more than noise"),
    changes.times.length ? grid("times that differ", [{ name: "op" }, { name: "call" }, { name: "kernel" }, { name: "first us", number: true },
      { name: "second us", number: true }, { name: "second over first", number: true }], changes.times, (t) => [
      { text: t.op }, { text: t.call }, { text: t.kernel }, { text: us(t.first_us), sort: t.first_us, class: "number" },
      { text: us(t.second_us), sort: t.second_us, class: "number" }, { text: times(t.ratio), sort: t.ratio, class: "number " + heat(t.ratio) }])
      : el("p", { class: "soft" }, "none"));
}

function ranks() {
  if (!record.ranks.length) { part("ranks", "Ranks side by side", el("p", { class: "soft" }, "No report of another rank was named (--rank).")); return; }
  const names = [...new Set(record.ranks.flatMap((rank) => Object.keys(rank.facts)))].sort();
  const rows = names.map((name) => {
    const values = record.ranks.map((rank) => rank.facts[name] ?? "-");
    return { name, values, differs: new Set(values).size > 1 };
  }).sort((a, b) => b.differs - a.differs);
  part("ranks", "Ranks side by side", el("p", {}, `${rows.filter((row) => row.differs).length} of ${rows.length} facts differ; they stand first.`),
    grid("facts of the ranks", plain(["fact", "", ...record.ranks.map((rank) => rank.name)].map((name, at) => (at === 1 ? "differs" : name))), rows, (row) => [
      { text: row.name }, { text: row.differs ? "differs" : "same", class: row.differs ? "differs" : null },
      ...row.values.map((text) => ({ text, class: "wide" }))]));
}

function ledger() {
  if (!record.ledger.length) { part("ledger", "Requirements", el("p", { class: "soft" }, "No ledger was named (--ledger REQUIREMENTS.md).")); return; }
  const colour = { done: "h0", partly: "h2", open: "h4", observed: "h1" };
  const counts = Object.entries(record.ledger.reduce((sum, row) => ({ ...sum, [row.state]: (sum[row.state] || 0) + 1 }), {}));
  part("ledger", "Requirements", el("p", {}, counts.map(([state, count]) => `${count} ${state}`).join(", ") + "."),
    grid("requirements", plain(["id", "state", "what", "what is missing, or a remark", "proof", "section"]), record.ledger, (row) => [
      { text: row.id, class: "wide-id" }, { text: row.state, class: colour[row.state] }, { text: row.what, class: "wide" },
      { text: row.note, class: "wide" }, { text: row.proof, class: "wide" }, { text: row.section }]));
}

function gate() {
  const colour = { passed: "h0", waived: "h2", undecided: "h3", failed: "h4" };
  const findings = record.stages.flatMap((stage) => stage.findings);
  part("verdict", record.passed ? "The gate is passed" : "The gate is not passed",
    el("p", { class: record.passed ? null : "bad" }, el("strong", {}, record.verdict), `: ${record.title}`),
    el("p", { class: "soft" }, `${record.machine}, ${record.written_at}`),
    record.notes.map((text) => el("p", { class: "soft" }, "note: " + text)),
    grid("stages", [{ name: "stage" }, { name: "state" }, { name: "checks", number: true }, { name: "seconds", number: true }, { name: "findings", number: true }],
      record.stages, (stage) => [{ text: stage.stage }, { text: stage.state, class: colour[stage.state] },
        { text: String(stage.checks), sort: stage.checks, class: "number" }, { text: stage.seconds.toFixed(1), sort: stage.seconds, class: "number" },
        { text: String(stage.findings.length), sort: stage.findings.length, class: "number" }],
      (stage) => stage.lines.length ? stage.lines.map((text) => el("p", {}, text)) : el("p", { class: "soft" }, "Nothing more to say.")));
  part("findings", "What was found", simple("findings", ["finding", "what", "waived by"],
    findings.map((found) => [found.name, found.text, found.waived_by || "-"]), "Nothing."));
  part("waivers", "Waivers", simple("waivers", ["finding", "owner", "reason", "until"],
    record.waivers.map((waiver) => [waiver.finding, waiver.owner, waiver.reason, waiver.expires]), "None."));
  part("artifacts", "Artifacts", simple("artifacts", ["file", "SHA-256"], record.artifacts, "None were kept (--artifacts)."));
}

function theme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const say = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
  say();
}

document.getElementById("subtitle").textContent = record.title;
document.title = "LayerZero report: " + record.title;
theme();
if (record.kind === "layerzero comparison") comparison("compared", "What differs", record.comparison, "");
else if (record.kind === "layerzero gate") gate();
else {
  overview();
  maps();
  comparison("drift", "Drift since the last report", record.drift, "No earlier report was named (--since).");
  traffic();
  part("health", "Health and quarantine", simple("health", ["kernel", "state", "why"], record.health, "No kernel has failed."));
  timeline();
  ranks();
  machine();
  ledger();
}
