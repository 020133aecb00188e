// The token's facts stand in attributes; the tip shows them as text, never as markup.
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
