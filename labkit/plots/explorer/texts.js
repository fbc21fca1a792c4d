// Texts: the details of a bar or a crowd of bars, times and sizes. Times are nanoseconds since the start of the trace.
// The texts of the styles come from Python. Times and sizes are formatted as in labkit/errors/units.py; a test compares.

const OPEN = 1; // flags of a bar, as window.py sends them
const ON_CUDA = 2;
const THROUGH_HOST = 4;

/** A suitable unit for a time, and its length in ns; as in labkit/errors/units.py. */
export function unitOf(ns) {
  return [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, length]) => ns >= 1.5 * length) ?? ["ns", 1];
}

const threeDigits = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);

/** A time with three digits and its unit: "67.7 ms". */
export function timeInWords(ns) {
  const [unit, length] = unitOf(ns);
  return `${threeDigits(ns / length)} ${unit}`;
}

/** A size in powers of ten: "4.19 MB". */
export function bytesInWords(bytes) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => bytes >= size) ?? ["B", 1];
  return unit == "B" ? `${bytes.toFixed(0)} B` : `${threeDigits(bytes / size)} ${unit}`;
}

/** A point in time, in the unit of the axis, with the precision that an interval of `near` ns needs. */
export function momentInWords(ns, near, whole) {
  const [unit, length] = unitOf(whole);
  return `${(ns / length).toFixed(decimals(near / 99 / length))} ${unit}`;
}

const decimals = (smallest) => Math.min(Math.max(Math.ceil(-Math.log10(smallest)), 0), 9);

/** The details of one bar, as lines; the first is its name. */
export function barInWords(bar, about) {
  const style = about.styles[bar.style];
  const took = bar.completed - bar.issued;
  const at = (ns) => momentInWords(ns - (about.zero ?? 0), took, about.duration);
  const lines = [bar.bytes ? `${bar.name}  ${bytesInWords(bar.bytes)}` : bar.name || style.legend];
  const part = bar.end - bar.start < 0.995 * took ? `  ·  this part ${timeInWords(bar.end - bar.start)}` : "";
  lines.push(`${about.ranks[about.rows[bar.row].rank]}  ·  ${timeInWords(took)}${part}`);
  if (style.legend != lines[0]) lines.push(style.legend);
  if (bar.style < about.communication) {
    lines.push(`from ${at(bar.issued)} to ${at(bar.completed)}`);
  } else {
    const later = (ns) => `${timeInWords(ns - bar.issued)} later`;
    const moments = [`issued at ${at(bar.issued)}`];
    if (bar.ready > bar.issued && bar.ready < bar.completed) moments.push(`others arrived ${later(bar.ready)}`);
    if (!(bar.flags & OPEN)) moments.push(`completed ${later(bar.completed)}`);
    lines.push(moments.join("  ·  "));
    const waited = bar.waitEnd - bar.waitStart;
    const since = bar.waitStart - bar.issued > 0.05 * took ? `, from ${later(bar.waitStart)}` : "";
    lines.push(waited > 0 ? `the rank was blocked in it for ${timeInWords(waited)}${since}` : "the rank was not blocked in it");
  }
  if (bar.flags & OPEN) lines.push("not completed when the run ended");
  if (bar.flags & THROUGH_HOST) lines.push("moved by gloo through the host's memory, copies included");
  else if (bar.flags & ON_CUDA) lines.push("timed by the GPU");
  const line = bar.line && bar.style < about.communication ? `first used at ${bar.line}` : bar.line; // lines are recorded once per name and run
  const along = bar.axis && `along ${bar.axis}`;
  const where = [bar.partner, along, line].filter(Boolean).join("  ·  ");
  return where ? [...lines, where] : lines;
}

/** The details of bars narrower than a pixel, as lines. */
export function crowdInWords(crowd, about) {
  const style = about.styles[crowd.most].legend;
  return [
    `${crowd.count} bars`,
    `${about.ranks[about.rows[crowd.row].rank]}  ·  in ${timeInWords(crowd.length)}, mostly: ${style}`,
    "each narrower than a pixel: zoom in to see them",
  ];
}

/** About `count` round numbers between two values. */
export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const first = Math.ceil(from / stride - 1e-6);
  const found = Array.from({ length: Math.max(Math.floor(to / stride + 1e-6) - first + 1, 0) }, (_, i) => (first + i) * stride);
  return { at: found, decimals: decimals(stride * 1.001) };
}

const SLIVER_PX = 8; // a bar below this width divides another one without making two of it; as in bars.py

/** The bars that get a caption: of the pieces of one span with only a sliver in between, the widest; as in bars.py. */
export function captioned(bars, pixelsPerNs) {
  const chosen = new Set(bars);
  const last = new Map(); // by span and style, the chosen piece and the end of the latest one
  for (const bar of bars) {
    const span = [bar.style, bar.name, bar.issued, bar.completed].join();
    let { best, end } = last.get(span) ?? { best: bar, end: bar.start };
    if (best !== bar && (bar.start - end) * pixelsPerNs < SLIVER_PX) {
      const wider = bar.end - bar.start > best.end - best.start;
      chosen.delete(wider ? best : bar);
      if (wider) best = bar;
    } else best = bar;
    last.set(span, { best, end: bar.end });
  }
  return chosen;
}
