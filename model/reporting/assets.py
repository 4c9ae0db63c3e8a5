"""The fixed parts of the page: its frame, which forbids it to load anything, its looks, and the reading aid."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d6dae0; --soft: #667080; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #15181c; --line: #333a44; --soft: #98a2b3; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1000px; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
.swatch { width: 22px; height: 10px; display: inline-block; margin-right: .4em; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; max-width: 30rem; }
table.wide-last { width: 100%; } table.wide-last td:last-child { width: 60%; }
.bar { height: .9em; border-radius: 2px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0; }
small, .note, .none { color: var(--soft); } .note { font-size: .8rem; }
.status.pass { color: #00805a; } .status.fail { color: #c62828; font-weight: bold; } .status.waived { color: #b26a00; }
.status.declined { color: var(--soft); } summary { cursor: pointer; }
#reading { position: fixed; pointer-events: none; background: var(--paper); border: 1px solid var(--line);
  padding: .3rem .6rem; font-size: .8rem; white-space: pre; display: none; }
"""

SCRIPT = """
const box = document.getElementById("reading"), runs = JSON.parse(document.getElementById("data").textContent);
for (const section of document.querySelectorAll("section")) {
  const svg = section.querySelector("svg[data-x0]"), what = section.querySelector("h2").textContent;
  if (!svg || !(what in (runs[0] || {}))) continue;
  svg.addEventListener("mousemove", (event) => {
    const d = svg.dataset, at = (event.offsetX / svg.clientWidth) * svg.viewBox.baseVal.width;
    const n = Math.round(+d.x0 + ((at - d.left) / (d.right - d.left)) * (d.x1 - d.x0));
    const lines = runs.filter((r) => n in r[what]).map((r) => r.name + "  " + r[what][n].toPrecision(6));
    box.textContent = ["iteration " + n, ...lines].join("\\n");
    box.style.display = lines.length ? "block" : "none";
    box.style.left = event.clientX + 14 + "px"; box.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => { box.style.display = "none"; });
}
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>{body}<div id="reading"></div>
<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""
