// Quadratics ½xᵀPx + qᵀx over weighted ℓp balls ‖w ∘ x‖_p ≤ t in two dimensions: the solution, its
// face, certificate and derivatives. The formulas are those of the library; tests compare the numbers.
(() => {
  "use strict";
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const times = (A, v) => [dot(A[0], v), dot(A[1], v)];
  const scaled = (v, c) => [c * v[0], c * v[1]];
  const plus = (a, b) => [a[0] + b[0], a[1] + b[1]];
  const zeros = () => [[0, 0], [0, 0]];

  function inverse([[a, b], [c, d]]) {
    const det = a * d - b * c;
    return [[d / det, -b / det], [-c / det, a / det]];
  }

  function norm(y, p) {
    const largest = Math.max(Math.abs(y[0]), Math.abs(y[1]));
    if (largest === 0 || p === Infinity) return largest;
    return largest * y.reduce((sum, v) => sum + Math.abs(v / largest) ** p, 0) ** (1 / p);
  }

  const value = ({ P, q }, x) => 0.5 * dot(x, times(P, x)) + dot(q, x);
  const gradient = ({ P, q }, x) => plus(times(P, x), q);

  // the point of the set that minimises ⟨g, s⟩
  function vertex({ p, t, w }, g) {
    const r = [g[0] / w[0], g[1] / w[1]];
    if (p === Infinity) return r.map((v, i) => (-Math.sign(v) * t) / w[i]);
    if (p === 1) {
      const k = Math.abs(r[0]) >= Math.abs(r[1]) ? 0 : 1;
      return r.map((v, i) => (i === k ? (-Math.sign(v) * t) / w[i] : 0));
    }
    const dual = norm(r, p / (p - 1)) || 1; // 1/p + 1/q = 1
    return r.map((v, i) => ((-Math.sign(v) * t) / w[i]) * (Math.abs(v) / dual) ** (1 / (p - 1)));
  }

  // f(x) − f* ≤ gap = ⟨g, x − s⟩
  function gap(problem, x) {
    const g = gradient(problem, x);
    const s = vertex(problem, g);
    return dot(g, [x[0] - s[0], x[1] - s[1]]);
  }

  // the point of the boundary in the direction of an angle, in units of y = w ∘ x / t, and its slope
  function boundary({ p }, angle) {
    const d = [Math.cos(angle), Math.sin(angle)];
    const turn = [-d[1], d[0]];
    const length = norm(d, p);
    const y = [d[0] / length, d[1] / length]; // the largest is ±1 exactly where p = ∞
    const share = (v) => (p === Infinity ? Number(Math.abs(v) === 1) : Math.abs(v) ** (p - 1));
    const grows = y.reduce((sum, v, i) => sum + Math.sign(v) * share(v) * turn[i], 0);
    return { y, slope: plus(scaled(turn, 1 / length), scaled(y, -grows / length)) };
  }

  // where f is least on the boundary: the best of many angles, then bisection of the derivative
  function search(problem) {
    const { t, w } = problem;
    const point = (v) => [(t * v[0]) / w[0], (t * v[1]) / w[1]];
    const steps = 1440;
    let best = 0;
    let least = Infinity;
    for (let k = 0; k < steps; k += 1) {
      const f = value(problem, point(boundary(problem, (2 * Math.PI * k) / steps).y));
      if (f < least) [best, least] = [k, f];
    }
    let [low, high] = [(2 * Math.PI * (best - 1)) / steps, (2 * Math.PI * (best + 1)) / steps];
    for (let k = 0; k < 80; k += 1) {
      const middle = 0.5 * (low + high);
      const at = boundary(problem, middle);
      if (dot(gradient(problem, point(at.y)), point(at.slope)) > 0) high = middle;
      else low = middle;
    }
    return settled(boundary(problem, 0.5 * (low + high)).y, problem.p);
  }

  // corners are met exactly
  function settled(y, p) {
    const near = 1e-9;
    if (p === 1) {
      const k = y.findIndex((v) => Math.abs(v) < near);
      return k < 0 ? y : y.map((v, i) => (i === k ? 0 : Math.sign(v)));
    }
    if (p === Infinity) return y.map((v) => (1 - Math.abs(v) < near ? Math.sign(v) : v));
    return y;
  }

  function inside(problem, x) {
    const dq = inverse(problem.P).map((row) => scaled(row, -1));
    return { x, price: 0, face: "inside", free: [true, true], dq, dt: [0, 0], dw: zeros() };
  }

  // entries at ±t/w_i, the others as f wants them
  function onBounds({ P, w }, x, y, held) {
    const [dq, dt, dw] = [zeros(), [0, 0], zeros()];
    held.forEach((is, i) => {
      if (!is) return;
      dt[i] = y[i] / w[i];
      dw[i][i] = -x[i] / w[i];
    });
    held.forEach((is, i) => {
      if (is) return;
      const other = 1 - i;
      const pulled = (v) => (-P[i][other] * v) / P[i][i];
      dq[i][i] = -1 / P[i][i];
      dt[i] = pulled(dt[other]);
      dw[i][other] = pulled(dw[other][other]);
    });
    return { dq, dt, dw };
  }

  // along a smooth piece of the boundary: H d + νa = −r₁, ⟨a, d⟩ = −r₂ with H = P + λ∇²h
  function onCurve({ P, p, t, w }, x, y, price) {
    const a = y.map((v, i) => w[i] * Math.sign(v) * Math.abs(v) ** (p - 1));
    const u = [-a[1], a[0]];
    const bend = y.map((v, i) =>
      p === 1 ? 0 : (price * (p - 1) * w[i] ** 2 * Math.abs(v) ** (p - 2)) / t);
    const H = [[P[0][0] + bend[0], P[0][1]], [P[1][0], P[1][1] + bend[1]]]; // on the tangent u
    const curvature = dot(u, times(H, u));
    const out = scaled(a, 1 / dot(a, a));
    const moved = (r1, r2) => {
      const along = Number.isFinite(curvature)
        ? -(dot(u, times(H, scaled(out, -r2))) + r1) / curvature : 0;
      return plus(scaled(out, -r2), scaled(u, along));
    };
    const columns = (make) => [make(0), make(1)];
    const rows = ([c0, c1]) => [[c0[0], c1[0]], [c0[1], c1[1]]];
    return {
      dq: rows(columns((j) => moved(u[j], 0))),
      dt: moved(0, -1),
      dw: rows(columns((j) => moved((price * p * u[j] * a[j]) / w[j], (a[j] * x[j]) / w[j]))),
    };
  }

  function solve(problem) {
    const { P, q, p, t, w } = problem;
    const centre = scaled(times(inverse(P), q), -1);
    let found = null;
    if (norm([w[0] * centre[0], w[1] * centre[1]], p) <= t) found = inside(problem, centre);
    else {
      const y = search(problem);
      const x = [(t * y[0]) / w[0], (t * y[1]) / w[1]];
      const price = -dot(gradient(problem, x), x) / t;
      if (p === Infinity) {
        const held = y.map((v) => Math.abs(v) === 1);
        const face = held[0] && held[1] ? "corner" : "side";
        found = { x, price, face, free: held.map((is) => !is), ...onBounds(problem, x, y, held) };
      } else if (p === 1 && y.includes(0)) {
        const rates = onBounds({ P, w }, x, y, [true, true]);
        found = { x, price, face: "corner", free: y.map((v) => v !== 0), ...rates };
      } else {
        const face = p === 1 ? "side" : "curve";
        found = { x, price, face, free: [true, true], ...onCurve(problem, x, y, price) };
      }
    }
    return { ...found, centre, value: value(problem, found.x), gap: gap(problem, found.x) };
  }

  window.dfwBall = { boundary, gap, gradient, norm, solve, value, vertex };
})();
