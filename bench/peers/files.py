#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The peers of `yoke bench files`: the same work by the packages that people use for it.

  files.py --peer generate --model FOLDER --out FILE   transformers' generate(), greedy, with its cache
  files.py --peer tokenize --tokenizer FILE --text FILE   tokenizers' encode(), 100 kB at a time
  files.py --train FILE --text FILE   trains the tokenizer for both: GPT-2's kind, 40,000 words

{"ready": true} on stdout, then lines on stdin: "run N" makes N tokens, or encodes the text N times, and prints the
seconds; "quit", or the end of stdin, ends it. Both use as many threads as --threads says.
"""
import argparse
import json
import os
import sys
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("generate", "tokenize"))
    parser.add_argument("--train", metavar="FILE")
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--text", metavar="FILE")
    parser.add_argument("--out", metavar="FILE", help="where the tokens of the last run are written")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def train(arguments):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=40000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([arguments.text], trainer)
    tokenizer.save(arguments.train)


def generator(arguments):
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    prompt = torch.arange(1, 17).unsqueeze(0)

    def run(count):
        with torch.inference_mode():
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                                    min_new_tokens=count, do_sample=False, pad_token_id=0)
        with open(arguments.out, "w") as file:
            file.write(" ".join(str(token) for token in output[0, 16:].tolist()))

    return run


def tokenize(arguments):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    text = open(arguments.text, "rb").read()
    parts = [text[i : i + 100000].decode(errors="replace") for i in range(0, len(text), 100000)]

    def run(count):
        total = 0
        for _ in range(count):
            total = sum(len(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts)
        with open(arguments.out, "w") as file:
            file.write(str(total))

    return run


def main():
    arguments = parse_arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    if arguments.train:
        return train(arguments)
    run = generator(arguments) if arguments.peer == "generate" else tokenize(arguments)
    run(2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            break
        begin = time.perf_counter()
        run(int(words[1]))
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main()
