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
