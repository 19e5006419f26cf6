// Names, messages and tokens in words: the model's short name, messages to try, and words that the model cannot read.

/** Messages for a model of which the server has none. */
export const EXAMPLES = [
  "Tell me a short story about a lighthouse.",
  "How was your day?",
  "Explain rain to a child in two sentences.",
];
/** Why a word is told of. */
export const UNKNOWN = "Words outside the model's vocabulary reach it as <unk>, or not at all.";

/** Return a model's name without the folders that it lies in. */
export function shortName(id) {
  const parts = id.split("/").filter(Boolean);
  const cached = parts.find((part) => part.startsWith("models--")); // the hub's cache: models--OWNER--NAME/snapshots/...
  if (cached) return cached.split("--").slice(2).join("--");
  return parts.slice(parts.at(-1) === "model" ? -2 : -1).join("/") || id;
}

/** Return whether a token stands for any word that the vocabulary lacks. */
export function isUnknown(token) {
  return /^(<\|?unk\|?>|\[UNK\])$/i.test(token);
}

/** Return the words of a text that its tokens do not have. */
export function unknownWords(text, tokens) {
  const gaps = [];
  let at = 0, unknown = false, lost = false;
  const close = (end, next) => {
    gaps.push({ text: text.slice(at, end), unknown });
    at = next;
    unknown = false;
  };
  for (const token of tokens) {
    let shown = token.replace(/[Ġ▁]/g, " ");
    if (!at && !unknown && text.startsWith(shown.trim())) shown = shown.trim(); // some put a space before a text
    const start = text.indexOf(shown, at);
    if (isUnknown(token)) unknown = true;
    else if (start < 0) lost = true; // bytes of a character, say: what lies between tokens tells nothing then
    else close(start, start + shown.length);
  }
  close(text.length, text.length);
  return [...new Set(gaps.filter((gap) => gap.unknown || !lost).flatMap((gap) => gap.text.split(/\s+/)).filter(Boolean))];
}
