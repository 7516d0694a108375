// The figure of the page "Drag a problem": what ball.js computes, drawn as SVG.
(() => {
  "use strict";
  const root = document.getElementById("playground");
  if (!root) return;
  const ball = window.dfwBall;
  const REACH = 2.4; // half the width of the plane that is shown
  const SHAPES = {
    identity: [[1, 0], [0, 1]],
    stretched: [[2, 0], [0, 0.7]],
    tilted: [[1.5, 0.9], [0.9, 1]],
  };
  const state = { shape: "tilted", bend: 0, // 1 − 1/p: from 0, where p = 1, to 1, where it is ∞
    t: 1, w: [1, 1], target: [1.5, 0.9], guess: [-0.4, 0.3] };

  root.innerHTML = `
    <div class="plane"><svg viewBox="-2.4 -2.4 4.8 4.8" role="img"
      aria-label="A ball, the contours of f, the solution and its derivatives">
      <defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5"
        orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>
      <path class="axes" d="M-2.4 0H2.4M0 -2.4V2.4"/>
      <g class="contours"></g><path class="ball"/><path class="support"/>
      <path class="rate-q"/><line class="rate-t" marker-end="url(#tip)"/>
      <line class="pull"/><line class="to-vertex"/><circle class="vertex" r="0.05"/>
      <circle class="solution" r="0.07"/>
      <circle class="handle target" r="0.1" tabindex="0" role="slider"
        aria-label="where f is least; arrow keys move it"/>
      <circle class="handle guess" r="0.085" tabindex="0" role="slider"
        aria-label="a guess; arrow keys move it"/>
    </svg></div>
    <div class="panel">
      <label>p <output data-of="p"></output>
        <input name="bend" type="range" min="0" max="1" step="0.01"></label>
      <label>t <output data-of="t"></output>
        <input name="t" type="range" min="0.1" max="2" step="0.01"></label>
      <label>w₁ <output data-of="w0"></output>
        <input name="w0" type="range" min="0.3" max="2.5" step="0.01"></label>
      <label>w₂ <output data-of="w1"></output>
        <input name="w1" type="range" min="0.3" max="2.5" step="0.01"></label>
      <label>P <select name="shape"><option value="identity">identity: a projection</option>
        <option value="stretched">stretched</option><option value="tilted">tilted</option></select></label>
      <dl>
        <dt>q</dt><dd data-of="q"></dd>
        <dt class="of-solution">x*</dt><dd data-of="x"></dd>
        <dt>face</dt><dd data-of="face"></dd>
        <dt>gap of x*</dt><dd data-of="gap"></dd>
        <dt>price of t</dt><dd data-of="price"></dd>
        <dt class="of-t">∂x*/∂t</dt><dd data-of="dt"></dd>
        <dt class="of-q">∂x*/∂q</dt><dd data-of="dq"></dd>
        <dt>∂x*/∂w</dt><dd data-of="dw"></dd>
        <dt class="of-guess">guess</dt><dd data-of="guess"></dd>
      </dl>
    </div>
    <pre class="same"><code></code></pre>`;

  const svg = root.querySelector("svg");
  const part = (name) => svg.querySelector(`.${name}`);
  const say = (name, text) => { root.querySelector(`[data-of="${name}"]`).textContent = text; };
  const number = (v, digits = 3) => (Object.is(v, -0) || Math.abs(v) < 0.5 * 10 ** -digits
    ? (0).toFixed(digits) : v.toFixed(digits)).replace("-", "−");
  const vector = (v) => `(${number(v[0])}, ${number(v[1])})`;
  const set = (node, values) => Object.entries(values).forEach(([k, v]) => node.setAttribute(k, v));
  const path = (points) => `M${points.map((v) => `${v[0].toFixed(4)} ${(-v[1]).toFixed(4)}`).join("L")}`;
  const circle = (count, make) => path(Array.from({ length: count + 1 },
    (_, k) => make((2 * Math.PI * k) / count)));

  function problem() {
    const P = SHAPES[state.shape];
    const q = P.map((row) => -(row[0] * state.target[0] + row[1] * state.target[1]));
    return { P, q, p: state.bend > 0.995 ? Infinity : 1 / (1 - state.bend), t: state.t, w: state.w };
  }

  // a guess that has left the set goes back on the straight line to 0
  function within({ p, t, w }, y) {
    const size = ball.norm([w[0] * y[0], w[1] * y[1]], p);
    return size <= t ? y : [(y[0] * t) / size, (y[1] * t) / size];
  }

  // ellipses f(x) = f(centre) + level, by the Cholesky factor of P
  function contours({ P }, centre, solution) {
    const [l11, l21] = [Math.sqrt(P[0][0]), P[1][0] / Math.sqrt(P[0][0])];
    const l22 = Math.sqrt(P[1][1] - l21 ** 2);
    const through = Math.sqrt(Math.max(0, 2 * solution)) || 0.4;
    part("contours").innerHTML = [0.35, 0.7, 1, 1.4, 1.9, 2.5].map((k) => {
      const shape = circle(72, (angle) => {
        const [c, s] = [k * through * Math.cos(angle), k * through * Math.sin(angle)];
        const y = s / l22;
        return [centre[0] + (c - l21 * y) / l11, centre[1] + y];
      });
      return `<path d="${shape}"${k === 1 ? ' class="through"' : ""}/>`;
    }).join("");
  }

  function words({ face, free }) {
    if (face === "inside") return "none: the limit does not bind, x* is where f is least";
    if (face === "curve") return "the curve: both entries move along it";
    if (face === "side") {
      if (free[0] && free[1]) return "a side: both entries in use, tied to each other";
      return `a side: x${free[0] ? "₂" : "₁"} at its bound, x${free[0] ? "₁" : "₂"} free`;
    }
    if (free[0] || free[1]) return `a corner: only x${free[0] ? "₁" : "₂"} in use, and held`;
    return "a corner: both entries at their bounds";
  }

  function python({ P, q, p, t, w }) {
    const float = (c) => c.toFixed(4).replace(/(\.\d+?)0+$/, "$1"); // 1.0, not 1
    const list = (v) => `[${v.map(float).join(", ")}]`;
    return [
      "import torch",
      "from dfwlayer import LpBall, Quadratic, solve",
      "",
      `P = torch.tensor([${P.map(list).join(", ")}])`,
      `q = torch.tensor(${list(q)}, requires_grad=True)`,
      `w = torch.tensor(${list(w)}, requires_grad=True)`,
      `t = torch.tensor(${float(t)}, requires_grad=True)`,
      `sol = solve(Quadratic(P, q), LpBall(${p === Infinity ? 'float("inf")' : float(p)}, t, w))`,
      "print(sol.x, sol.gap, sol.multipliers)",
    ].join("\n");
  }

  function draw() {
    const now = problem();
    const { p, t, w } = now;
    const sol = ball.solve(now);
    const { x, centre } = sol;
    const guess = within(now, state.guess);
    const at = (v) => ({ cx: v[0], cy: -v[1] });
    const line = (a, b) => ({ x1: a[0], y1: -a[1], x2: b[0], y2: -b[1] });

    contours(now, centre, sol.value - ball.value(now, centre));
    part("ball").setAttribute("d", `${circle(720, (angle) => {
      const { y } = ball.boundary(now, angle);
      return [(t * y[0]) / w[0], (t * y[1]) / w[1]];
    })}Z`);
    const g = ball.gradient(now, x);
    const size = Math.hypot(...g);
    part("support").setAttribute("d", size > 1e-9
      ? path([-6, 6].map((k) => [x[0] - (k * g[1]) / size, x[1] + (k * g[0]) / size])) : "");
    part("rate-q").setAttribute("d", circle(48, (angle) => {
      const v = [0.45 * Math.cos(angle), 0.45 * Math.sin(angle)];
      return x.map((c, i) => c + sol.dq[i][0] * v[0] + sol.dq[i][1] * v[1]);
    }));
    set(part("rate-t"), line(x, x.map((c, i) => c + 0.45 * sol.dt[i])));
    part("rate-t").style.visibility = Math.hypot(...sol.dt) > 1e-9 ? "visible" : "hidden";
    set(part("pull"), line(x, centre));
    const best = ball.vertex(now, ball.gradient(now, guess));
    set(part("to-vertex"), line(guess, best));
    set(part("vertex"), at(best));
    set(part("solution"), at(x));
    set(part("target"), at(state.target));
    set(part("guess"), at(guess));
    part("target").setAttribute("aria-valuetext", vector(state.target));
    part("guess").setAttribute("aria-valuetext", vector(guess));

    say("p", p === Infinity ? "∞" : number(p, p < 10 ? 2 : 1));
    say("t", number(t, 2));
    w.forEach((v, i) => say(`w${i}`, number(v, 2)));
    say("q", vector(now.q));
    say("x", vector(x));
    say("face", words(sol));
    say("gap", sol.gap < 1e-12 ? "0 to rounding: no point of the set is better" : sol.gap.toExponential(1));
    say("price", number(sol.price));
    say("dt", vector(sol.dt));
    say("dq", sol.dq.map(vector).join(", "));
    say("dw", sol.dw.map(vector).join(", "));
    const excess = ball.value(now, guess) - sol.value;
    say("guess", `f − f* = ${number(excess)} ≤ gap = ${number(ball.gap(now, guess))}`);
    root.querySelector(".same code").textContent = python(now);
    root.dataset.solution = JSON.stringify({ ...now, p: p === Infinity ? "inf" : p, ...sol });
  }

  function moveTo(name, v) {
    const clipped = v.map((c) => Math.max(-REACH, Math.min(REACH, c)));
    state[name] = name === "guess" ? within(problem(), clipped) : clipped;
    draw();
  }

  ["target", "guess"].forEach((name) => {
    const handle = part(name);
    handle.addEventListener("pointerdown", (event) => {
      handle.setPointerCapture(event.pointerId);
      event.preventDefault();
      handle.focus({ preventScroll: true });
    });
    handle.addEventListener("pointermove", (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      const box = svg.getBoundingClientRect();
      const unit = (2 * REACH) / box.width;
      moveTo(name, [(event.clientX - box.left) * unit - REACH, REACH - (event.clientY - box.top) * unit]);
    });
    handle.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!step) return;
      event.preventDefault();
      moveTo(name, state[name].map((c, i) => c + 0.05 * step[i]));
    });
  });
  root.querySelectorAll("input, select").forEach((control) => {
    const { name } = control;
    const index = { w0: 0, w1: 1 }[name];
    control.value = index === undefined ? state[name] : state.w[index];
    control.addEventListener("input", () => {
      if (name === "shape") state.shape = control.value;
      else if (index === undefined) state[name] = Number(control.value);
      else state.w = state.w.map((v, i) => (i === index ? Number(control.value) : v));
      draw();
    });
  });
  draw();
})();
