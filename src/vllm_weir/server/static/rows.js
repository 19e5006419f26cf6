// What travels: vectors out, rows and server-sent events in.

const BYTES = { F32: 4, F16: 2, BF16: 2 };

/** Float32Array -> Weir's wire form of a vector. */
export function encode(values) {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return { b64: btoa(text), dtype: "float32", shape: [values.length] };
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
}

/** ArrayBuffer of a safetensors file -> {name: Float32Array} of its floating-point tensors. */
export function safetensors(buffer) {
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const out = {};
  delete header.__metadata__;
  for (const [name, { dtype, data_offsets: [from, to] }] of Object.entries(header)) {
    if (!(dtype in BYTES)) continue;
    const values = new Float32Array((to - from) / BYTES[dtype]);
    for (let i = 0; i < values.length; i++) values[i] = read(view, 8 + length + from + i * BYTES[dtype], dtype);
    out[name] = values;
  }
  return out;
}

function read(view, at, dtype) {
  if (dtype === "F32") return view.getFloat32(at, true);
  const bits = view.getUint16(at, true);
  if (dtype === "BF16") {
    const word = new DataView(new ArrayBuffer(4));
    word.setUint32(0, bits << 16);
    return word.getFloat32(0);
  }
  const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** The JSON objects of a response's server-sent events, as they come. */
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
