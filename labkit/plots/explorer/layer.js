// The kernel's answer: bars, colours and steps of a time window, as packed by labkit/plots/explorer/window.py.

/** One answer of the kernel: the data of a time window. */
export class Layer {
  constructor(header, buffers) {
    Object.assign(this, header); // start, end, columns, complete, rows, styles, texts, partners, axes
    const bytes = buffers.map((b) => (b.buffer ? b.buffer.slice(b.byteOffset, b.byteOffset + b.byteLength) : b));
    const [edges, times, marks, colours, counts, most, steps, numbers] = bytes;
    this.edges = new Float64Array(edges);
    this.times = new Float64Array(times);
    this.marks = new Int32Array(marks);
    this.counts = new Uint32Array(counts);
    this.most = new Uint8Array(most);
    this.numbers = new Float64Array(numbers);
    this.lanes = new Map(); // by row: two lanes
    this.steps = new Map();
    const allSteps = new Float64Array(steps);
    let [bar, mixed, step] = [0, 0, 0];
    for (const row of header.rows) {
      this.lanes.set(row.row, row.lanes.map((lane) => {
        const own = { first: bar, last: bar + lane.bars, complete: lane.complete, mixed: lane.mixed ? mixed++ : -1 };
        bar = own.last;
        return own;
      }));
      this.steps.set(row.row, allSteps.subarray(step, step + row.steps));
      step += row.steps;
    }
    this.image = mixed ? imageOf(new Uint8ClampedArray(colours), this.columns, mixed) : null;
  }

  get columnNs() {
    return (this.end - this.start) / this.columns;
  }

  /** The number of the first bar of a lane that ends after a point in time. */
  firstAfter(lane, ns) {
    let [low, high] = [lane.first, lane.last];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.edges[2 * middle + 1] > ns) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Whether a lane is drawn with mixed colours at this scale, rather than with its bars. */
  mixes(lane, nsPerPixel) {
    return lane.mixed >= 0 && (!lane.complete || nsPerPixel > 0.7 * this.columnNs);
  }

  /** The bars at a point in time that were not sent one by one; null if there are none. */
  crowd(lane, row, ns) {
    const column = Math.min(Math.max(Math.floor((ns - this.start) / this.columnNs), 0), this.columns - 1);
    const cell = lane.mixed * this.columns + column;
    return this.counts[cell] ? { row, count: this.counts[cell], most: this.most[cell], length: this.columnNs } : null;
  }

  bar(number, row) {
    const [issued, ready, waitStart, waitEnd, completed, bytes] = this.times.subarray(6 * number, 6 * number + 6);
    const [style, name, line, partner, operation, flags] = this.marks.subarray(6 * number, 6 * number + 6);
    const [start, end] = this.edges.subarray(2 * number, 2 * number + 2);
    return {
      row, number, start, end, issued, ready, waitStart, waitEnd, completed, bytes, style, operation, flags,
      name: this.texts[name], line: this.texts[line], partner: this.partners[partner], axis: this.axes[partner],
      layer: this,
    };
  }
}

function imageOf(colours, columns, lanes) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: lanes });
  canvas.getContext("2d").putImageData(new ImageData(colours, columns, lanes), 0, 0);
  return canvas;
}
