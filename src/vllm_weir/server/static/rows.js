// Encoding of vectors, decoding of rows and of server-sent events.

/** Bytes of a value, by safetensors dtype. */
const BYTES = { F32: 4, F16: 2, BF16: 2 };

/** Return Weir's wire form of a vector, given as a Float32Array. */
export function encode(values) {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return { b64: btoa(text), dtype: "float32", shape: [values.length] };
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
}

/** Return the floating-point tensors of a safetensors file (an ArrayBuffer) as {name: Float32Array with a `shape`}. */
export function safetensors(buffer) {
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(header)) {
    if (!(dtype in BYTES)) continue;
    const values = new Float32Array((end - start) / BYTES[dtype]);
    for (let i = 0; i < values.length; i++) values[i] = readFloat(view, 8 + length + start + i * BYTES[dtype], dtype);
    tensors[name] = Object.assign(values, { shape });
  }
  return tensors;
}

function readFloat(view, offset, dtype) {
  if (dtype === "F32") return view.getFloat32(offset, true);
  const bits = view.getUint16(offset, true);
  if (dtype === "BF16") {
    const word = new DataView(new ArrayBuffer(4));
    word.setUint32(0, bits << 16);
    return word.getFloat32(0);
  }
  const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** Yield the JSON objects of a response's server-sent events as they arrive. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Return what each token of a chunk adds to its text: special tokens and partial characters add nothing. */
export function visibleParts(tokens, delta) {
  let rest = delta;
  const parts = tokens.map((token) => {
    const part = rest.startsWith(token) ? token : "";
    rest = rest.slice(part.length);
    return part;
  });
  if (parts.length) parts[parts.length - 1] += rest;
  return parts;
}
