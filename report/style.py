"""The style sheet of all pages, and its colours."""

from __future__ import annotations

import re

STYLE = """
:root {
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d1b20; --soft: #5f5a66; --rule: #e4e0e6; --grid: #ece9ee;
  --main: #a3295e; --second: #1f6f8b; --third: #8a6d00; --down: #2f6ea5; --up: #d9793a; --fedavg: #6b6573;
  --freeze: #a3295e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16141a; --card: #1f1c24; --ink: #efecf2; --soft: #aba4b4; --rule: #37323e; --grid: #2e2a35;
    --main: #f07fae; --second: #6cc3df; --third: #dfc15c; --down: #6aa9de; --up: #eb9a62; --fedavg: #b3acbc;
    --freeze: #f07fae;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1440px; margin: 0 auto; padding: clamp(20px, 4vw, 56px) clamp(16px, 4vw, 56px) 64px; }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.9rem, 4vw, 2.75rem); margin: 0; letter-spacing: -0.02em; }
h2 { font-size: 1.25rem; margin: 48px 0 16px; }
h3 { font-size: 1rem; margin: 0 0 4px; }
p { margin: 0 0 12px; }
code { font: 0.92em ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.run { color: var(--soft); margin: 0 0 8px; font-size: 0.9rem; }
.subtitle { color: var(--soft); font-size: 1.2rem; margin: 6px 0 0; overflow-wrap: anywhere; }
.notice { margin: 24px 0 0; padding: 12px 16px; border-left: 4px solid var(--main); background: var(--card); }
.headlines {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(150px, 42%), 1fr)); gap: 1px; margin: 32px 0 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden;
}
.headlines div { background: var(--card); padding: 16px 18px; }
.headlines dt { color: var(--soft); font-size: 0.85rem; }
.headlines dd { margin: 0; color: var(--soft); font-size: 0.82rem; line-height: 1.35; }
.headlines dt + dd {
  color: var(--ink); font-size: 1.6rem; font-weight: 650; line-height: 1.35; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap;
}
.headlines dt + dd.unknown { color: var(--soft); font-weight: 400; }
.figures { display: grid; grid-template-columns: minmax(0, 1fr); gap: 20px; }
@media (min-width: 960px) { .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure {
  margin: 0; padding: 18px 18px 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  display: flex; flex-direction: column; min-width: 0;
}
figcaption { color: var(--soft); font-size: 0.85rem; line-height: 1.45; margin-top: 6px; max-width: 72ch; }
.plot { min-height: 340px; }
.rounds { display: flex; gap: 10px; align-items: center; color: var(--soft); font-size: 0.85rem; }
.rounds input { flex: 1; accent-color: var(--main); min-width: 0; }
.rounds output { min-width: 2.5em; color: var(--ink); font-variant-numeric: tabular-nums; }
.empty { flex: 1; min-height: 140px; display: grid; place-items: center; margin: 8px 0; color: var(--soft);
  border: 1px dashed var(--rule); border-radius: 8px; }
.scroll { overflow: auto; max-height: 70vh; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: left; vertical-align: top; overflow-wrap: break-word; }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600; vertical-align: bottom;
  box-shadow: inset 0 -1px 0 var(--rule); }
td { border-top: 1px solid var(--grid); }
.number { text-align: right; }
td.number { white-space: nowrap; }
td:not(:last-child) { white-space: nowrap; }
td:last-child:not(.number) { min-width: 14rem; overflow-wrap: anywhere; }
details { margin: 0 0 12px; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
.provenance p { color: var(--soft); max-width: 78ch; }
@media (max-width: 480px) { figure { padding: 14px 10px 12px; } td:last-child:not(.number) { min-width: 10rem; }
  .headlines div { padding: 12px 14px; }
  .headlines dt + dd { font-size: 1.35rem; } }
@media print { figure { break-inside: avoid; } .scroll { max-height: none; } }
"""


def light_colours(style: str = "") -> dict[str, str]:
    """Role → colour on a light background, from the style sheet and a page's own CSS, `style`."""
    rules = re.findall(r"(@media[^{]*\{\s*)?:root \{([^}]*)\}", STYLE + style)
    return dict(pair for media, rule in rules if not media for pair in re.findall(r"--([\w-]+): ([^;]+);", rule))
