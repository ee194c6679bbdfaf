#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains tokenizers of every kind that is read here, and compares token by token.

PROGRAM SOURCE FOLDER: `PROGRAM data tokens TOKENIZER FILE` and `PROGRAM data text TOKENIZER FILE` against the packages
`tokenizers` and `sentencepiece`, trained on the text of SOURCE; the files come to lie in FOLDER.
"""
import io
import json
import pathlib
import random
import re
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
END = "<|endoftext|>"
WORDS = ["don't", "I'LL", "we'Ve", "'\u017f", "'S", "1234567", "3.14159", "\u0663\u0664\u0665", "\u00bd\u2167", "  ",
         "     ", "\t", "\t\t ", "\r\n", "\n\n", "\r", "\n \n", " \n", "\v", "\f", "\x00", "\x1f", "\x7f", "\u0085",
         "\u00a0", "\u2003", "\u2028", "\u180e", "\u200b", "\ufeff", "\u3000", "\u4f60\u597d\uff0c\u4e16\u754c",
         "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8", "\ud55c\uad6d\uc5b4", "\u0645\u0631\u062d\u0628\u0627",
         "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
         "\u0928\u092e\u0938\u094d\u0924\u0947", "e\u0301", "\u00e9", "A\u030a\u0323", "\u212b", "\ufb01",
         "\u1e9e\u00df", "\u1100\u1161\u11a8", "\u0958", "\U0001d15e", "Z\u0351\u036b\u0343\u036a\u0302",
         "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f44d\U0001f3fd",
         "\U0001f1e9\U0001f1ea", "\U00020000", "\uffff", "\U0010ffff", "\ue000", "hello", "World", "the",
         "foo_bar(baz);", "=>", "!!!", "...", "<|", "|>", "<s", "<0x41>", "\u2581", "\u2581a", "\u0120", "a" * 300,
         "ab" * 100, "x" * 5 + " " * 200 + "y", "=" * 99, "0" * 50, "Donaudampfschifffahrt" * 5, "\u4e2d" * 60]
SPECIAL = [END, "<s>", "</s>", "<mask>", "<right>", "caf\u00e9", "cafe\u0301", "<|im_end|>"]


def make_texts():
    rng = random.Random(1)
    blocks = [(0x20, 0x7e)] * 6 + [(0, 0x2ff), (0x300, 0x6ff), (0x900, 0x11ff), (0x1e00, 0x27ff), (0x3000, 0x9fff),
                                   (0xac00, 0xd7a3), (0xf900, 0xffff), (0x10000, 0x1ffff)]
    def draw():
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(WORDS)
        if kind < 0.6:
            return rng.choice(SPECIAL)
        drawn = [chr(rng.randint(*rng.choice(blocks))) for _ in range(rng.randint(1, 12))]
        # Of later letters and digits, the libraries know more or fewer.
        return "".join(c for c in drawn if unicodedata.ucd_3_2_0.category(c) != "Cn")
    lines = ["".join(draw() + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, 8))) for _ in range(3000)]
    yield "mixed", rng.choice(["\n", " "]).join(WORDS + SPECIAL + lines).encode()
    yield "invalid", b"ab \xff\xfe\xc3( \xe4\xbd \xf0\x9f\x98x\xed\xa0\x80 \xf4\x90\x80\x80\xc0\xafz \xe4\xbd"
    yield "start", (END + " a  <mask>  b <right>  c" + END).encode()
    yield "space", b" x"
    yield "empty", b""


def train(corpus, pre_tokenizer, normalizer=None, alphabet=True, model=None, specials=(END,), size=3000):
    result = Tokenizer(model or models.BPE())
    result.pre_tokenizer = pre_tokenizer
    if normalizer:
        result.normalizer = normalizer
    result.decoder = decoders.ByteLevel()
    result.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), show_progress=False, limit_alphabet=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else []))
    return result


def byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def make_byte_level(corpus):
    gpt2 = train(corpus, byte_level(True))
    gpt2.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<right>", rstrip=True, special=True)])
    yield "gpt2", gpt2, {}
    prefix = Tokenizer.from_str(gpt2.to_str())
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    yield "gpt2_prefix", prefix, {"old_merges": True}
    llama3 = train(corpus, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level()]))
    # A word of the vocabulary that no merges lead to.
    yield "llama3", llama3, {"ignore_merges": True, "word": "World"}
    qwen2 = train(corpus, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level()]),
                  normalizers.NFC(), specials=(END, "<|im_end|>"))
    qwen2.add_tokens([AddedToken("caf\u00e9", normalized=True)])
    yield "qwen2", qwen2, {}
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])
    yield "digits", train(corpus, digits, alphabet=False), {}


def make_llama2(corpus):
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    llama2 = train(corpus, pre_tokenizers.Metaspace(), alphabet=False, specials=["<unk>", "<s>", "</s>"] + fallback,
                   model=models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokens = json.loads(llama2.to_str())
    tokens["added_tokens"] = tokens["added_tokens"][:3]
    metaspace = Tokenizer.from_str(json.dumps(tokens))
    metaspace.decoder = decoders.Metaspace()
    yield "metaspace", metaspace, {}
    first = Tokenizer.from_str(metaspace.to_str())
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    first.decoder = decoders.Metaspace(prepend_scheme="first")
    yield "metaspace_first", first, {"byte_fallback": False}
    tokens["pre_tokenizer"] = None
    llama2 = Tokenizer.from_str(json.dumps(tokens))
    llama2.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    llama2.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                        decoders.Strip(" ", 1, 0)])
    yield "llama2", llama2, {}
    yield "llama2_unknown", llama2, {"byte_fallback": False, "fuse_unk": False}


def save(tokenizer, changes, path):
    tokens = json.loads(tokenizer.to_str())
    if changes.pop("old_merges", False):
        tokens["model"]["merges"] = [" ".join(pair) for pair in tokens["model"]["merges"]]
    if word := changes.pop("word", None):
        both = (word, "\u0120" + word)
        tokens["model"]["merges"] = [pair for pair in tokens["model"]["merges"] if "".join(pair) not in both]
        for wanted in both:
            tokens["model"]["vocab"].setdefault(wanted, len(tokens["model"]["vocab"]))
    tokens["model"].update(changes)
    path.write_text(json.dumps(tokens, ensure_ascii=False))
    return Tokenizer.from_file(str(path))


def make_all(source, folder):
    """Name, file or folder, encode(text), decode(tokens), size."""
    files = [path for part in ("yoke", "docs", "tests") for path in sorted((source / part).rglob("*"))
             if path.suffix in (".cpp", ".h", ".md", ".py")]
    corpus = "".join(path.read_text() for path in files)[:600_000] + " ".join(WORDS) * 3
    corpus = corpus.splitlines(keepends=True)
    def both(peer):
        return (lambda text: peer.encode(text, add_special_tokens=False).ids,
                lambda tokens: peer.decode(tokens, skip_special_tokens=False), peer.get_vocab_size())
    for name, tokenizer, changes in [*make_byte_level(corpus), *make_llama2(corpus)]:
        path = folder / f"{name}.json"
        yield name, path, *both(save(tokenizer, changes, path))
        if name == "gpt2":
            (folder / "files").mkdir()
            tokenizer.model.save(str(folder / "files"))
            peer = Tokenizer(models.BPE.from_file(str(folder / "files/vocab.json"), str(folder / "files/merges.txt")))
            peer.pre_tokenizer, peer.decoder = byte_level(True), decoders.ByteLevel()
            peer.add_special_tokens([END])
            yield "files", folder / "files", *both(peer)
    sentencepiece.set_random_generator_seed(1)
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_writer=model, vocab_size=2000, model_type=kind, byte_fallback=True,
            user_defined_symbols=["<mask>"], minloglevel=2, input_sentence_size=4000)
        path = folder / f"{kind}.model"
        path.write_bytes(model.getvalue())
        peer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        yield kind, path, peer.encode, peer.decode, peer.vocab_size()


def compare(program, name, path, encode, decode, size, texts, folder):
    def run(verb, given):
        file = folder / f"{name}.{verb}"
        file.write_bytes(given)
        return subprocess.run([program, "data", verb, path, file], check=True, stdout=subprocess.PIPE).stdout
    def differ(what, got, want):
        at = next((i for i, both in enumerate(zip(got, want)) if both[0] != both[1]), min(len(got), len(want)))
        near = slice(max(0, at - 5), at + 10)
        sys.exit(f"{name}: {what} differs at {at}: {got[near]!r}, not {want[near]!r}")
    def check_text(what, tokens):
        got, want = run("text", "".join(f"{token}\n" for token in tokens).encode()), decode(tokens).encode()
        if got not in (want, want + b"\n"):
            differ(f"text of {what}", got, want)
    count = 0
    for what, text in texts:
        if name == "unigram":  # of ways with equal scores, as repeats have, its versions choose differently
            text = re.sub(rb"(.{1,40}?)\1\1+", rb"\1", text, flags=re.DOTALL)
        got, want = [int(token) for token in run("tokens", text).split()], encode(text.decode(errors="replace"))
        if got != want:
            differ(f"tokens of {what}", got, want)
        count += len(got)
        if what == "mixed":
            check_text(what, want)
    rng = random.Random(2)
    check_text("any tokens", [rng.randrange(size) for _ in range(20_000)])
    return f"{name}: {count} tokens are equal, and the texts"


def main():
    program, source, folder = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    texts = list(make_texts())
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda one: compare(program, *one, texts, folder), list(make_all(source, folder))):
            print(line)


main()
