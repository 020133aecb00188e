"""Style sheet and script of the pages, on top of the report's style. Both are named by hash in the policy."""

from echo_planes.reporting.sections.style import CSS

VERSION_COLOURS = 8  # then they begin again

_HUES = ("--s1", "--s2", "--s3", "--s4", "--bad", "--good", "--warn", "--s5")
_VERSIONS = "\n".join(
    f"[data-colour=version] .tok.v{i} {{ background:color-mix(in srgb, var({hue}) 28%, transparent); }}\n"
    f".swatch.v{i} {{ background:color-mix(in srgb, var({hue}) 28%, transparent); }}"
    for i, hue in enumerate(_HUES)
)

PAGE_CSS = (
    CSS
    + """
main { max-width:1400px; }
a { color:var(--s1); text-decoration:none; } a:hover { text-decoration:underline; }
h1 { overflow-wrap:anywhere; }
.note { color:var(--soft); font-size:13px; margin:10px 0; }
form.card { margin:22px 0 18px; display:flex; flex-wrap:wrap; gap:12px 16px; align-items:end;
  padding:14px 18px; }
form label { display:grid; gap:3px; font-size:12.5px; color:var(--soft); }
form input,form select { font:inherit; font-size:14px; color:var(--ink); background:var(--page); width:126px;
  border:1px solid var(--edge); border-radius:7px; padding:4px 8px; height:32px; }
form .pair { display:flex; gap:5px; } form .pair input { width:62px; } form .wide input { width:216px; }
form a { line-height:32px; font-size:14px; }
form button { font:inherit; font-size:14px; height:32px; padding:0 16px; border-radius:7px; border:0;
  color:var(--card); background:var(--s1); cursor:pointer; }
.list { overflow-x:auto; padding:8px 18px; } .list td { font-size:13.5px; padding:6px 14px 6px 0; }
.list td.text { width:100%; max-width:0; min-width:160px; overflow:hidden; text-overflow:ellipsis;
  color:var(--soft); }
.list td.id { max-width:220px; overflow:hidden; text-overflow:ellipsis; }
.list th,.list td { white-space:nowrap; } .list th.num { text-align:right; }
 .list .pill { padding:1px 9px; font-size:12.5px; }
.list .spread { color:var(--faint); font-size:12.5px; }
.pages { display:flex; gap:18px; align-items:center; font-size:14px; color:var(--soft); margin:14px 2px; }
.bar { display:flex; flex-wrap:wrap; gap:6px 14px; align-items:center; font-size:13px; color:var(--soft);
  margin:20px 0 12px; }
.bar .on { font-weight:640; color:var(--ink); }
.swatch { border-radius:3px; padding:1px 7px; color:var(--ink); }
.samples { display:grid; grid-template-columns:repeat(auto-fill,minmax(330px,1fr)); gap:16px;
  align-items:start; }
.block { margin:0 0 16px; } .block h3 { margin:0 0 6px; }
.block pre,.sample pre,.turn pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; line-height:1.7; }
.sample { padding:14px 18px; } .sample .head { display:flex; gap:4px 12px; flex-wrap:wrap; align-items:center;
  font-size:13px; color:var(--soft); margin-bottom:8px; }
.sample .head a { font-weight:640; font-size:15px; } .pill { white-space:nowrap; }
.sample .pill,.turn .pill { padding:1px 10px; }
.turn { margin:0 0 14px; } .turn .head { display:flex; gap:4px 14px; flex-wrap:wrap; align-items:center;
  font-size:13px; color:var(--soft); margin-bottom:8px; } .turn .head b { color:var(--ink); font-size:15px; }
.mark { color:var(--faint); font-size:12px; margin:6px 0 1px; }
.answered { border-left:3px solid var(--s5); background:var(--code); border-radius:0 6px 6px 0;
  padding:5px 10px; margin:6px 0; color:var(--soft); }
.tok { cursor:default; margin-right:1px; }   .tok:hover { outline:1.5px solid var(--s1); }
.tok.env,.tok.given { background:none; }
.tok.id { margin-right:4px; } .tok.none { color:var(--faint); }
[data-colour=version] .tok:not(.env) { background:none; }
.pill.quiet { background:var(--code); color:var(--soft); }
#tip { max-width:420px; overflow-wrap:anywhere; } #tip .text { display:block; white-space:pre-wrap; }
"""
    + _VERSIONS
)

# The token's facts stand in attributes; the tip shows them as text, never as markup.
PAGE_JS = """
const tip = document.getElementById('tip');
document.addEventListener('pointerover', event => {
  const token = event.target.closest('.tok[data-i]');
  if (!token) { tip.style.display = 'none'; return; }
  const data = token.dataset, lines = [['token', data.i]];
  if (data.p !== undefined) {
    lines.push(['logprob', data.p], ['probability', Math.exp(Number(data.p)).toPrecision(3)]);
  }
  if (data.v !== undefined) lines.push(['version', data.v]);
  if (data.w) lines.push(['', data.w]);
  for (const other of JSON.parse(data.o || '[]')) lines.push(['or ' + JSON.stringify(other[0]), other[1]]);
  const head = document.createElement('b');
  head.className = 'text';
  head.textContent = token.classList.contains('id') ? '' : JSON.stringify(data.t ?? token.textContent);
  tip.replaceChildren(head, ...lines.map(([name, value]) => {
    const line = document.createElement('div');
    for (const text of [name, value]) line.appendChild(document.createElement('span')).textContent = text;
    return line;
  }));
  tip.style.display = 'block';
  const box = token.getClientRects()[0];
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + 'px';
  const below = box.bottom + 8;
  tip.style.top = (below + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 8 : below) + 'px';
});
"""
