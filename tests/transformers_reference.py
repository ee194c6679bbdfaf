#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small models of random weights as Hugging Face's transformers save them, and what they compute.

--make FOLDER: a folder in it for each model, with config.json and model.safetensors, and given.safetensors: text
[batch, tokens], its logits, the mean loss of the next words, the loss after one step of SGD (lr 0.1), and the likeliest
30 tokens after the first 8.
--check FOLDER: loads FOLDER/NAME/ours by transformers; its logits must be those of given.safetensors to 1e-4.
"""
import argparse
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,  # noqa: E402
                          Qwen2Config, Qwen2ForCausalLM)

SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}


def make_models():
    torch.manual_seed(1)
    yield "gpt2", GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=96, resid_pdrop=0,
                                             embd_pdrop=0, attn_pdrop=0, initializer_range=0.2))
    yield "llama", LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    yield "llama3", LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=500000.0,
                                                 rope_scaling=dict(LLAMA3)))
    yield "qwen2", Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))


def loss_of(model, text):
    logits = model(text[:, :-1]).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def make(folder):
    for name, model in make_models():
        torch.manual_seed(1)
        with torch.no_grad():  # biases too, which otherwise begin as zeros
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder / name)
        text = torch.randint(96, (4, 41))
        ones = torch.ones_like(text[:1, :8])
        generated = model.generate(text[:1, :8], attention_mask=ones, max_new_tokens=30, min_new_tokens=30,
                                   do_sample=False, pad_token_id=0, eos_token_id=None)
        logits, before = loss_of(model, text)
        before.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        after = loss_of(model, text)[1]
        save_file({"text": text, "logits": logits.detach().contiguous(), "losses": torch.stack([before, after]).detach(), "generated": generated[0]},
                  folder / name / "given.safetensors")
        print(f"{name}: loss {before.item():.6f}, after a step {after.item():.6f}")


def check(folder):
    for name in sorted(path.name for path in folder.iterdir()):
        given = load_file(folder / name / "given.safetensors")
        model, report = AutoModelForCausalLM.from_pretrained(folder / name / "ours", output_loading_info=True)
        missing = [key for key in report["missing_keys"] if key != "lm_head.weight"]
        if missing or report["unexpected_keys"]:
            sys.exit(f"{name}: missing {missing}, unexpected {report['unexpected_keys']}")
        with torch.no_grad():
            apart = (model(given["text"][:, :-1]).logits - given["logits"]).abs().max().item()
        if apart > 1e-4:
            sys.exit(f"{name}: what we wrote gives other logits in transformers, by {apart}")
        print(f"{name}: read back by transformers, logits at most {apart:.1e} apart")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--make", type=pathlib.Path)
parser.add_argument("--check", type=pathlib.Path)
arguments = parser.parse_args()
if arguments.make:
    make(arguments.make)
if arguments.check:
    check(arguments.check)
