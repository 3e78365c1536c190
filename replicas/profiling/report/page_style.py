"""Style of a profile's page, in light and dark colours."""

from __future__ import annotations

PAGE_STYLE = """
:root { --ink: #1d2330; --soft: #667085; --line: #e4e7ec; --paper: #f6f7f9; --card: #fff; --bad: #b42318;
  --badbg: #fef3f2; --linear: #2f6fde; --attention: #8a4fd3; --norm: #14958a; --rotary: #c27c0e; --activation: #c2417c;
  --lookup: #5d7290; --outside: #98a2b3; --group: #3b4557; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b3242; --paper: #12151c;
  --card: #1a1f2a; --bad: #f97066; --badbg: #2a1a1c; --linear: #6ea0ff; --attention: #b58af0; --norm: #45c4b8;
  --rotary: #e5a848; --activation: #ec7fae; --lookup: #8fa3c0; --outside: #667085; --group: #aab4c5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 28px 64px; }
h1 { font-size: 32px; line-height: 1.2; margin: 2px 0 4px; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 2px; }
.brand { margin: 0; color: var(--linear); font-weight: 600; }
.sub { margin: 0 0 12px; color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px;
  min-width: 150px; display: grid; gap: 2px 12px; grid-template-columns: 1fr auto; }
.card b { grid-column: 1 / 3; font-size: 19px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); }
em { font-style: normal; font-size: 12px; border-radius: 20px; padding: 1px 9px; align-self: center;
  border: 1px solid; }
em.measured { color: var(--norm); } em.table { color: var(--rotary); }
.busy { color: var(--rotary); margin: 12px 0 0; }
.fine { color: var(--norm); margin: 8px 0; }
.finding { background: var(--badbg); border-left: 4px solid var(--bad); border-radius: 6px; padding: 12px 16px;
  margin: 10px 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 8px 0 0; overflow-wrap: anywhere; }
dt { color: var(--soft); } dd { margin: 0; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; margin: 14px 0 8px; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px;
  background: var(--c, transparent); }
.key.full { margin-left: auto; } .key.full::before { display: none; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px;
  white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: 12px; text-align: right; padding: 9px 10px; }
thead th:nth-child(1), thead th:nth-child(2), thead th:nth-child(8), thead th:nth-child(9) { text-align: left; }
tbody tr { border-top: 1px solid var(--line); }
tbody th { text-align: left; font-weight: 400; padding: 5px 10px 5px calc(14px + 20px * var(--depth)); }
tr.group th { font-weight: 600; }
tr.off { background: var(--badbg); } tr.off th { color: var(--bad); font-weight: 600; }
td { text-align: right; padding: 5px 10px; }
td.kernel, td.layers { text-align: left; color: var(--soft); font-size: 13px; }
td.bar { width: 32%; min-width: 220px; text-align: left; }
td.bar > i { display: block; height: 14px; min-width: 2px; border-radius: 3px; overflow: hidden; position: relative;
  background: color-mix(in srgb, var(--c) 28%, transparent); }
td.bar > i > i { display: block; height: 100%; background: var(--c); }
.linear { --c: var(--linear); } .attention { --c: var(--attention); } .norm { --c: var(--norm); }
.rotary { --c: var(--rotary); } .activation { --c: var(--activation); } .lookup { --c: var(--lookup); }
.outside { --c: var(--outside); } .group { --c: var(--group); }
.columns { display: inline-flex; gap: 1px; align-items: end; height: 18px; margin-right: 10px; vertical-align: middle; }
.columns i { width: 4px; min-height: 1px; background: var(--c); opacity: .75; }
footer { color: var(--soft); font-size: 13px; margin-top: 36px; max-width: 90ch; }
""".strip()
