// Makes extra.json with the stock tokenizers library (npm package `tokenizers`, 0.23):
//   npm install tokenizers@0.23.2 && node make_extra.mjs TOKENIZERS_DIR TINY_LLAMA_JSON TINY_QWEN3_JSON
// TOKENIZERS_DIR is what scripts/fetch-tokenizers.sh fills. Output goes to stdout.
import fs from "fs";
import path from "path";
import tokenizers from "tokenizers";

const { Tokenizer } = tokenizers;
const [dir, tinyLlama, tinyQwen3] = process.argv.slice(2);

let state = 20240607; // mulberry32
function random(n) {
  state = (state + 0x6d2b79f5) >>> 0;
  let t = Math.imul(state ^ (state >>> 15), state | 1);
  t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
  return ((t ^ (t >>> 14)) >>> 0) % n;
}
const pick = (list) => list[random(list.length)];
const range = (first, count) => () => String.fromCodePoint(first + random(count));
const of = (...list) => () => pick(list);
const pools = [
  range(32, 95), range(97, 26), () => " ".repeat(1 + random(6)),
  of("\n", "\r\n", "\t", "\r", "\n\n", " \n", "\v", "\f", "\u0085", "\u2028", "\u00a0", "\u3000",
     "\u180e", "\u200b", "\u200d", "\ufeff", "\0"),
  () => String.fromCodePoint(48 + random(10)).repeat(1 + random(5)), range(0x300, 0x70),
  range(0xc0, 0x180), range(0x1f300, 0x400), range(0x4e00, 0x5000), range(0xac00, 11172),
  range(0x1100, 0x100), range(0x600, 0x100), range(0x900, 0x80), range(0x10000, 0x4000),
  range(0xf900, 0x200), range(0x1d160, 8), range(0xe000, 0x100), range(0x378, 0x300),
  of("\u{1F468}\u200D\u{1F469}\u200D\u{1F467}\u{1F3FD}\ufe0f"),
  of("'s", "'T", "'re", "'VE", "'ll", "'\u017f", "'d", "'M", " don't", " I'LL"),
  of("the", " and", "ing", " of", " Hello", "function", "--", "...", "==", "\u00bd", "\u2160"),
  // assigned after Unicode 14.0, or normalized only by newer tables than the stock library's
  of("\u{16d67}", "\u{16d63}", "\u{113c2}", "\u{113b8}", "\u1c89", "\ua7cb", "\u{10d50}",
     "\u{31350}", "\u{1ccf0}", "\u{1611e}", "\u{11f41}", "\u{1171e}", "\u0897", "\u0898",
     "\u{11935}\u{11930}", "\u0eba", "\u{1e4f0}", "\u{1fadf}"),
];
function text(added, length) {
  let out = "";
  const mode = random(4);
  const two = [random(pools.length), random(pools.length)];
  for (let i = 1 + random(length); i > 0; --i) {
    if (added.length && random(12) === 0) out += pick(["", " ", "  ", "a"]) + pick(added) + pick(["", " ", "\n ", "b"]);
    else if (mode === 0) out += pick(pools)();
    else if (mode === 1) out += pools[pick(two)]();
    else if (mode === 2) out += pools[random(4)]();
    else out += pools[pick([0, 1, 2, 4, 19, 20])]();
  }
  return out;
}
async function cases(json, count, length, more = []) {
  const tokenizer = Tokenizer.fromString(JSON.stringify(json));
  const added = json.added_tokens.map((t) => t.content);
  const list = [...more];
  while (list.length < count + more.length) list.push(text(added, length));
  const out = [];
  for (const t of list) {
    const ids = (await tokenizer.encode(t, null, { addSpecialTokens: true })).getIds();
    const bare = (await tokenizer.encode(t, null, { addSpecialTokens: false })).getIds();
    const c = { text: t, ids };
    if (JSON.stringify(bare) !== JSON.stringify(ids)) c.ids_nospecial = bare;
    const all = await tokenizer.decode(ids, false);
    const skipped = await tokenizer.decode(ids, true);
    if (all !== t) c.decoded = all;
    if (skipped !== all) c.decoded_skipping = skipped;
    out.push(c);
  }
  return out;
}

const read = (file) => JSON.parse(fs.readFileSync(file, "utf8"));
const sets = [];
for (const [name, file] of [["llama3", path.join(dir, "llama3.json")], ["qwen3", path.join(dir, "qwen3.json")],
                            ["tiny-llama", tinyLlama], ["tiny-qwen3", tinyQwen3]]) {
  sets.push({ tokenizer: name, patch: {}, cases: await cases(read(file), 60, 30) });
}

const byteLevel = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false };
const split = (pattern, behavior, invert = false) => ({ type: "Split", pattern, behavior, invert });
const pre = (...steps) => ({ type: "Sequence", pretokenizers: [...steps, byteLevel] });
const token = (id, content, flags) => ({ id, content, single_word: false, lstrip: false, rstrip: false,
                                         normalized: false, special: false, ...flags });
const begin = token(0, "<|begin_of_text|>", { special: true });
const end = token(1, "<|end_of_text|>", { special: true });
const base = read(tinyLlama);
const n = Object.keys(base.model.vocab).length;
const patches = [];
for (const behavior of ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]) {
  for (const invert of [false, true]) {
    patches.push({ pre_tokenizer: pre(split({ Regex: "\\s|'|[0-9]" }, behavior, invert)) });
  }
  patches.push({ pre_tokenizer: pre(split({ String: " a" }, behavior), split({ String: "e" }, behavior)) });
}
for (const regex of [
  "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
  "[\\p{Han}]+|[\\p{Hiragana}\\p{Katakana}]+|\\p{Hangul}", "a*", "(?=[A-Z])", "^.|.$", "(?<=\\d)\\D", "[^\\S\\n]+|\\P{L}",
]) {
  patches.push({ pre_tokenizer: pre(split({ Regex: regex }, "Isolated")) });
}
patches.push({ pre_tokenizer: pre({ type: "Digits", individual_digits: true }) });
patches.push({ pre_tokenizer: pre({ type: "Digits", individual_digits: false }) });
patches.push({ pre_tokenizer: { ...byteLevel, add_prefix_space: true, use_regex: true } });
patches.push({ pre_tokenizer: { type: "Sequence", pretokenizers: [split({ String: "\n" }, "Removed"), { ...byteLevel, add_prefix_space: true }] } });
for (const type of ["NFC", "NFD", "NFKC", "NFKD"]) patches.push({ normalizer: { type } });
patches.push({ normalizer: { type: "Sequence", normalizers: [{ type: "Prepend", prepend: "_" }, { type: "Replace", pattern: { String: " " }, content: "__" }, { type: "Replace", pattern: { Regex: "[aeiou]+" }, content: "\u00e9" }, { type: "NFD" }] },
               added_tokens: [begin, end, token(n, "caf\u00e9", { normalized: true }), token(n + 1, "caf\u00e9 au", {})] });
for (const flags of [{ lstrip: true }, { rstrip: true }, { lstrip: true, rstrip: true }, { single_word: true }, { single_word: true, lstrip: true, normalized: true }]) {
  patches.push({ added_tokens: [begin, end, token(n, "abc", flags), token(n + 1, "abcd", {}), token(n + 2, "  ", flags), token(n + 3, "bx", { ...flags, special: true }), token(n + 4, "\u00e9!", flags)] });
}
patches.push({ added_tokens: [begin, end, token(n, "\u212b", { normalized: true }), token(n + 1, "e\u0301", { normalized: true, special: true }), token(n + 2, "\u00c5x", { normalized: true })], normalizer: { type: "NFC" } });
const piece = (id) => ({ SpecialToken: { id, type_id: 0 } });
const A = { Sequence: { id: "A", type_id: 0 } };
const special_tokens = { x: { id: "x", ids: [1, 5], tokens: ["<|end_of_text|>", "$"] }, y: { id: "y", ids: [0], tokens: ["<|begin_of_text|>"] } };
const template = (...single) => ({ type: "TemplateProcessing", single, pair: [A, { Sequence: { id: "B", type_id: 0 } }], special_tokens });
patches.push({ post_processor: { type: "Sequence", processors: [{ ...byteLevel, type: "ByteLevel" }, template(piece("y"), A, piece("x"), piece("y")), byteLevel] } });
for (const patch of patches) {
  const json = { ...base, ...patch };
  const more = (json.added_tokens ?? []).flatMap((t) => [t.content, ` ${t.content}  ${t.content}`, `x${t.content}`]);
  sets.push({ tokenizer: "tiny-llama", patch, cases: await cases(json, 14, 16, [...more, "caf\u00e9 au lait", "e\u0301A\u030ax", "12ab c  D\n"]) });
}
const note = "Made by make_extra.mjs with the stock tokenizers library 0.23.2. 'patch' replaces members of the named " +
  "tokenizer.json; 'decoded' is present where it differs from the text, 'decoded_skipping' (special tokens left out) " +
  "where it differs from that.";
console.log(`{"note": ${JSON.stringify(note)},\n"sets": [`);
console.log(sets.map((s) => `{"tokenizer": ${JSON.stringify(s.tokenizer)}, "patch": ${JSON.stringify(s.patch)}, "cases": [\n` +
  s.cases.map((c) => JSON.stringify(c)).join(",\n") + "]}").join(",\n"));
console.log("]}");
