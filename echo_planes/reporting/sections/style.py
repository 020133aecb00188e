"""Style sheet and script of report.html. Both are named by hash in the page's content policy."""

CSS = """
:root { color-scheme: light dark;
  --page:#f6f7f9; --card:#fff; --ink:#171a21; --soft:#5b6472; --faint:#8b93a1; --edge:#e3e6eb; --grid:#eceef2;
  --s1:#2866d3; --s2:#d97a1d; --s3:#178a68; --s4:#8453cf; --s5:#98a1af;
  --good:#147a52; --goodbg:#e4f4ec; --bad:#b3261e; --badbg:#fbe9e7; --warn:#8a5a00; --warnbg:#fbf1dc;
  --heat:#e0662b; --code:#f3f4f7; }
@media (prefers-color-scheme: dark) { :root {
  --page:#101319; --card:#181c24; --ink:#e8ebf1; --soft:#a2abba; --faint:#758092; --edge:#2a303c;
  --grid:#242a35;
  --s1:#6ba4ff; --s2:#f0a35a; --s3:#4fc7a1; --s4:#b596f7; --s5:#6b7587;
  --good:#5fd3a4; --goodbg:#16342a; --bad:#ff8f86; --badbg:#3d1c1b; --warn:#f1c15f; --warnbg:#382c12;
  --heat:#f0793c; --code:#11151c; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
  font-variant-numeric:tabular-nums; -webkit-font-smoothing:antialiased; }
main { max-width:1200px; margin:0 auto; padding:40px 20px 72px; }
code,pre { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  font-size:13px; }
h1 { font-size:30px; line-height:1.15; margin:0; letter-spacing:-.02em; font-weight:680; }
h2 { font-size:13px; letter-spacing:.08em; text-transform:uppercase; color:var(--soft); font-weight:650;
  margin:44px 0 14px; }
h3 { font-size:15px; margin:0; font-weight:640; }
header .over { font-size:13px; color:var(--soft); margin:0 0 6px; letter-spacing:.02em; }
header .line { display:flex; align-items:center; gap:14px; flex-wrap:wrap; }
header .sub { color:var(--soft); margin:8px 0 0; }
header .sub code { color:var(--ink); }
.pill { font-size:13px; font-weight:620; border-radius:99px; padding:3px 12px; background:var(--warnbg);
  color:var(--warn); }
.pill.done,.pill.yes { background:var(--goodbg); color:var(--good); }
.pill.failed,.pill.no { background:var(--badbg); color:var(--bad); }
.error { margin:18px 0 0; padding:12px 16px; border-radius:10px; background:var(--badbg); color:var(--bad);
  white-space:pre-wrap; overflow-wrap:anywhere; }
.figures { display:grid; grid-template-columns:repeat(4,1fr); gap:1px; margin-top:26px; border-radius:12px;
  overflow:hidden; background:var(--edge); border:1px solid var(--edge); }
.figure { background:var(--card); padding:16px 18px 14px; min-width:0; }
.figure .name { color:var(--soft); font-size:13px; }
.figure .value { font-size:25px; line-height:1.25; font-weight:640; letter-spacing:-.02em; margin-top:3px;
  white-space:nowrap; }
.figure .value .from { color:var(--faint); font-weight:500; }
.figure .value.good { color:var(--good); } .figure .value.bad { color:var(--bad); }
.figure .more { color:var(--soft); font-size:13px; margin-top:2px; }
.grid { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:16px; align-items:start; }
.card { background:var(--card); border:1px solid var(--edge); border-radius:12px; margin:0; padding:16px
  18px 12px;
  min-width:0; }
.card.wide { grid-column:1/-1; }
figcaption p { margin:1px 0 0; color:var(--soft); font-size:13px; }
.legend { display:flex; flex-wrap:wrap; gap:4px 16px; font-size:12.5px; color:var(--soft); margin:9px 0 2px;
  min-height:19px; align-items:center; }
.legend .unit { color:var(--faint); }
.key { display:inline-flex; align-items:center; gap:6px; }
.key i { width:14px; height:3px; border-radius:2px; background:var(--k); }
.key i.box { height:10px; width:10px; } .key i.faint { opacity:.4; }
.key i.kbad { width:9px; height:9px; border-radius:50%; background:var(--bad); }
.key i.kmark { width:9px; height:9px; border-radius:50%; background:var(--card); border:2px solid var(--s2); }
.k1 { --k:var(--s1); } .k2 { --k:var(--s2); } .k3 { --k:var(--s3); } .k4 { --k:var(--s4); } .k5 {
  --k:var(--s5); }
.plot { overflow-x:auto; }
figcaption + .plot { margin-top:8px; } .plot svg { display:block; width:100%; min-width:420px; height:auto; }
.card.wide .plot svg { min-width:760px; }
svg text { font-size:11.5px; fill:var(--soft); } svg .end,svg .barlabel { text-anchor:end; }
svg .mid { text-anchor:middle; } svg .tick { fill:var(--faint); } svg .axis { fill:var(--faint); }
svg .grid { stroke:var(--grid); } svg .zero { stroke:var(--edge); stroke-width:1.5; }
svg .ref { stroke:var(--bad); stroke-dasharray:5 4; opacity:.75; }
svg .reflabel { fill:var(--bad); text-anchor:end; }
svg .line,svg .faint { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
svg .faint { stroke-width:1.2; opacity:.38; } svg .thin { stroke-width:1.5; }
svg .s1 { stroke:var(--s1); } svg .s2 { stroke:var(--s2); } svg .s3 { stroke:var(--s3); }
svg .s4 { stroke:var(--s4); } svg .s5 { stroke:var(--s5); }
svg .f1 { fill:var(--s1); } svg .f2 { fill:var(--s2); } svg .f3 { fill:var(--s3); } svg .f4 {
  fill:var(--s4); }
svg .f5 { fill:var(--s5); } svg .fbad { fill:var(--bad); } svg .area { opacity:.72; }
svg .mark { fill:var(--card); stroke:var(--s2); stroke-width:2.4; } svg .dot { opacity:.85; }
svg .dot:hover { opacity:1; } svg .bar { fill:var(--s1); opacity:.85; } svg .barvalue { fill:var(--ink); }
svg .barlabel { fill:var(--ink); } svg .rule { stroke:var(--faint); visibility:hidden; pointer-events:none; }
svg .rule.on { visibility:visible; }
.empty { color:var(--faint); margin:18px 0; }
table { border-collapse:collapse; width:100%; font-size:14px; }
th { text-align:left; font-weight:560; color:var(--soft); font-size:12.5px; }
th,td { padding:7px 14px 7px 0; border-bottom:1px solid var(--edge); vertical-align:top; }
tr:last-child td { border-bottom:0; } .num { text-align:right; white-space:nowrap; }
.scroll { overflow:auto; max-height:340px; margin-top:8px; }
details summary { cursor:pointer; font-weight:600; padding:2px 0; }
details pre { margin:12px 0 4px; padding:14px; background:var(--code); border-radius:8px; overflow-x:auto; }
.rollout { display:flex; flex-direction:column; gap:9px; padding:14px 18px; }
.rollout .head { display:flex; gap:10px 14px; align-items:center; flex-wrap:wrap; font-size:13px;
  color:var(--soft); }
.rollout .head b { color:var(--ink); font-size:15px; }
.rollout .pill { padding:1px 10px; }
.facts { display:flex; flex-wrap:wrap; gap:2px 20px; margin:8px 0 0; color:var(--ink); font-size:14px;
  overflow-wrap:anywhere; }
.facts i { font-style:normal; color:var(--soft); }
.facts b { font-weight:560; color:var(--soft); }
.noted { border-top:1px solid var(--edge); margin-top:10px; padding-top:8px; font-size:13.5px; }
.noted .facts { font-size:13.5px; margin:2px 0; align-items:center; }
.noted pre { background:var(--code); border-radius:8px; padding:10px 12px; margin:4px 0 10px;
  overflow-x:auto; }
.noted h4 { margin:8px 0 2px; font-size:12.5px; color:var(--soft); font-weight:560; }
.suit { display:inline-block; border:1px solid var(--edge); border-radius:4px; background:var(--page);
  padding:0 5px; margin:0 2px 0 0; font-weight:620; color:var(--ink); } .suit.red { color:var(--bad); }
.noted ol { margin:0; padding-left:20px; }
.said { margin:0 0 4px; display:grid; grid-template-columns:58px minmax(0,1fr);
  gap:4px 12px; align-items:baseline; }
.said dt { color:var(--faint); font-size:12.5px; } .said dd { margin:0; min-width:0; }
.said pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; line-height:1.65; }
.tok { border-radius:3px; padding:1px 0; } .tok.cell { display:inline-block; width:9px; height:15px;
  margin:1px;
  border:1px solid var(--edge); vertical-align:middle; }
.tok.turn { border-left:2px solid var(--s1); }
HEAT
.scale { font-size:12.5px; color:var(--soft); margin:0 0 12px; }
.scale .tok { padding:1px 7px; margin:0 1px; border:1px solid var(--edge); }
#tip { position:fixed; z-index:9; pointer-events:none; background:var(--ink); color:var(--page);
  font-size:12.5px;
  border-radius:8px; padding:7px 11px; display:none; line-height:1.5; box-shadow:0 4px 16px #0003; }
#tip b { font-weight:600; } #tip div { display:flex; justify-content:space-between; gap:18px; }
footer { color:var(--faint); font-size:13px; margin-top:44px; }
@media (max-width:880px) { .grid { grid-template-columns:minmax(0,1fr); }
  .figures { grid-template-columns:repeat(2,1fr); } main { padding-top:24px; } }
@media print { body { background:#fff; } .card,.figures { break-inside:avoid; } }
""".replace(
    "HEAT",
    "\n".join(
        f".h{i} {{ background:color-mix(in srgb, var(--heat) {i * 8}%, transparent); }}" for i in range(10)
    ),
)

JS = """
const tip = document.getElementById('tip');
for (const svg of document.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover), rule = svg.querySelector('.rule');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let near = 0;
    data.px.forEach((p, i) => { if (Math.abs(p - at) < Math.abs(data.px[near] - at)) near = i; });
    rule.setAttribute('x1', data.px[near]);
    rule.setAttribute('x2', data.px[near]);
    rule.classList.add('on');
    const head = document.createElement('b');
    head.textContent = data.x[near];
    tip.replaceChildren(head, ...data.rows.map(row => {
      const line = document.createElement('div');
      for (const text of [row.n, row.v[near]]) {
        line.appendChild(document.createElement('span')).textContent = text;
      }
      return line;
    }));
    tip.style.display = 'block';
    const left = event.clientX + 16;
    tip.style.left = (left + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : left) +
  'px';
    tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + 'px';
  });
  svg.addEventListener('pointerleave', () => {
    tip.style.display = 'none';
    rule.classList.remove('on');
  });
}
"""
